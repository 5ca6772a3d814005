"""How many tokens does a verify step emit? Drafters replayed on recorded outputs, no model needed."""

from benchmarks.replay.command import main
from benchmarks.replay.replaying import replay

__all__ = ["main", "replay"]
