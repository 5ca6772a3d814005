"""Where does a step's time go? See ``python -m benchmarks.profile --help``."""

from benchmarks.profile.command import main

__all__ = ["main"]
