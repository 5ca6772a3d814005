"""How fast a replica joins a namespace, and text is pushed and pulled. See ``python -m benchmarks.joining --help``."""

from benchmarks.joining.command import main

__all__ = ["main"]
