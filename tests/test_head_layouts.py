"""Published draft heads: what each layout is read as agrees with a slow twin, and what does not fit is said."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ssd.drafting.protocol import DraftRequest
from ssd.errors import ModelError
from ssd.model.draft.drafter import HeadDrafter, feature_spec
from ssd.model.heads.layouts import load_head
from ssd.model.heads.networks import Eagle3Head, FusedHead, Head, MedusaHead, TargetParts, mtp_layers
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.layers.hidden_states import FINAL
from ssd.model.loading.load_target import open_target
from tests import published_heads as published
from tests.models import VOCAB, tiny_model
from tests.published_heads import HIDDEN, random
from tests.reference import head_layouts as slow

LENGTH = 9
DEEPSEEK = {"num_nextn_predict_layers": 1}
NORMS = {"embedding": "enorm", "hidden": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
LAYERNORMS = {
    "embedding": "token_layernorm",
    "hidden": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}
ERNIE = {"embedding": "mtp_emb_norm.0", "hidden": "mtp_hidden_norm.0", "project": "mtp_linear_proj.0"}


def config_of(target: PreTrainedModel, **more: Any) -> dict[str, Any]:
    """What a checkpoint of the target says of itself."""
    return {**json.loads(target.config.to_json_string(use_diff=False)), **more}


def mtp_directory(
    directory: Path,
    name: str,
    parts: dict[str, str],
    *,
    prefix: str = "model.layers.2.",
    layer: str | None = None,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Path, PreTrainedModel, dict[str, torch.Tensor]]:
    """A published module, the model that owns its layer, and its other tensors."""
    owner, tensors = published.one_layer(name, directory / "owner", **changes)
    own = published.mtp_parts(has_norm="norm" in parts)
    named = {f"{prefix}{parts[key]}.weight": tensor for key, tensor in own.items()}
    named |= {(layer or prefix) + key: tensor for key, tensor in tensors.items()}
    settings = config if config is not None else {**config_of(tiny_model(name)), **DEEPSEEK}
    return published.write(directory / "head", settings, named), owner, own


def in_slots(head: Head, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and next features of a row that is read in chunks, most of them beside a row two positions behind."""
    cache = SlotKVCache(3, 32, torch.device("cpu"))
    found = [feed(head, cache, [2], tokens[:, :2], features[:, :2])]
    for start, end in ((0, 4), (4, 5), (5, LENGTH - 2)):
        both = [torch.cat([each[:, start:end], each[:, start + 2 : end + 2]]) for each in (tokens, features)]
        logits, after = feed(head, cache, [0, 2], both[0], both[1])
        found.append((logits[1:], after[1:]))
    return torch.cat([logits for logits, _ in found], 1), torch.cat([after for _, after in found], 1)


@torch.inference_mode()
def feed(
    head: Head, cache: SlotKVCache, slots: list[int], tokens: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = SlotRows.build(cache, slots, tokens.shape[1], torch.device("cpu"))
    found = head(tokens, features, rows.positions, slot_rows=rows)
    cache.lengths[slots] += tokens.shape[1]
    return found


def some_text(target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [1, T], their embeddings, and hidden states to go with them."""
    generator = np.random.default_rng(0)
    tokens = torch.from_numpy(generator.integers(3, VOCAB, (1, LENGTH)))
    return tokens, target.get_input_embeddings()(tokens).detach(), random(1, LENGTH, HIDDEN, seed=9, scale=1.0)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


MTP_CASES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {"name": "DeepSeek-V3 (latent attention)", "parts": NORMS},
    "DeepSeek-V3, taken out": {
        "name": "DeepSeek-V3 (latent attention)",
        "parts": NORMS,
        "prefix": "model.layers.0.",
        "config": {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB},
    },
    "GLM-4.5": {"name": "GLM-4-MoE", "parts": NORMS},
    "GLM-4.5, a dense layer": {"name": "GLM-4-MoE", "parts": NORMS, "first_k_dense_replace": 3},
    "MiMo": {"name": "Qwen2", "parts": LAYERNORMS, "prefix": "model.mtp_layers.0."},
    "ERNIE 4.5": {"name": "ERNIE 4.5", "parts": ERNIE, "prefix": "model.", "layer": "model.mtp_block.0."},
}


@pytest.mark.parametrize("case", MTP_CASES)
def test_mtp_modules_say_what_a_plain_pass_says(case: str, tmp_path: Path) -> None:
    settings = MTP_CASES[case]
    target = tiny_model(settings["name"])
    directory, owner, parts = mtp_directory(tmp_path, **settings)
    head = load_head(directory, target)
    assert isinstance(head, FusedHead)
    assert head.feature_layers == (FINAL,)
    assert head.feature_size == HIDDEN
    tokens, embedded, features = some_text(target)
    with torch.inference_mode():
        wanted = slow.mtp(owner, 2, parts, embedded, features, hidden_first=case == "MiMo")
        logits = wanted @ target.get_output_embeddings().weight.T
    said, after = in_slots(head, tokens, features)
    assert_same(after, wanted)
    assert_same(said, logits)


def test_a_model_whose_layers_are_built_in_another_way_has_no_module() -> None:
    with pytest.raises(ModelError, match=r"cannot be used with .*'layers'"):
        mtp_layers(tiny_model("GPT-2"))
    windows = tiny_model("Gemma 3", layer_types=["sliding_attention"] * 2)
    with pytest.raises(ModelError, match="none of the model's layers has full attention"):
        mtp_layers(windows)


MEDUSA_CASES: dict[str, dict[str, Any]] = {
    "own output layers": {},
    "several blocks, pickled": {"layers": 3, "pickled": True},
    "within a whole checkpoint": {"prefix": "medusa_head."},
    "the target's output layer": {"has_outputs": False},
}


@pytest.mark.parametrize("case", MEDUSA_CASES)
def test_medusa_heads_say_what_their_blocks_say(case: str, tmp_path: Path) -> None:
    settings = MEDUSA_CASES[case]
    layers, prefix, target = settings.get("layers", 1), settings.get("prefix", ""), tiny_model()
    tensors = published.medusa(3, layers)
    blocks = [
        [tuple(tensors[f"{head}.{block}.linear.{kind}"] for kind in ("weight", "bias")) for block in range(layers)]
        for head in range(3)
    ]
    outputs = [tensors[f"{head}.{layers}.weight"] for head in range(3)]
    if not settings.get("has_outputs", True):
        outputs = [target.get_output_embeddings().weight.detach()] * 3
        tensors = {name: tensor for name, tensor in tensors.items() if "linear" in name}
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    published.write(tmp_path, {"hidden_size": HIDDEN, "vocab_size": VOCAB, "medusa_num_heads": 3}, tensors)
    if settings.get("pickled"):
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    found = load_head(tmp_path, target)
    assert isinstance(found, MedusaHead)
    assert (found.num_tokens, found.feature_layers, found.feature_size) == (3, (FINAL,), HIDDEN)
    hidden = random(2, HIDDEN, seed=8, scale=1.0)
    wanted = torch.stack([slow.medusa(blocks, outputs, row) for row in hidden])
    left, anything = hidden[:, None], torch.zeros(2, 1, dtype=torch.int64)
    with torch.inference_mode():
        for depth in range(3):
            logits, left = found(anything, left, anything)
            assert_same(logits[:, 0], wanted[:, depth])
    assert left.shape[2] == 0


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"qkv_bias": True}], ids=str)
def test_eagle_heads_say_what_is_written_out(settings: dict[str, bool], tmp_path: Path) -> None:
    target, tensors = tiny_model(), published.eagle(**settings)
    stored = {**tensors, "embed_tokens.weight": random(VOCAB, HIDDEN, seed=7)}
    head = load_head(published.write(tmp_path, published.EAGLE_SHAPE, stored), target)
    assert isinstance(head, FusedHead)
    tokens, embedded, features = some_text(target)
    wanted = slow.eagle(tensors, published.EAGLE_SHAPE, embedded[0], features[0])[None]
    said, after = in_slots(head, tokens, features)
    assert_same(after, wanted)
    assert_same(said, wanted @ target.get_output_embeddings().weight.T)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("write", [published.eagle3, published.speculators])
def test_both_layouts_of_eagle3_say_what_is_written_out(write: Any, norm_before_residual: bool, tmp_path: Path) -> None:
    target = tiny_model("Llama", num_hidden_layers=8)
    head = load_head(write(tmp_path, norm_before_residual=norm_before_residual), target)
    assert isinstance(head, Eagle3Head)
    assert head.feature_layers == (2, 4, 5)
    assert head.draft_to_target is not None and torch.equal(head.draft_to_target, published.DRAFTED)
    assert not head.training and not any(weight.requires_grad for weight in head.parameters())
    tokens, embedded, _ = some_text(target)
    states = [random(1, LENGTH, HIDDEN, seed=50 + layer) for layer in range(3)]
    features = torch.cat(states, -1) @ random(HIDDEN, 3 * HIDDEN, seed=1).T
    assert_same(head.combine(states), features)
    wanted = slow.eagle3(
        published.eagle3_tensors("midlayer."),
        published.EAGLE_SHAPE,
        embedded[0],
        features[0],
        norm_before_residual=norm_before_residual,
    )
    for found, each in zip(in_slots(head, tokens, features), wanted, strict=True):
        assert_same(found[0], each)


def test_two_bytes_a_weight_leave_angles_and_ids_exact(tmp_path: Path) -> None:
    directory, plain = published.eagle3(tmp_path), tiny_model("Llama", num_hidden_layers=8)
    exact, head = (load_head(directory, model) for model in (plain, deepcopy(plain).to(torch.bfloat16)))
    assert head.rotary is not None and exact.rotary is not None
    assert torch.equal(head.rotary.inv_freq, exact.rotary.inv_freq)
    assert head.draft_to_target is not None and torch.equal(head.draft_to_target, published.DRAFTED)


def test_layers_are_counted_as_each_layout_counts_them(tmp_path: Path) -> None:
    """SGLang: what the layer of an index puts out; vLLM: what comes out of so many layers."""
    listed: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    target = tiny_model("Llama", num_hidden_layers=8)
    assert load_head(published.eagle3(tmp_path / "own", eagle_config=listed), target).feature_layers == (2, 4, 7)
    assert load_head(published.speculators(tmp_path / "its", **listed), target).feature_layers == (1, 3, 6)


@pytest.mark.parametrize("case", ["GLM-4.5", "MiMo"])
def test_a_head_says_the_same_beside_faster_layers(case: str, tmp_path: Path) -> None:
    """Whether it is loaded before its target is opened or behind."""
    settings = MTP_CASES[case]
    target = tiny_model(settings["name"])
    directory, _owner, _parts = mtp_directory(tmp_path, **settings)
    before = load_head(directory, target)
    tokens, _embedded, features = some_text(target)
    wanted, _ = in_slots(before, tokens, features)
    open_target(target, num_slots=2, max_length=32)
    for head in (before, load_head(directory, target)):
        said, _ = in_slots(head, tokens, features)
        assert_same(said, wanted)


@pytest.mark.parametrize("name", ["Cohere", "Granite", "Gemma 2 (soft caps)", "Llama"])
def test_the_output_layer_of_the_target_is_read_as_the_target_reads_it(name: str) -> None:
    target = tiny_model(name, **({"logits_scaling": 3.0} if name == "Granite" else {}))
    tokens, _embedded, _features = some_text(target)
    with torch.inference_mode():
        found = target.get_decoder()(tokens).last_hidden_state
        torch.testing.assert_close(TargetParts(target).logits(found), target(tokens).logits)


@pytest.mark.parametrize("name", ["EAGLE", "Medusa"])
@torch.inference_mode()
def test_the_first_drafted_token_is_what_the_twin_says_next(name: str, tmp_path: Path) -> None:
    """By the target's own hidden states, as they are kept from pass to pass."""
    model, plain = tiny_model(), tiny_model()
    eagle, medusa = published.eagle(), published.medusa(3, 1)
    config = published.EAGLE_SHAPE if name == "EAGLE" else {"medusa_num_heads": 3}
    directory = published.write(tmp_path, config, eagle if name == "EAGLE" else medusa)

    def twin(text: torch.Tensor) -> torch.Tensor:
        hidden = plain.get_decoder()(text[None, :-1]).last_hidden_state[0]
        embedded = plain.get_input_embeddings()(text[1:])
        if name == "Medusa":
            block = medusa["0.0.linear.weight"], medusa["0.0.linear.bias"]
            return slow.medusa([[block]], [medusa["0.1.weight"]], hidden[-1])[0]
        after = slow.eagle(eagle, published.EAGLE_SHAPE, embedded, hidden)
        return after[-1] @ plain.get_output_embeddings().weight.T

    head = load_head(directory, model)
    tapped = feature_spec(head, model.device, model.dtype)
    target = open_target(model, num_slots=4, max_length=64, tapped=tapped, batch_invariant="on")
    drafter, text, fed = HeadDrafter(head, target), np.random.default_rng(5).integers(3, VOCAB, 30), 0
    for length in (9, 10, 14, 30):
        target.forward([1], text[None, fed : length - 1], [length - 1 - fed])
        fed = length - 1
        request = DraftRequest("a", text[:length].astype(np.int32), 1, None, 3, token_costs=np.zeros(1), slot=1)
        (draft,), chances = drafter.propose([request]), torch.softmax(twin(torch.from_numpy(text[:length])), -1)
        assert draft.token_ids[0] == int(chances.argmax())
        assert draft.probabilities is not None
        assert draft.probabilities[0] == pytest.approx(float(chances.max()), rel=1e-3)
