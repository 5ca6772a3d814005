"""The tokens that keyed noise chooses at scored positions, on a host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise_keys import UInt64
from ssd.model.sampling.noise import LOWEST_TEMPERATURE
from ssd.model.sampling.row_choice import choose_rows

_ALL_TOKENS = float(1 << 62)
_LOWEST = float(np.float32(LOWEST_TEMPERATURE))


def host_tokens(
    logits: torch.Tensor, rows: Sequence[int], counts: Sequence[int], params: Sequence[SamplingParams], keys: UInt64
) -> npt.NDArray[np.int64]:
    """The argmax of `truncated_scores` and the noise of each key, of equals the first: int64[sum(counts)].

    logits : [B, T, V], any float type, on a CPU. Of row ``rows[r]`` the first ``counts[r]`` positions, under
    ``params[r]`` (temperature > 0). keys : uint64[sum(counts)]. O(V) for a position as a rule.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        logits = logits[list(rows), : max(counts)].float()
        rows = range(len(rows))
    return choose_rows(
        logits.numpy(),
        np.array(rows, np.int64),
        np.array(counts, np.int64),
        np.array([max(p.temperature, _LOWEST) for p in params], np.float32),
        np.array([(p.top_k if p.top_k > 0 else _ALL_TOKENS, p.top_p, log_min_p(p)) for p in params]),
        keys,
    )


def log_min_p(params: SamplingParams) -> float:
    """How far below the highest a score may be; -inf where there is no such bound."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf
