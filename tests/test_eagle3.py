"""EAGLE-3 as it is published: both layouts give the arithmetic written out; what does not fit is said in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.errors import ModelError
from ssd.model.draft.drafter import tapped_by
from ssd.model.heads.layouts import load_head
from ssd.model.heads.networks import Eagle3Head
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.loading.load_target import open_target
from tests.models import VOCAB, tiny_model
from tests.published_heads import HIDDEN, norm, random, write
from tests.reference import head_layouts as slow

DRAFTED = torch.arange(7, 7 + 2 * 80, 2)
"""The target's ids of the 80 tokens that the head drafts."""
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_theta": 500.0, "model_type": "llama",
}  # fmt: skip
MODEL = tiny_model("Llama", num_hidden_layers=8)


def tensors(prefix: str, *, layers: int = 3, bias: bool = False) -> dict[str, torch.Tensor]:
    """As a checkpoint has them; ``prefix`` : of the head's own layer."""
    found = {
        "fc.weight": random(HIDDEN, layers * HIDDEN, seed=1),
        "norm.weight": norm(HIDDEN, 2),
        "lm_head.weight": random(len(DRAFTED), HIDDEN, seed=3),
        "d2t": DRAFTED - torch.arange(len(DRAFTED)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, DRAFTED, True),
    }
    shapes = {
        "self_attn.q_proj": (64, 2 * HIDDEN), "self_attn.k_proj": (32, 2 * HIDDEN),
        "self_attn.v_proj": (32, 2 * HIDDEN), "self_attn.o_proj": (HIDDEN, 64),
        "mlp.gate_proj": (96, HIDDEN), "mlp.up_proj": (96, HIDDEN), "mlp.down_proj": (HIDDEN, 96),
    }  # fmt: skip
    for seed, (name, shape) in enumerate(shapes.items(), 10):
        found[f"{prefix}{name}.weight"] = random(*shape, seed=seed)
    for seed, name in enumerate(("hidden_norm", "input_layernorm", "post_attention_layernorm"), 30):
        found[f"{prefix}{name}.weight"] = norm(HIDDEN, seed)
    return found


def own(directory: Path, **config: Any) -> Path:
    """The EAGLE repository's layout, as SpecForge and SGLang have it."""
    said = {**SHAPE, "draft_vocab_size": len(DRAFTED), **config}
    return write(directory, {key: value for key, value in said.items() if value is not None}, tensors("midlayer."))


def speculators(directory: Path, more: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """The speculators format."""
    said = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": SHAPE,
        "draft_vocab_size": len(DRAFTED),
        "norm_before_residual": False,
        "target_hidden_size": None,
        **config,
    }
    return write(directory, said, {**tensors("layers.0."), **(more or {})})


TEXT = torch.tensor([[5, 9, 11, 40, 8]])
STATES = [random(1, 5, HIDDEN, seed=50 + layer) for layer in range(3)]


@torch.inference_mode()
def said_by(head: Eagle3Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and next features over a short text, by slots, in three passes."""
    cache, found = SlotKVCache(2, 8, torch.device("cpu")), []
    for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
        rows = SlotRows.build(cache, [1], part.stop - part.start, torch.device("cpu"))
        features = head.combine([state[:, part] for state in STATES])
        found.append(head(TEXT[:, part], features, rows.positions, slot_rows=rows))
        cache.lengths[[1]] += part.stop - part.start
    return torch.cat([logits for logits, _ in found], 1), torch.cat([after for _, after in found], 1)


def load(directory: Path) -> Eagle3Head:
    head = load_head(directory, MODEL)
    assert isinstance(head, Eagle3Head)
    return head


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("layout", ["own", "speculators"])
def test_both_layouts_say_what_is_written_out(layout: str, norm_before_residual: bool, tmp_path: Path) -> None:
    head = load((own if layout == "own" else speculators)(tmp_path, norm_before_residual=norm_before_residual))
    assert head.feature_layers == (2, 4, 5)
    assert head.draft_to_target is not None and torch.equal(head.draft_to_target, DRAFTED)
    assert not head.training and not any(weight.requires_grad for weight in head.parameters())
    embedded = MODEL.get_input_embeddings()(TEXT[0]).detach()
    features = torch.cat(STATES, -1)[0] @ random(HIDDEN, 3 * HIDDEN, seed=1).T
    wanted = slow.eagle3(tensors("midlayer."), SHAPE, embedded, features, norm_before_residual=norm_before_residual)
    for found, each in zip(said_by(head), wanted, strict=True):
        torch.testing.assert_close(found[0], each, rtol=1e-4, atol=1e-4)


def test_two_bytes_a_weight_leave_angles_and_ids_exact(tmp_path: Path) -> None:
    plain, head = load(own(tmp_path)), load_head(tmp_path, tiny_model("Llama", num_hidden_layers=8).to(torch.bfloat16))
    assert isinstance(head, Eagle3Head) and head.rotary is not None and plain.rotary is not None
    assert torch.equal(head.rotary.inv_freq, plain.rotary.inv_freq)
    assert head.draft_to_target is not None and torch.equal(head.draft_to_target, DRAFTED)


def test_layers_are_counted_as_each_layout_counts_them(tmp_path: Path) -> None:
    """SGLang: what the layer of an index puts out; vLLM: what comes out of so many layers."""
    listed: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    assert load(own(tmp_path / "own", eagle_config=listed)).feature_layers == (2, 4, 7)
    assert load(speculators(tmp_path / "speculators", **listed)).feature_layers == (1, 3, 6)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another vocabulary": (lambda path: own(path, vocab_size=VOCAB + 1), "made for another model"),
    "another hidden size": (lambda path: own(path, hidden_size=32), "embed_tokens"),
    "another target": (lambda path: own(path, target_hidden_size=128), "target_hidden_size 128, the model has 64"),
    "more ids than entries": (lambda path: own(path, draft_vocab_size=81), "d2t has 80 entries"),
    "no such layer": (lambda path: speculators(path, eagle_aux_hidden_state_layer_ids=[2, 4]), "fc.weight"),
    "odd layers": (lambda path: speculators(path, eagle_aux_hidden_state_layer_ids=["a"]), "no list of layers"),
    "no layer config": (lambda path: speculators(path, transformer_layer_config=None), "transformer_layer_config"),
    "several layers": (lambda path: own(path, num_hidden_layers=2), "several layers"),
    "normed before": (lambda path: speculators(path, norm_before_fc=True), "norm_before_fc"),
    "unread": (lambda path: speculators(path, {"gate.weight": torch.ones(3)}), "not read, gate.weight"),
    "missing": (lambda path: write(path, SHAPE, drop(tensors("midlayer."), "norm.weight")), "norm.weight"),
    "ids outside": (
        lambda path: write(path, SHAPE, {**tensors("midlayer."), "d2t": torch.full((80,), VOCAB)}),
        "outside 0..299",
    ),
}


def drop(found: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in found.items() if key != name}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_said_in_one_line(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as refused:
        load_head(make(tmp_path), MODEL)
    assert "\n" not in str(refused.value)


def test_a_layer_that_the_model_does_not_have_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    head = load(own(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}))
    with pytest.raises(ModelError, match="reads behind layer 9, and LlamaForCausalLM has 8"):
        open_target(MODEL, num_slots=2, max_length=32, tapped=tapped_by(head, MODEL.device, MODEL.dtype))


def test_too_few_layers_for_the_usual_choice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="too few for the usual choice"):
        load_head(own(tmp_path), tiny_model("Llama"))
