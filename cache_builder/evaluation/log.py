"""Recorded requests as one array of token ids, which several processes read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from cache_builder.replay.rows import Row, TokenIds

Int64s = npt.NDArray[np.int64]

_NUMBERS = ("starts", "prompt_lengths")


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Requests in the order in which they came.

    ``tokens`` : int32, prompt and output of each, one after another. ``starts`` : int64[n + 1], where each begins.
    ``prompt_lengths`` : int64[n]; 0 of an output whose prompt is not known.
    """

    tokens: TokenIds
    starts: Int64s
    prompt_lengths: Int64s

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row(self, number: int) -> Row:
        """One request; views."""
        begin, end = int(self.starts[number]), int(self.starts[number + 1])
        cut = begin + int(self.prompt_lengths[number])
        return Row(self.tokens[begin:cut], self.tokens[cut:end])

    @property
    def output_lengths(self) -> Int64s:
        """int64[n]."""
        return np.diff(self.starts) - self.prompt_lengths

    @property
    def with_prompt(self) -> Int64s:
        """int64: numbers of the requests that can be decoded again: of the others it is not known what was asked."""
        return np.flatnonzero((self.prompt_lengths > 0) & (self.output_lengths > 0))

    def save(self, directory: Path) -> None:
        """Write three files for `load`. Raises OSError."""
        for name in ("tokens", *_NUMBERS):
            np.save(directory / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """What `save` wrote; the tokens are mapped. Raises OSError."""
        tokens = np.load(directory / "tokens.npy", mmap_mode="r", allow_pickle=False)
        starts, prompts = (np.load(directory / f"{name}.npy", allow_pickle=False) for name in _NUMBERS)
        return cls(np.asarray(tokens), starts, prompts)
