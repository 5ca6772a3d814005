"""What a replay adds up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_builder.replay.walk import Steps

UNSCORED_SHARE = 0.05
"""Estimates made during this first part of the output tokens are not judged: they are fitted while serving."""


class Counts:
    """Steps of all outputs under one setting."""

    def __init__(self, judge_after: int = 0) -> None:
        """``judge_after`` : estimates of the steps that begin within the first so many output tokens are left out."""
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        """Held by the index at the end; 0 where a drafter does not tell."""
        self.num_accepted_tokens = 0
        """The target's own token of each step is not among them."""
        self.steps_by_drafted: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        """int64[k + 1], how many steps drafted 0, 1, ... k tokens."""
        self._judge_after = judge_after
        self._ns: list[npt.NDArray[np.int32]] = []
        self._estimates: list[npt.NDArray[np.float32]] = []
        self._hits: list[npt.NDArray[np.int32]] = []

    @property
    def num_verify_steps(self) -> int:
        """Forward passes of the target."""
        return int(self.steps_by_drafted.sum())

    @property
    def num_drafted_tokens(self) -> int:
        """Tokens the target had to check."""
        return int((self.steps_by_drafted * np.arange(len(self.steps_by_drafted))).sum())

    @property
    def propose_us(self) -> npt.NDArray[np.float64]:
        """float64[steps], the drafter's own calls."""
        return np.concatenate([np.empty(0, np.int32), *self._ns]) / 1e3

    @property
    def estimates(self) -> npt.NDArray[np.float64]:
        """float64[t], of the tokens whose predecessors were all accepted."""
        return np.concatenate([np.empty(0, np.float32), *self._estimates]).astype(np.float64)

    @property
    def hits(self) -> npt.NDArray[np.float64]:
        """float64[t], 1 where such a token was accepted, else 0."""
        return np.concatenate([np.empty(0, np.int32), *self._hits]).astype(np.float64)

    def add(self, steps: Steps, num_output_tokens: int) -> None:
        """One output. Its tokens must be those of its steps."""
        emitted = steps.accepted + 1
        if int(emitted.sum()) != num_output_tokens:
            raise AssertionError(f"{num_output_tokens} tokens came out of steps that emitted {emitted.sum()}")
        begins = self.num_output_tokens + np.cumsum(emitted) - emitted
        judged = np.repeat(begins >= self._judge_after, steps.tested)
        self._estimates.append(steps.estimates[judged])
        self._hits.append(steps.hits[judged])
        self._ns.append(steps.ns)
        added = np.bincount(steps.drafted, minlength=len(self.steps_by_drafted))
        added[: len(self.steps_by_drafted)] += self.steps_by_drafted
        self.steps_by_drafted = added
        self.num_output_tokens += num_output_tokens
        self.num_accepted_tokens += int(steps.accepted.sum())
