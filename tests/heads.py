"""Draft heads for tests: one that knows all there is to know, and ones with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from ssd.model.draft.drafter import HeadDrafter, feature_spec
from ssd.model.heads.networks import Eagle3Head, Head, MedusaHead
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.layers.hidden_states import FeatureSpec
from ssd.model.loading.load_target import open_target
from ssd.model.runners.slot_runner import SlotRunner
from tests.models import tiny_model


def forgetful_model() -> PreTrainedModel:
    """A tiny model whose next token depends on the last one alone."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


class PerfectHead(Head):
    """Knows what a forgetful model will say: it is one."""

    feature_layers = (1,)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.feature_size: int = model.config.hidden_size
        self._model = (model,)

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own logits, whatever the features."""
        logits = self._model[0](input_ids=token_ids, position_ids=position_ids, use_cache=False, **attention).logits
        return logits, features


def random_medusa(hidden_size: int, vocab_size: int) -> MedusaHead:
    """Three tokens ahead, by weights that say nothing."""
    torch.manual_seed(2)
    return MedusaHead(hidden_size, vocab_size, 3)


def random_eagle3(model: PreTrainedModel, layers: Sequence[int], draft_vocab_size: int | None) -> Eagle3Head:
    """A head whose weights say nothing, over a reduced vocabulary unless that is None."""
    own = model.config.get_text_config()
    config = LlamaConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=ATTENTION_NAME,
    )
    torch.manual_seed(1)
    head = Eagle3Head(config, lambda ids: model.get_input_embeddings()(ids), layers, draft_vocab_size=draft_vocab_size)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    if draft_vocab_size is not None:
        head.draft_to_target = torch.randperm(own.vocab_size)[:draft_vocab_size].sort().values
    return head.to(model.dtype).eval()


def head_drafter(
    model: PreTrainedModel, head: Head, *, num_slots: int = 4, max_length: int = 96, chunk_tokens: int = 512
) -> tuple[SlotRunner, HeadDrafter]:
    """A head beside a fresh target that is exact, and keeps what the head reads."""
    tapped = feature_spec(head, model.device, model.dtype)
    target = open_target(
        model, num_slots=num_slots, max_length=max_length, max_draft_tokens=7, tapped=tapped, batch_invariant="on"
    )
    assert isinstance(target, SlotRunner) and target.can_verify_trees
    return target, HeadDrafter(head, target, chunk_tokens=chunk_tokens)


def everything(layers: Sequence[int], hidden_size: int) -> FeatureSpec:
    """The hidden states of layers side by side."""
    return FeatureSpec(tuple(layers), lambda hidden: torch.cat(list(hidden), -1), len(layers) * hidden_size)
