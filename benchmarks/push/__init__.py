"""How long does `ssd-cache push` take? See ``python -m benchmarks.push --help``."""

from benchmarks.push.command import main

__all__ = ["main"]
