"""Files for a machine without a network, in parts of bounded size. See ``python -m benchmarks.offline --help``."""

from benchmarks.offline.command import main

__all__ = ["main"]
