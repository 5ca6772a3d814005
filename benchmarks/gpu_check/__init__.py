"""Everything that only a GPU can show, in one run. See ``python -m benchmarks.gpu_check --help``."""

from benchmarks.gpu_check.command import main

__all__ = ["main"]
