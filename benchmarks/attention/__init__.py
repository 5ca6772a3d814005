"""Which attention reads the slot KV cache fastest? See ``python -m benchmarks.attention --help``."""

from benchmarks.attention.command import main

__all__ = ["main"]
