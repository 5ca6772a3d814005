"""Tokens that a pass chooses itself are those that are chosen from its logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import Report, Setting, compare, reference_greedy, run
from ssd.config import SamplingParams
from ssd.drafting.protocol import SamplingContext
from ssd.engine import forward_pass
from ssd.model.loading.load_target import open_target
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import (
    Noise,
    PassOutput,
    Sampler,
    argmax_with_noise,
    device_argmax,
    is_sampler_correct,
    noisy_scores,
    select_sampler,
)
from ssd.model.sampling.target_tokens import make_noise, target_tokens
from tests.models import VOCAB, tiny_model
from tests.reference.noise import position_keys
from tests.reference.tree import node_parents
from tests.sampling_rows import make_row
from tests.static_targets import RECORDERS, pair_of_targets

# What transformers has to say about tiny settings.
pytestmark = pytest.mark.filterwarnings("default")

MODEL = tiny_model()
CPU = torch.device("cpu")


def formula(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A sampler for any device."""
    return noisy_scores(logits, keys, temperatures).argmax(-1)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-60},  # 0 in float32
    {"temperature": 0.9, "top_p": 0.5},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": ((4, 9.0),)},
    {"temperature": 1.0, "allowed_token_ids": (3, 4, 5)},
]


def row_of(kind: int, seed: int, draft: list[int], **more: Any) -> SamplingContext:
    params = SamplingParams(**KINDS[kind])
    return make_row(params, prompt=[5, 6, 7], output=[4], draft=draft, seed=seed, choice_index=1, **more)


@st.composite
def batches(draw: st.DrawFn) -> list[SamplingContext]:
    has_trees = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        draft = draw(st.lists(st.integers(3, VOCAB - 1), max_size=6))
        parents = [draw(st.integers(-1, token - 1)) for token in range(len(draft))] if has_trees else None
        kind, seed = draw(st.integers(0, len(KINDS) - 1)), draw(st.integers(-(2**63), 2**63 - 1))
        rows.append(row_of(kind, seed, draft, parents=parents, window=draw(st.sampled_from([0, 1, 8]))))
    return rows


def check_batch(target: SlotRunner, rows: list[SamplingContext]) -> None:
    """What is chosen inside of the pass and what is chosen from its logits alone."""
    fed = np.zeros((len(rows), max(row.width for row in rows)), np.int64)
    for b, row in enumerate(rows):
        fed[b, 1 : row.width] = row.draft.token_ids
    slots, counts = list(range(len(rows))), [row.width for row in rows]
    noise = make_noise(rows, fed.shape[1])
    assert (noise is not None) == any(row.params.temperature in (0.3, 1.0) and plain(row) for row in rows)
    has_trees = any(row.draft.parents is not None for row in rows)
    parents = node_parents([row.draft.parents for row in rows], fed.shape[1]) if has_trees else None
    output = target.forward(slots, fed, counts, noise, parents)
    for slot in slots:
        target.rollback(slot, 0)
    assert output.sampled is not None and output.noise is noise
    expected, found = target_tokens(PassOutput(output.logits), rows), target_tokens(output, rows)
    blind = target_tokens(replace(output, logits=torch.zeros_like(output.logits)), rows)
    for b, count in enumerate(counts):
        assert np.array_equal(expected[b, :count], found[b, :count])
        if plain(rows[b]) and rows[b].params.temperature in (0.0, 0.3, 1.0):
            assert np.array_equal(expected[b, :count], blind[b, :count])


def plain(row: SamplingContext) -> bool:
    return row.params == SamplingParams(temperature=row.params.temperature)


STATIC = pair_of_targets(MODEL, num_slots=5, max_width=7, sampler=formula)[1]


@settings(max_examples=60)
@given(batches())
def test_a_pass_chooses_what_is_chosen_from_its_logits(rows: list[SamplingContext]) -> None:
    check_batch(STATIC, rows)
    assert STATIC.graph_runner is not None and STATIC.graph_runner.failure is None


@pytest.mark.parametrize("recorder", RECORDERS)
def test_an_engine_whose_passes_choose_says_the_same(recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = formula if recorder == "eagerly" else select_sampler(torch.device("cuda"))
    plain, static = pair_of_targets(tiny_model(), recorder, num_slots=6, max_length=64, sampler=sampler)
    assert static.supports_noise
    given: list[Noise | None] = []
    monkeypatch.setattr(forward_pass, "make_noise", lambda *args: given.append(make_noise(*args)) or given[-1])
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCAB, int(random.integers(2, 12))).tolist() for _ in range(10)]
    mixed = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True, **KINDS[i]) for i in range(10)]
    coupled = [replace(params, seed=None) for params in mixed]
    greedy = [SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)] * 10
    expected = reference_greedy(plain, prompts, 12, [])
    drawn, _ = run(plain, prompts, mixed, None, eos_token_ids=[])
    drawn_together, _ = run(plain, prompts, coupled, None, eos_token_ids=[])
    assert not given
    report = Report()
    for setting in (Setting("oracle", 4, 5), Setting("ssd", 8, 1)):
        compare(static, prompts, greedy, expected, setting, eos_token_ids=[], report=report)
        compare(static, prompts, mixed, drawn, setting, eos_token_ids=[], report=report)
        compare(static, prompts, coupled, drawn_together, setting, eos_token_ids=[], report=report)
    assert report.passed, report.mismatches
    assert any(noise is not None for noise in given) and None in given


def test_targets_without_a_sampler_take_no_noise() -> None:
    plain, static = pair_of_targets(MODEL)
    whole = open_target(tiny_model("StableLM"), num_slots=2, max_length=32)
    assert not (plain.supports_noise or static.supports_noise or whole.supports_noise)
    assert select_sampler(CPU) is None


def second_best(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return noisy_scores(logits, keys, temperatures).topk(2).indices[:, 1]


def raising(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no compiler\nis there")


@pytest.mark.parametrize(("sampler", "said"), [(second_best, "differ from the reference"), (raising, "no compiler")])
def test_a_sampler_that_is_wrong_or_fails_is_found_out(
    sampler: Sampler, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_sampler_correct(formula, CPU) and not caplog.text
    assert not is_sampler_correct(sampler, CPU) and said in caplog.text


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 50))
def test_a_device_chooses_what_the_host_chooses(seed: int, num_rows: int, vocab_size: int) -> None:
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
    scores[:, 1:][torch.from_numpy(random.random((num_rows, vocab_size - 1)) < 0.3)] = -torch.inf
    keys = position_keys(seed, 0, np.arange(num_rows))
    for sampler in (None, formula):
        found = device_argmax(scores, torch.from_numpy(keys.view(np.int64)), sampler)
        assert np.array_equal(found.numpy(), argmax_with_noise(scores, keys))
