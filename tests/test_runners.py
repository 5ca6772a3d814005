"""Driving models: every way gives the model's own logits, states are copied and replayed, odd layers go another way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.exactness import Report, Setting, compare, reference_greedy, run
from ssd.config import SamplingParams
from ssd.errors import ModelError
from ssd.model.layers.hidden_states import FINAL
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.memory import check_weights_fit
from ssd.model.runners.select_runner import select_runner
from ssd.model.runners.sequential_runner import CheckpointRunner, FullContextRunner, SequentialRunner
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import Target
from tests.architectures import ARCHITECTURES, SLOTS, table
from tests.heads import everything
from tests.models import VOCAB, tiny_model

# What transformers has to say about tiny settings, and about kernels that are not installed.
pytestmark = pytest.mark.filterwarnings("default")

KEEPING = [name for name, each in ARCHITECTURES.items() if each.kind not in (SLOTS, FullContextRunner)]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from([(0,), (1,), (1, 0)]),
        st.sampled_from(["forward", "prefill", "rollback"]),
        st.integers(1, 3) | st.integers(4, 24),
        st.integers(0, 2**32 - 1),
    ),
    min_size=4,
    max_size=10,
)


@cache
def both_of(name: str) -> tuple[Target, Target]:
    """A target as it must be driven, and the slow twin that keeps nothing; of one model."""
    model = tiny_model(name)
    return ARCHITECTURES[name].kind(model, 2, 128), FullContextRunner(model, 2, 128)


@pytest.mark.parametrize("name", KEEPING)
@given(actions=ACTIONS)
@settings(max_examples=6)
def test_what_slots_keep_is_what_reading_their_whole_text_again_gives(
    name: str, actions: Sequence[tuple[Sequence[int], str, int, int]]
) -> None:
    """Any passes and rollbacks, in ragged batches; of a state that cannot go back, to nothing."""
    fast, slow = both_of(name)
    for slot in range(2):
        for target in (fast, slow):
            target.rollback(slot, 0)
    for some, action, number, seed in actions:
        slots = [slot for slot in some if fast.length(slot) + number <= 128]
        if action == "rollback":
            for slot in some:
                length = max(0, fast.length(slot) - number) if fast.can_roll_back else 0
                for target in (fast, slow):
                    target.rollback(slot, length)
        elif slots:
            tokens = np.random.default_rng(seed).integers(3, VOCAB, (len(slots), number))
            counts = [number, 1 + number // 2][: len(slots)]
            if action == "prefill":
                fast.prefill(slots, tokens, counts)
                slow.prefill(slots, tokens, counts)
            else:
                found, expected = (target.forward(slots, tokens, counts).logits for target in (fast, slow))
                for row, count in enumerate(counts):
                    assert torch.allclose(found[row, :count], expected[row, :count], rtol=1e-3, atol=3e-4)
        assert [fast.length(slot) for slot in range(2)] == [slow.length(slot) for slot in range(2)]


@pytest.mark.parametrize(("name", "layers"), [("Llama", (0, 1, FINAL)), ("Llama", (0, 1)), ("Gemma 3", (0,))])
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["delay", "delay", "forward", "both", "tree", "prefill", "rollback", "copy", "features"]),
            st.sampled_from([0, 1]),
            st.integers(1, 9),
            st.integers(0, 2**32 - 1),
        ),
        min_size=3,
        max_size=12,
    )
)
@settings(max_examples=25)
def test_a_delayed_prefill_has_the_bits_of_one_computed_at_once(
    name: str, layers: Sequence[int], actions: Sequence[tuple[str, int, int, int]]
) -> None:
    """Whatever comes next: a pass over this slot, over others, a tree, a rollback, a copy, a draft head."""
    model = _flat_model(name)
    tapped = everything(layers, model.config.hidden_size)
    fast, slow = (open_target(model, num_slots=2, max_length=128) for _ in range(2))
    for target in (fast, slow):
        assert isinstance(target, SlotRunner)
        target.allocate_features(tapped)
    assert fast.can_delay_prefill
    for action, slot, number, seed in actions:
        tokens = np.random.default_rng(seed).integers(3, VOCAB, (2, number))
        if max(map(fast.length, (0, 1))) + number > 128:
            continue
        if action == "delay":
            fast.delay_prefill(slot, tokens[0].astype(np.int32))
            slow.prefill([slot], tokens[:1], [number])
            assert fast.has_delayed_prefill
        elif action == "prefill":
            for target in (fast, slow):
                target.prefill([slot], tokens[:1], [number])
        elif action == "rollback":
            for target in (fast, slow):
                target.rollback(slot, max(0, target.length(slot) - number))
        elif action == "copy":
            if fast.length(slot) > fast.length(1 - slot) or fast.length(slot) == 0:
                continue
            for target in (fast, slow):
                target.rollback(slot, 0)
                target.copy_prefix(1 - slot, slot, target.length(1 - slot))
        elif action == "features":
            found, wanted = fast.features, slow.features
            assert found is not None and wanted is not None
            assert torch.equal(*(each[slot, 0, : slow.length(slot)] for each in (found, wanted)))
        else:
            slots = [0, 1] if action == "both" else [slot]
            parents = np.array([[-1, *[0] * (number - 1)]]) if action == "tree" else None
            said = [
                target.forward(slots, tokens[: len(slots)], [number] * len(slots), parents=parents)
                for target in (fast, slow)
            ]
            assert torch.equal(said[0].logits, said[1].logits) and not fast.has_delayed_prefill
            if parents is not None:
                for target in (fast, slow):
                    target.accept_paths([slot], [number], [np.array([0, number - 1][: min(2, number)])])
        for each in (0, 1):
            assert fast.length(each) == slow.length(each)
            assert fast.cached_tokens(each).tolist() == slow.cached_tokens(each).tolist()


@cache
def _flat_model(name: str) -> Any:
    return open_target(tiny_model(name), num_slots=2, max_length=128).model


def test_a_replayed_draft_costs_no_pass_of_its_own() -> None:
    """Accepted tokens are fed again together with the next ones, until they are many."""
    model = tiny_model("Mamba-2")
    widths: list[int] = []
    model.register_forward_pre_hook(lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    target = CheckpointRunner(model, 1, 128)
    tokens = np.arange(3, 63)[None]
    target.prefill([0], tokens[:, :5], [5])
    for accepted in (3, 2):
        at = target.length(0)
        target.forward([0], tokens[:, at : at + 6], [6])
        target.rollback(0, at + accepted)
    target.forward([0], tokens[:, 10:11], [1])
    assert widths == [5, 6, 3 + 6, 5 + 1]


class Masked(torch.nn.Module):
    """An attention layer that brings a mask of its own, as sparse attention does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "slot_rows" in kwargs:
            kwargs["attention_mask"] = torch.zeros(1)
        return self.layer(*args, **kwargs)


def test_a_layer_with_a_mask_of_its_own_is_not_driven_by_slots() -> None:
    model = tiny_model()
    model.model.layers[0].self_attn = Masked(model.model.layers[0].self_attn)
    found = select_runner(model)
    assert found.kind is SequentialRunner
    assert "their own attention mask" in found.reason


class WithoutWindow:
    """A configuration as a layer sees it that does not know of the model's window."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return None if name == "sliding_window" else getattr(self._config, name)


def test_a_layer_that_keeps_its_window_to_itself_is_not_driven_by_slots() -> None:
    """The probe is shorter than this window, so the numbers alone would not tell."""
    model = tiny_model("Mistral (sliding window)", sliding_window=50)
    assert select_runner(model).kind is SlotRunner
    model.model.layers[1].self_attn.config = WithoutWindow(model.config)
    found = select_runner(model)
    assert found.kind is SequentialRunner
    assert "layer 1 attends to all" in found.reason


@pytest.mark.parametrize("name", ["Mamba-2", "Qwen3-Next", "Falcon-H1", "LFM2", "Jamba", "Mamba", "MiniMax"])
def test_a_state_is_told_from_attention_in_bfloat16_too(name: str) -> None:
    """Rounding hides small differences there, so what the configuration declares counts as well."""
    whole = select_runner(tiny_model(name)).kind
    assert select_runner(tiny_model(name).to(torch.bfloat16)).kind is whole


LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
}


def long_rope_model() -> PreTrainedModel:
    return tiny_model("Phi-3", original_max_position_embeddings=32, **LONG_ROPE)


def test_longrope_is_cut_to_its_original_context_unless_more_is_asked() -> None:
    assert open_target(long_rope_model(), num_slots=2).max_length == 32
    assert open_target(long_rope_model(), num_slots=2, max_length=100).max_length == 100


def test_a_long_text_in_the_batch_does_not_turn_the_short_ones() -> None:
    """LongRoPE picks its frequencies by the furthest position of a pass; held, every row has what it has alone."""
    target = open_target(long_rope_model(), num_slots=2, max_length=100)
    tokens = np.random.default_rng(0).integers(3, VOCAB, (2, 60))
    target.prefill([0], tokens[:1, :12], [12])
    alone = target.forward([0], tokens[:1, 12:13], [1]).logits.clone()
    target.rollback(0, 12)
    target.prefill([1], tokens[1:, :50], [50])
    together = target.forward([0, 1], np.array([tokens[0, 12:13], tokens[1, 50:51]]), [1, 1]).logits
    assert torch.allclose(together[0], alone[0], rtol=1e-4, atol=1e-5)


def test_held_longrope_is_what_generate_says_of_the_held_model() -> None:
    target = open_target(long_rope_model(), num_slots=2, max_length=100)
    prompt = np.random.default_rng(1).integers(3, VOCAB, 28).tolist()
    assert greedy(target, prompt, 12) == reference_greedy(target, [prompt], 12, [])[0].token_ids


def greedy(target: Target, prompt: Sequence[int], num_tokens: int) -> list[int]:
    output: list[int] = []
    fed = list(prompt)
    for _ in range(num_tokens):
        logits = target.forward([0], np.array([fed]), [len(fed)]).logits
        fed = [int(logits[0, -1].argmax())]
        output += fed
    return output


def test_a_model_that_does_not_fit_names_the_way_out() -> None:
    config = tiny_model().config
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 4, 1 << 20, 1 << 20
    config.num_attention_heads = config.num_key_value_heads = 1 << 13
    with pytest.raises(ModelError, match=r"GB for its weights.*ssd\.integrations\.vllm"):
        check_weights_fit("huge", config, torch.float32, torch.device("cpu"))


def test_a_model_whose_layers_hide_the_arguments_falls_back() -> None:
    """The start-up test decides by result, not by name: a model that attends differently is driven row by row."""
    model = tiny_model("Llama")
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *a, slot_rows=None, **k: forward(*a, **k)
    assert isinstance(open_target(model, num_slots=2, max_length=32), SequentialRunner)


def test_what_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="context of 128"):
        open_target(tiny_model(), num_slots=2, max_length=129)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="use auto"):
        load_model(tmp_path, dtype="float12")


# Every architecture of the table: as it says, and token for token what ``generate`` gives


MAX_TOKENS = 12
EOS = (2,)
PLAIN = Setting("none", 0, 1)
SPECULATIVE = [Setting("oracle", 5, 2), Setting("random", 3, 3)]


# What transformers has to say about tiny settings, and about kernels that are not installed.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_engine_says_what_generate_says(name: str) -> None:
    """And says it to the bit, where it is exact, with an all-knowing drafter and a random one in uneven batches."""
    kind = ARCHITECTURES[name].kind
    target = open_target(tiny_model(name), num_slots=4, max_length=64)
    assert type(target) is kind
    random = np.random.default_rng(7)
    prompts = [random.integers(3, VOCAB, length).tolist() for length in (9, 14, 5)]
    sampling = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)] * len(prompts)
    report = Report()
    theirs = reference_greedy(target, prompts, MAX_TOKENS, EOS)
    compare(target, prompts, sampling, theirs, PLAIN, eos_token_ids=EOS, report=report)
    expected, _ = run(target, prompts, sampling, None, eos_token_ids=EOS)
    for setting in SPECULATIVE:
        compare(target, prompts, sampling, expected, setting, eos_token_ids=EOS, report=report)
    assert report.passed, (str(report), report.mismatches)
    assert report.acceptance[str(PLAIN)] == 1
    assert (report.acceptance["oracle/k5/b2"] > 2) is kind.can_roll_back


def test_the_table_of_the_documentation_counts_every_architecture() -> None:
    rows = [line.split("|")[2] for line in list(table())[2:]]
    assert sum(int(row.split(":")[0]) for row in rows) == len(ARCHITECTURES)
