"""Rows whose tokens are to be chosen, from lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import Draft, SamplingContext


def make_row(
    params: SamplingParams,
    *,
    prompt: Sequence[int] | npt.NDArray[np.int32] = (),
    output: Sequence[int] = (),
    draft: Sequence[int] = (),
    parents: Sequence[int] | None = None,
    seed: int = 0,
    choice_index: int = 0,
    window: int = 0,
    forbidden_ids: tuple[int, ...] = (),
) -> SamplingContext:
    """A row at the end of ``output``.

    ``window`` : of coupled noise, whose secret is ``seed``; 0 for that of the seed.
    """
    tree = None if parents is None else np.array(parents, np.int32)
    return SamplingContext(
        params=params,
        noise=SequenceNoise.coupled(seed, choice_index, window) if window else SequenceNoise.seeded(seed, choice_index),
        forbidden_ids=forbidden_ids,
        context=np.array([*prompt, *output], np.int32),
        prompt_length=len(prompt),
        draft=Draft(np.array(draft, np.int32), parents=tree),
    )
