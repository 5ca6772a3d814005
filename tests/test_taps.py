"""Hidden states out of the slot path: what is stored of a position is what the model itself says, wherever it goes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from ssd.errors import ModelError
from ssd.model.cpu.cpu_decoder import is_flat
from ssd.model.cuda_graphs.graph_runner import CudaGraphRunner
from ssd.model.layers.hidden_states import FINAL, FeatureSpec, check_hidden_states
from ssd.model.loading.load_target import open_target
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import pad_rows
from tests.architectures import ARCHITECTURES, SLOTS, UNTAPPED
from tests.heads import everything
from tests.models import VOCAB, tiny_model
from tests.reference.tree import node_parents
from tests.static_targets import RECORDERS, recorder_of

# What transformers has to say about tiny settings.
pytestmark = pytest.mark.filterwarnings("default")

Ints = npt.NDArray[np.int64]

LAYERS: tuple[int, ...] = (0, 1, FINAL)


def tapping(model: PreTrainedModel, layers: tuple[int, ...] = LAYERS, **sizes: int) -> SlotRunner:
    target = SlotRunner(model, sizes.get("num_slots", 4), sizes.get("max_length", 64), 8)
    target.allocate_features(everything(layers, model.config.get_text_config().hidden_size))
    return target


def features_of(target: SlotRunner, slot: int) -> torch.Tensor:
    assert target.features is not None
    return target.features[slot, 0, : target.length(slot)]


@torch.inference_mode()
def own_states(model: PreTrainedModel, tokens: Ints, layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    """What transformers says, of a plain pass over all tokens; FINAL is what the output layer is given."""
    used = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(tokens[None].astype(np.int64)).to(model.device)
    read: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _module, given: read.append(given[0]))
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    model.set_attn_implementation(used)
    return torch.cat([(read[0] if layer == FINAL else states[layer])[0] for layer in layers], -1)


def text(length: int, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(3, VOCAB, length, np.int64)


def read_in_parts(target: SlotRunner, slots: list[int], texts: list[Ints]) -> None:
    """A part by itself without logits, the rest in ragged passes; each pass after one that is taken back."""
    for slot, tokens in zip(slots, texts, strict=True):
        target.prefill([slot], pad_rows([tokens[:5]]), [5])
    while rows := [b for b, slot in enumerate(slots) if target.length(slot) < len(texts[b])]:
        held = [target.length(slots[b]) for b in rows]
        wrong = [text(4, seed=9)] * len(rows)
        right = [texts[b][length:][: 2 + b] for b, length in zip(rows, held, strict=True)]
        for parts in (wrong, right):
            for b, length in zip(rows, held, strict=True):
                target.rollback(slots[b], length)
            target.forward([slots[b] for b in rows], pad_rows(parts), [len(part) for part in parts])


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.kind is SLOTS])
def test_every_architecture_taps_or_says_why_not(name: str) -> None:
    """What is stored is what transformers gives out with output_hidden_states."""
    model = tiny_model(name)
    layers = LAYERS
    if name in UNTAPPED:
        layers, reason = UNTAPPED[name]
        with pytest.raises(ModelError, match=reason):
            check_hidden_states(model, LAYERS)
    check_hidden_states(model, layers)
    target = tapping(model, layers)
    texts = [text(11), text(14, seed=1)]
    read_in_parts(target, [2, 0], texts)
    for slot, tokens in zip([2, 0], texts, strict=True):
        torch.testing.assert_close(features_of(target, slot), own_states(model, tokens, layers), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_flat_model_tells_its_hidden_states_itself(name: str) -> None:
    """Without hooks, which would have it called by the library's code, this target and those opened after it."""
    model = tiny_model(name)
    every = tuple(range(len(model.model.layers) + 1))
    tapped = everything((*every[:-1], FINAL), model.config.hidden_size)
    target = open_target(model, num_slots=3, max_length=64, tapped=tapped)
    assert isinstance(target, SlotRunner) and is_flat(model)
    texts = [text(11), text(14, seed=1)]
    read_in_parts(target, [2, 0], texts)
    for slot, tokens in zip([2, 0], texts, strict=True):
        expected = own_states(tiny_model(name), tokens, tapped.layers)
        torch.testing.assert_close(features_of(target, slot), expected, atol=1e-4, rtol=1e-3)
    outer = tapping(model, (every[-1],))  # what comes out of the last layer is in no list of the library's
    read_in_parts(outer, [1], texts[:1])
    final = own_states(tiny_model(name), texts[0], (FINAL,))
    torch.testing.assert_close(model.model.norm(features_of(outer, 1)), final, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_hidden_states_that_nothing_combines_are_stored_layer_by_layer(name: str) -> None:
    model = tiny_model(name)
    target = SlotRunner(model, 4, 64, 8)
    target.can_verify_trees = True
    target.allocate_features(FeatureSpec(LAYERS, None, len(LAYERS) * model.config.hidden_size))
    texts = [text(11), text(14, seed=1)]
    read_in_parts(target, [2, 0], texts)
    target.forward([2], pad_rows([text(3, seed=4)]), [3], parents=np.array([[-1, 0, 0]]))
    target.accept_paths([2], [3], [np.array([0, 2])])
    target.copy_prefix(2, 3, 13)
    texts[0] = np.concatenate([texts[0], text(3, seed=4)[[0, 2]]])
    for slot, tokens in ((2, texts[0]), (3, texts[0]), (0, texts[1])):
        assert target.features is not None
        found = target.features[slot, :, : len(tokens)].transpose(0, 1).flatten(1)
        torch.testing.assert_close(found, own_states(model, tokens), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("recorder", RECORDERS)
def test_recorded_passes_store_what_plain_ones_do(recorder: str) -> None:
    model = tiny_model()
    if recorder != "eagerly":
        model = model.to("cuda")
    plain, static = tapping(model), tapping(model)
    static.graph_runner = CudaGraphRunner(static, recorder_of(recorder), tolerance=1e-4)
    texts = [text(11), text(14, seed=1), text(9, seed=2)]
    for target in (plain, static):
        read_in_parts(target, [2, 0, 3], texts)
    assert static.graph_runner._graphs and static.graph_runner.failure is None
    for slot in (2, 0, 3):
        torch.testing.assert_close(features_of(static, slot), features_of(plain, slot), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_static", [False, True])
def test_a_kept_path_keeps_its_features(is_static: bool) -> None:
    model = tiny_model()
    target = tapping(model)
    target.can_verify_trees = True
    if is_static:
        target.graph_runner = CudaGraphRunner(target, recorder_of("eagerly"), tolerance=1e-4)
    prefix, nodes = text(6), text(6, seed=3)
    parents = node_parents([np.array([-1, -1, 1, 0, 2], np.int32)], 6)
    for slot in (1, 3):
        target.prefill([slot], pad_rows([prefix]), [6])
    target.forward([1, 3], np.stack([nodes, nodes]), [6, 6], parents=np.repeat(parents, 2, 0))
    paths = [np.array([0, 2, 3, 5]), np.array([0, 1, 4])]
    target.accept_paths([1, 3], [6, 6], paths)
    for slot, path in zip((1, 3), paths, strict=True):
        expected = own_states(model, np.concatenate([prefix, nodes[path]]))
        torch.testing.assert_close(features_of(target, slot), expected, atol=1e-4, rtol=1e-3)


def test_features_count_in_the_budget() -> None:
    """As many bytes of memory hold fewer slots."""
    model = tiny_model()
    plain = open_target(model, num_slots=64, max_length=100, kv_cache_memory_bytes=2_000_000)
    tapped = FeatureSpec((1,), lambda hidden: hidden[0], 64, bytes_per_token=256)
    target = open_target(model, num_slots=64, max_length=100, kv_cache_memory_bytes=2_000_000, tapped=tapped)
    per_token = 2_000_000 // 117
    assert plain.num_slots == per_token // 512 and target.num_slots == per_token // (512 + 64 * 4 + 256)


@pytest.mark.parametrize(
    ("name", "layers", "reason"),
    [
        ("Llama", (3,), "but LlamaForCausalLM has only 2 layers"),
        ("Mamba", (1,), "Omit the draft head"),
        ("GPT-J", (1,), "omit the draft head"),
    ],
)
def test_what_cannot_be_tapped_is_refused(name: str, layers: tuple[int, ...], reason: str) -> None:
    tapped = FeatureSpec(layers, lambda hidden: hidden[0], 64)
    with pytest.raises(ModelError, match=reason):
        open_target(tiny_model(name), num_slots=1, max_length=32, tapped=tapped)
