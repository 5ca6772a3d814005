"""Whether a head computes anything where it is to be driven."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.head import RecurrentHead
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows

_LENGTH = 2


@torch.inference_mode()
def require_drivable(head: RecurrentHead, target: PreTrainedModel) -> None:
    """Raise ModelError where the slots' attention cannot drive the head's layers. One pass over two tokens."""
    cache = SlotKVCache(1, _LENGTH, target.device)
    rows = SlotRows.build(cache, [0], _LENGTH, target.device)
    features = torch.zeros(1, _LENGTH, head.feature_size, dtype=target.dtype, device=target.device)
    try:
        head(torch.zeros_like(rows.positions), features, rows.positions, slot_rows=rows)
    except Exception as failure:  # whatever an architecture, or an odd configuration, makes of it
        raise ModelError(
            f"a {type(head).__name__} cannot be driven beside {type(target).__name__}: {first_line(failure)}"
        ) from failure
    if not cache.bytes_per_token:
        raise ModelError(
            f"a {type(head).__name__} cannot be driven beside {type(target).__name__}: its layers attend in another way"
        )
