"""What a head says of two tokens: whether it can be driven, and whether a change of it changes that."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.head import Head, ParallelHead, RecurrentHead
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows

_LENGTH = 2


@torch.inference_mode()
def say(head: Head, target: PreTrainedModel) -> list[torch.Tensor]:
    """All that a head computes of hidden states that are always the same, as the engine would have it computed.

    Raises whatever its layers raise; TypeError where they attend to something else than the slots.
    """
    device, dtype = target.device, target.dtype
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _LENGTH, target.config.get_text_config().hidden_size, generator=generator)
    features = head.combine([hidden.to(device, dtype)] * len(head.feature_layers))
    if isinstance(head, ParallelHead):
        return [features, head(features[:, -1])]
    assert isinstance(head, RecurrentHead)
    cache = SlotKVCache(1, _LENGTH, device)
    rows = SlotRows.build(cache, [0], _LENGTH, device)
    logits, following = head(torch.zeros_like(rows.positions), features, rows.positions, slot_rows=rows)
    if not cache.bytes_per_token:
        raise TypeError("its layers attend in another way")
    return [features, logits, following]


def require_drivable(head: Head, target: PreTrainedModel) -> None:
    """Raise ModelError where the head cannot be driven beside its target."""
    try:
        say(head, target)
    except Exception as failure:  # whatever an architecture, or an odd configuration, makes of it
        raise ModelError(
            f"a {type(head).__name__} cannot be driven beside {type(target).__name__}: {first_line(failure)}"
        ) from failure
