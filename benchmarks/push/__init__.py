"""How fast a cache directory is pushed into the shared log. See ``python -m benchmarks.push --help``."""

from benchmarks.push.command import main

__all__ = ["main"]
