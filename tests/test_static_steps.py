"""Passes of fixed shape: what they score, write and leave alone is what plain passes do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssd.drafting.token_recycling import TOP_K
from ssd.model.cuda_graphs.buffers import PassBuffers, PassShape
from ssd.model.cuda_graphs.graph_runner import (
    CapturedMoves,
    CaptureFunction,
    CudaGraphCapture,
    CudaGraphRunner,
    PassFunction,
    no_garbage_collection,
    run_eagerly,
)
from ssd.model.kv.kv_cache import SlotKVCache
from ssd.model.layers.hidden_states import FINAL
from ssd.model.loading.load_target import open_target
from ssd.model.runners.attach_cuda_graphs import GraphVariant, attach_first_valid
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import PassOutput
from tests.architectures import ARCHITECTURES, SLOTS, UNTAPPED
from tests.heads import everything
from tests.models import VOCAB, tiny_model
from tests.static_targets import RECORDERS, pair_of_targets

# What transformers has to say about tiny settings.
pytestmark = pytest.mark.filterwarnings("default")

MIXED = [
    "Llama",
    "Mistral (sliding window)",
    "Gemma 2 (soft caps)",
    "gpt-oss (sinks)",
    "Mixtral",
    "Qwen3-MoE",
    "Llama 4 (chunks, temperature)",
    "DeepSeek-V3 (latent attention)",
    "GPT-2",
]
MODELS = {name: tiny_model(name) for name in MIXED}


def assert_same_state(plain: SlotRunner, static: SlotRunner) -> None:
    """Every slot holds the same text, and keys and values of it."""
    for slot in range(plain.num_slots):
        length = plain.length(slot)
        assert static.length(slot) == length
        assert np.array_equal(plain.cached_tokens(slot), static.cached_tokens(slot))
        for layer, pair in plain.kv_cache._layers.items():
            for ours, theirs in zip(static.kv_cache._layers[layer], pair, strict=True):
                assert torch.allclose(ours[slot, :, :length], theirs[slot, :, :length], rtol=1e-3, atol=2e-4)


def assert_same_top(plain: PassOutput, static: PassOutput, counts: Sequence[int]) -> None:
    """A pass that finds the most probable tokens finds those that are found in plain logits."""
    assert plain.packed_top is None and static.packed_top is not None
    expected, found = plain.top(counts)[1], static.top(counts)[1]
    for b, count in enumerate(counts):
        np.testing.assert_allclose(found[b, :count], expected[b, :count], rtol=1e-3, atol=2e-4)


def random_walk(plain: SlotRunner, static: SlotRunner, seed: int, num_actions: int) -> None:
    """Passes over chains and trees, prompts, rollbacks and copies, the same on both; everything compared after each."""
    random = np.random.default_rng(seed)
    num_slots, most = plain.num_slots, plain.max_width
    for _ in range(num_actions):
        slots = random.permutation(num_slots)[: int(random.integers(1, num_slots + 1))].tolist()
        slots = [slot for slot in slots if plain.length(slot) + most <= plain.max_length]
        action = random.choice(["chains", "chains", "trees", "prefill", "rollback"])
        if not slots or action == "rollback":
            slot = int(random.integers(num_slots))
            length = int(random.integers(0, plain.length(slot) + 1))
            for target in (plain, static):
                target.rollback(slot, length)
        elif action == "prefill":
            tokens = random.integers(3, VOCAB, (1, int(random.integers(1, most + 1))))
            for target in (plain, static):
                target.prefill(slots[:1], tokens, [tokens.shape[1]])
        else:
            counts = random.integers(1, int(random.integers(1, most + 1)) + 1, len(slots)).tolist()
            tokens = random.integers(3, VOCAB, (len(slots), max(counts)))
            if action == "chains":
                outputs = [target.forward(slots, tokens, counts) for target in (plain, static)]
            else:
                parents = np.array(
                    [[-1, *(int(random.integers(0, node)) for node in range(1, max(counts)))] for _ in slots]
                )
                outputs = [target.forward(slots, tokens, counts, parents=parents) for target in (plain, static)]
            (expected, nothing), (found, chosen) = ((output.logits, output.sampled) for output in outputs)
            assert nothing is None and chosen is not None
            assert_same_top(outputs[0], outputs[1], counts)
            for b, count in enumerate(counts):
                assert torch.allclose(expected[b, :count], found[b, :count], rtol=1e-3, atol=2e-4)
                assert torch.equal(chosen[b, :count], expected[b, :count].argmax(-1))
            if action == "trees":
                paths = [path_of(parents[b], int(random.integers(count))) for b, count in enumerate(counts)]
                for target in (plain, static):
                    target.accept_paths(slots, counts, paths)
            else:
                for slot, count in zip(slots, counts, strict=True):
                    length = plain.length(slot) - int(random.integers(0, count))
                    for target in (plain, static):
                        target.rollback(slot, length)
        assert_same_state(plain, static)


def path_of(parents: np.ndarray, node: int) -> np.ndarray:
    path = [node]
    while path[-1]:
        path.append(int(parents[path[-1]]))
    return np.array(path[::-1])


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.kind is SLOTS])
def test_static_steps_are_plain_passes(architecture: str, recorder: str) -> None:
    plain, static = pair_of_targets(tiny_model(architecture), recorder)
    if recorder == "eagerly" or architecture not in {*ASKS_THE_HOST, *COPIES_FROM_THE_HOST}:
        random_walk(plain, static, seed=3, num_actions=12)
        return
    tokens = np.random.default_rng(0).integers(3, VOCAB, (2, 5))
    expected, found = (target.forward([0, 3], tokens, [5, 5]) for target in (plain, static))
    assert static.graph_runner is not None and static.graph_runner.failure is not None and found.sampled is None
    assert torch.equal(expected.logits, found.logits)


@settings(max_examples=40)
@given(st.sampled_from(MIXED), st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 12))
def test_any_batch_and_width_comes_out_as_from_plain_passes(name: str, seed: int, slots: int, width: int) -> None:
    plain, static = pair_of_targets(MODELS[name], num_slots=slots, max_width=width, max_length=48)
    random_walk(plain, static, seed, num_actions=6)


def test_warming_up_records_common_shapes_and_touches_no_text() -> None:
    plain, static = pair_of_targets(tiny_model(), num_slots=3, max_width=5)
    static.can_verify_trees = True
    for target in (plain, static):
        target.prefill([1], np.arange(3, 13)[None], [10])
    static.warm_up()
    plain.warm_up()
    assert static.graph_runner is not None and len(static.graph_runner._graphs) == 3 * 4 + 4
    assert_same_state(plain, static)


def failing(step: PassFunction) -> PassFunction:
    raise RuntimeError("cannot be recorded\nfor some reason")


def broken(step: PassFunction) -> PassFunction:
    """Replays nothing but noise, as a graph whose inputs moved away might."""

    def replay() -> None:
        step()
        outputs = step.__closure__
        assert outputs is not None
        buffers = next(cell.cell_contents._buffers for cell in outputs if hasattr(cell.cell_contents, "_buffers"))
        buffers.outputs(PassShape(1, 1, 64, False), 1, 1)[0].add_(1.0)

    return replay


def silent(_step: PassFunction) -> PassFunction:
    """Replays nothing at all."""
    return lambda: None


@pytest.mark.parametrize(
    ("record", "said"),
    [(failing, "cannot be recorded"), (broken, "logits differ by"), (silent, "logits differ by")],
)
def test_what_cannot_be_recorded_or_differs_is_run_plainly_and_said_once(
    record: Callable[[PassFunction], PassFunction], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, static = pair_of_targets(tiny_model())
    static.graph_runner = CudaGraphRunner(static, record, tolerance=1e-4)
    for token in (5, 6, 7):
        expected, found = (target.forward([2], np.array([[token]]), [1]) for target in (plain, static))
        assert torch.equal(expected.logits, found.logits) and found.sampled is None
    assert static.graph_runner.failure is not None and said in static.graph_runner.failure
    assert sum("CUDA graphs are disabled" in record.message for record in caplog.records) == 1


def no_such_device() -> CaptureFunction:
    raise RuntimeError("no such device")


def shifted(*args: Any, **kwargs: Any) -> torch.Tensor:
    """An attention kernel that is wrong."""
    query, _keys, stored_values = args[:3]
    return torch.ones(len(query), query.shape[2], query.shape[1], stored_values.shape[3])


def test_the_first_steps_that_run_and_agree_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    target = open_target(tiny_model(), num_slots=3, max_length=64, max_draft_tokens=8)
    assert isinstance(target, SlotRunner)
    wrong = [
        GraphVariant("absent", no_such_device),
        GraphVariant("unrecordable", lambda: failing),
        GraphVariant("a wrong kernel", lambda: run_eagerly, shifted),
    ]
    attach_first_valid(
        target,
        [*wrong, GraphVariant("right", lambda: run_eagerly), GraphVariant("late", lambda: run_eagerly)],
        tolerance=1e-3,
    )
    assert target.graph_runner is not None and target.graph_runner.name == "right"
    assert [target.length(slot) for slot in range(3)] == [0, 0, 0]
    for message in (
        "absent cannot be used: no such",
        "unrecordable cannot be used",
        "a wrong kernel differ from eager",
    ):
        assert message in caplog.text
    attach_first_valid(target, wrong, tolerance=1e-3)
    assert target.graph_runner is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
@settings(max_examples=40)
def test_static_moves_move_what_moves_move(seed: int, num_moves: int) -> None:
    random = np.random.default_rng(seed)
    plain, static = (SlotKVCache(3, 204, torch.device("cpu")) for _ in range(2))
    for layer, dim in enumerate((4, 6)):
        values = torch.from_numpy(random.normal(size=(2, 3, 2, 204, dim)))
        plain._layers[layer] = values[0].clone(), values[1].clone()
        static._layers[layer] = values[0].clone(), values[1].clone()
    pairs = random.permutation(3 * 200)[:num_moves]  # distinct slots and targets, of the text alone
    moves = torch.from_numpy(np.stack([pairs // 200, random.integers(0, 200, num_moves), pairs % 200]))
    plain.move(moves)
    if not CapturedMoves(static, scratch=200, capture=run_eagerly).run(moves):
        assert num_moves > 256
        return
    for layer, pair in plain._layers.items():
        for ours, theirs in zip(static._layers[layer], pair, strict=True):
            assert torch.equal(ours[:, :, :200], theirs[:, :, :200])


@pytest.mark.parametrize("record", [failing, lambda step: lambda: None])
def test_moves_that_fail_are_left_to_the_plain_one(
    record: Callable[[PassFunction], PassFunction], caplog: pytest.LogCaptureFixture
) -> None:
    kv_cache = SlotKVCache(2, 12, torch.device("cpu"))
    kv_cache._layers[0] = torch.randn(2, 1, 12, 4), torch.randn(2, 1, 12, 4)
    before = [stored[:, :, :10].clone() for stored in kv_cache._layers[0]]
    moves = CapturedMoves(kv_cache, scratch=10, capture=record)
    for _ in range(2):
        assert not moves.run(torch.tensor([[1], [5], [2]]))
    assert all(torch.equal(stored[:, :, :10], was) for stored, was in zip(kv_cache._layers[0], before, strict=True))
    assert sum("layer by layer" in record.message for record in caplog.records) == 1


def test_nothing_is_collected_while_a_step_is_recorded() -> None:
    """Two graphs were, of a target before, and the recording under way failed: seen on an H200."""

    class Cyclic:
        def __init__(self) -> None:
            self.own = self

    watched = weakref.ref(Cyclic())
    gc.collect()
    with no_garbage_collection():
        watched = weakref.ref(Cyclic())
        for _ in range(2000):
            Cyclic()
        assert watched() is not None and not gc.isenabled()
    assert gc.isenabled()
    gc.collect()
    assert watched() is None


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@needs_gpu
def test_after_a_recording_that_the_driver_gives_up_others_are_made() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, number = CudaGraphCapture(device), torch.zeros(1, device=device)

    def waits() -> None:
        number.add_(1)
        torch.cuda.synchronize()  # which no recording allows, and no check before it sees

    def counts() -> None:
        number.add_(1)

    recorded = graphs(counts)
    with pytest.raises(RuntimeError):
        graphs(waits)
    torch.cuda.empty_cache()
    again = graphs(counts)
    number.zero_()
    recorded()
    again()
    assert number.item() == 2


@needs_gpu
def test_recordings_share_what_libraries_keep() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, matrix = CudaGraphCapture(device), torch.randn(256, 256, device=device)
    product = torch.empty_like(matrix)

    def multiplies() -> None:
        torch.mm(matrix, matrix, out=product)

    kept = [graphs(multiplies)]
    before = torch.cuda.memory_allocated(device)
    kept += [graphs(multiplies) for _ in range(8)]
    assert torch.cuda.memory_allocated(device) - before < 1 << 20


# -- a step asks nothing of the host ---------------------------------------------------------------------------------

# What transformers has to say about tiny settings.

ASKS_THE_HOST = {
    "GPT-2": "item",  # looks for the padding token in its input; published checkpoints have none
    "Phi-3.5-MoE": "host's memory",  # scales its rotary frequencies with a constant kept on the host
}
"""Architectures that are run eagerly, and how that shows."""

COPIES_FROM_THE_HOST = {"Gemma 3n (shared keys)"}
"""And one that makes a tensor of a number in every pass, which a device alone shows: its sparsity."""


class NothingFromTheHost(TorchDispatchMode):
    """Raises where a tensor in the host's memory meets one on the device; single numbers travel with the launch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        places = {tensor.device.type for tensor in tensors if tensor.ndim or tensor.device.type == "meta"}
        if len(places) > 1:
            raise RuntimeError(f"{func} takes from the host's memory")
        return result


@torch.inference_mode()
def run_without_data(name: str, *, is_tree: bool) -> None:
    """A step of the architecture that keeps hidden states, on the meta device; raises where it needs a value."""
    model = tiny_model(name).to(torch.bfloat16).to("meta")  # grouped products take no other type there
    target = SlotRunner(model, 4, 64, 8)
    layers = UNTAPPED[name][0] if name in UNTAPPED else (0, 1, FINAL)
    target.allocate_features(everything(layers, model.config.get_text_config().hidden_size))
    shape = PassShape(2, 4, 64, is_tree)
    buffers = PassBuffers(4, 32, 8, target.device, keeps_top=True)
    with NothingFromTheHost():
        inputs = buffers.inputs(shape, target.kv_cache, None)
        buffers.store(target.score(inputs.tokens, inputs.rows), inputs)
    logits, best, top = buffers.outputs(shape, 2, 4)
    assert logits.shape[:2] == best.shape == (2, 4) and best.device.type == "meta"
    assert top is not None and top.shape == (2, 4, 2, TOP_K) and top.device.type == "meta"


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.kind is SLOTS])
def test_a_step_asks_nothing_of_the_host(architecture: str, is_tree: bool) -> None:
    if architecture in ASKS_THE_HOST:
        with pytest.raises(RuntimeError, match=ASKS_THE_HOST[architecture]):
            run_without_data(architecture, is_tree=is_tree)
    else:
        run_without_data(architecture, is_tree=is_tree)


def test_what_asks_the_host_is_noticed() -> None:
    values = torch.ones(3, device="meta")
    with NothingFromTheHost():
        with pytest.raises(RuntimeError, match="item"):
            values.sum().item()
        with pytest.raises(RuntimeError, match="host's memory"):
            values.copy_(torch.ones(3))
        values.add_(1.0)
