"""How long is a step, and how much of it is the model? See ``python -m benchmarks.decode --help``."""

from benchmarks.decode.command import main
from benchmarks.decode.shapes import SHAPES

__all__ = ["SHAPES", "main"]
