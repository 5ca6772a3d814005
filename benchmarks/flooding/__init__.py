"""Does text that nobody needs push out what everybody drafts from? See ``python -m benchmarks.flooding --help``."""

from benchmarks.flooding.command import main

__all__ = ["main"]
