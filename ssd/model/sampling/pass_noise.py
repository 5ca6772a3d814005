"""The rows whose tokens a pass can choose itself, and what it needs to do so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import SamplingRow
from ssd.model.sampling.noise import Noise
from ssd.model.sampling.target_tokens import is_ruled


def noise_of(rows: Sequence[SamplingRow], width: int) -> Noise | None:
    """What a pass over ``rows`` that is ``width`` positions wide needs to choose their tokens itself.

    Of rows that are sampled by temperature alone; all others have temperature 0. None where there is no such row.
    """
    drawn = [b for b, row in enumerate(rows) if _is_by_temperature(row)]
    if not drawn:
        return None
    keys, temperatures = np.zeros((len(rows), width), np.uint64), np.zeros((len(rows), width), np.float32)
    # What lies past a row's own positions is meaningless.
    temperatures[drawn] = np.array([rows[b].params.temperature for b in drawn], np.float32)[:, None]
    by_position = [b for b in drawn if rows[b].draft.parents is None and not rows[b].noise.is_coupled]
    if by_position:
        noises, lengths = [rows[b].noise for b in by_position], [len(rows[b].context) for b in by_position]
        keys[by_position] = SequenceNoise.seeded_keys(noises, lengths, width)
    for b in set(drawn).difference(by_position):
        own = rows[b].keys()
        keys[b, : len(own)] = own
    return Noise(keys, temperatures)


def _is_by_temperature(row: SamplingRow) -> bool:
    """Whether the row's tokens are the argmax of `noisy_scores` with noise."""
    params = row.params
    if params.greedy:
        return False
    if not np.float32(params.temperature) > 0:  # greedy, or so near to it that a float32 does not tell
        return False
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return not (is_cut or is_ruled(row))
