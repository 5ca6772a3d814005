"""What went into a cache, of a block or of a whole build."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(slots=True)
class BuildResult:
    """What went into the directory. Tokens are without separators."""

    num_records: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_skipped_prompt_tokens: int = 0
    """Prompt tokens not stored, because an earlier sequence of the segment begins with the same blocks."""
    num_stored_sequences: int = 0
    """Sequences that were in the cache that is added to already, and not stored again."""
    num_invalid: int = 0
    """Lines left out by ``skip_invalid``."""
    num_segments: int = 0
    num_reused_tokens: int = 0
    """Of segments that an earlier build which did not end had finished."""

    def add(self, other: BuildResult) -> None:
        """Count what ``other`` counted as well."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def to_json(self) -> dict[str, int]:
        """For a journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Undo ``to_json``; raises ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        if (
            not isinstance(content, dict)
            or content.keys() != names
            or any(type(n) is not int for n in content.values())
        ):
            raise ValueError("these are no counts")
        return cls(**content)
