"""The slow twin of attention over slots: each query by itself, over the keys of its path one after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def attended(
    query: Floats,
    keys: Floats,
    values: Floats,
    positions: npt.NDArray[np.int64],
    position: int,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sink: float | None,
) -> Floats:
    """What a query at ``position`` makes of the keys [n, dim] and values [n, value_dim] of its path."""
    scores, seen = [], []
    for index, at in enumerate(positions.tolist()):
        if at > position or (window is not None and at <= position - window):
            continue
        if chunk is not None and at < position - position % chunk:
            continue
        score = float(query @ keys[index]) * scale
        scores.append(softcap * np.tanh(score / softcap) if softcap is not None else score)
        seen.append(index)
    highest = max([*scores, *([] if sink is None else [sink])])
    weights = np.exp(np.array(scores) - highest)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - highest))
    return np.asarray((weights[:, None] * values[seen]).sum(0) / total)
