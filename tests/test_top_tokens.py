"""A pass says which tokens are most probable after every position, whichever way it is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, DraftConfig
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Draft, DraftOutcome, DraftRequest, ScoredPass
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.drafting.token_recycling import TOP_K
from ssd.engine import Engine
from ssd.model.cuda_graphs.graph_runner import CudaGraphRunner, run_eagerly
from ssd.model.loading.load_target import open_target
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import greedy_tokens, packed_top, top_tokens, unpack_top
from ssd.retrieval.cache_manager import CacheManager
from tests.engines import ask
from tests.models import tiny_model
from tests.whole_answers import finish_all, tokens_of

# What transformers has to say about tiny settings.
pytestmark = pytest.mark.filterwarnings("default")

SIZES = [1, 3, 7, 8, 9, 127, 128, 129, 300, 1000]


def found_at(ids: np.ndarray, values: np.ndarray) -> list[tuple[int, float]]:
    there = ids >= 0
    assert not (there[1:] & ~there[:-1]).any() and np.isneginf(values[~there]).all()
    return list(zip(ids[there].tolist(), values[there].tolist(), strict=True))


@st.composite
def logits(draw: st.DrawFn) -> torch.Tensor:
    """[B, T, V]: spread or full of ties, rising or falling, with what is impossible and what is no number."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from(SIZES))
    made = random.normal(0, 3, shape) if draw(st.booleans()) else random.integers(-2, 3, shape).astype(float)
    match draw(st.sampled_from(["as it is", "rising", "falling", "mostly impossible", "no numbers"])):
        case "rising":
            made.sort(-1)
        case "falling":
            made = -np.sort(-made, -1)
        case "mostly impossible":
            made[random.random(shape) < 0.97] = -np.inf
        case "no numbers":
            made[random.random(shape) < 0.3] = np.nan
            made[random.random(shape) < 0.02] = np.inf
    return torch.from_numpy(made.astype(np.float32))


@settings(deadline=None)
@given(logits(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans())
def test_greedy_tokens_are_those_of_torch(made: torch.Tensor, dtype: torch.dtype, is_wide: bool) -> None:
    """With ties, NaN, infinities and both zeros, in one block of the search and in several."""
    made = torch.where(made == 1, -0.0, made).to(dtype)
    if is_wide:
        made = made.repeat(1, 1, 1 + 70_000 // made.shape[-1])
    assert greedy_tokens(made).tolist() == made.argmax(-1).tolist()


@settings(max_examples=150, deadline=None)
@given(logits(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.data())
def test_a_sweep_finds_what_sorting_finds(scores: torch.Tensor, dtype: torch.dtype, data: st.DataObject) -> None:
    scores = scores.to(dtype)
    counts = data.draw(st.lists(st.integers(0, scores.shape[1]), min_size=len(scores), max_size=len(scores)))
    ids, values = top_tokens(scores, counts)
    assert ids.shape == values.shape == (*scores.shape[:2], TOP_K)
    for b, count in enumerate(counts):
        for t in range(scores.shape[1]):
            expected = top_of(scores[b, t].tolist(), TOP_K) if t < count else []
            assert found_at(ids[b, t], values[b, t]) == expected


@settings(max_examples=60, deadline=None)
@given(logits().filter(lambda made: not bool(made.isnan().any())))
def test_on_a_device_the_same_logits_are_found(scores: torch.Tensor) -> None:
    ids, values = unpack_top(packed_top(scores))
    assert np.array_equal(values, top_tokens(scores, [scores.shape[1]] * len(scores))[1])
    for at in np.ndindex(ids.shape[:2]):
        assert all(float(scores[at][token]) == value for token, value in found_at(ids[at], values[at]))


class Witness:
    """The usual drafter; beside it, all that it is told of passes is compared with what the engine holds."""

    def __init__(self, draft: DraftConfig) -> None:
        self._drafter: Any = make_drafter("ssd", draft)
        self.engine: Engine | None = None
        self.told: list[str] = []
        self.num_rejected = self.num_branches = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts: list[Draft] = self._drafter.propose(requests)
        return drafts

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        self._drafter.observe(outcomes, scored)
        self.told += [*["scores"] * (scored is not None), *["verdict"] * len(outcomes)]
        if scored is None:
            return
        assert self.engine is not None
        batch = self.engine._batch
        assert [sequence.request.request_id for sequence in batch.sequences] == scored.request_ids
        for array in (scored.previous_ids, scored.input_ids, scored.sampled_ids, scored.top_ids, scored.top_logits):
            assert array.flags.c_contiguous
        for b, sequence in enumerate(batch.sequences):
            context = sequence.context[: -int(batch.committed[b])]
            count, path = int(scored.num_positions[b]), [int(scored.last_accepted[b])]
            assert scored.input_ids[b, 0] == context[-1] and scored.previous_ids[b] == (
                context[-2] if len(context) > 1 else -1
            )
            parents = [-1, *range(count - 1)] if scored.parents is None else scored.parents[b, :count].tolist()
            while path[0] > 0:
                path.insert(0, parents[path[0]])
            assert [scored.sampled_ids[b, node] for node in path[:-1]] == [
                scored.input_ids[b, node] for node in path[1:]
            ]
            # Greedy without rules: what was chosen is the most probable.
            assert np.array_equal(scored.sampled_ids[b, :count], scored.top_ids[b, :count, 0])
            self.num_rejected += count - len(path)
            self.num_branches += parents != [-1, *range(count - 1)]

    def learn_scores(self, scored: ScoredPass) -> None:
        self._drafter.learn_scores(scored)

    def finish(self, request_id: str) -> None:
        self._drafter.finish(request_id)


def asked_of(engine: Engine, num_requests: int, max_tokens: int, **request: Any) -> dict[str, list[int]]:
    """Prompts that repeat themselves now and then, all at once: what each was answered."""
    for i in range(num_requests):
        prompt = np.random.default_rng(i).integers(3, 9, 1 + 9 * i).tolist()
        engine.submit(ask(str(i), prompt, max_tokens=max_tokens, ignore_eos=True, **request))
    return {name: tokens_of(outputs) for name, outputs in finish_all(engine).items()}


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize(
    "way", ["Llama", "Llama, static", "Llama, top tokens in the pass", "StableLM", "Qwen3-Next", "RecurrentGemma"]
)
def test_a_drafter_is_told_what_every_pass_said(way: str, shape: Any, overlap: bool) -> None:
    architecture, _, kind = way.partition(", ")
    draft = DraftConfig(num_speculative_tokens=6, draft_shape=shape)
    target = open_target(tiny_model(architecture), num_slots=3, max_length=96, max_draft_tokens=6)
    if kind:
        assert isinstance(target, SlotRunner)
        target.graph_runner = CudaGraphRunner(target, run_eagerly, tolerance=1e-3, keeps_top=kind != "static")
    target.is_asynchronous = overlap
    witness = Witness(draft)
    with CacheManager(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        engine = witness.engine = Engine(target, drafter=witness, caches=caches, draft=draft, eos_token_ids=[2])
        found = asked_of(engine, 3, 24)
        assert engine.metrics.drafter_failures == 0
    assert witness.told[0] == "scores" and witness.told.count("verdict") >= sum(map(len, found.values())) / 7
    assert witness.num_rejected > 0
    assert (witness.num_branches > 0) == (shape == "tree" and architecture == "Llama")


@pytest.mark.parametrize("may_learn", [True, False])
def test_a_request_that_is_not_to_be_learned_from_teaches_its_namespace_nothing(may_learn: bool) -> None:
    target = open_target(tiny_model(), num_slots=3, max_length=96, max_draft_tokens=6)
    drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=6))
    assert isinstance(drafter, SuffixDrafter) and drafter._recycling is not None
    with CacheManager(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        engine = Engine(target, drafter=drafter, caches=caches, eos_token_ids=[2])
        asked_of(engine, 2, 8, learn=may_learn)
        learned = caches.get("default").learned
        assert bool(drafter._recycling.table_address(learned, "any")) == may_learn
        assert drafter._recycling.table_address(None, "0") == 0
        asked_of(engine, 2, 8, namespace=None)
        assert bool(drafter._recycling.table_address(learned, "any")) == may_learn
        assert not drafter._recycling._own, "a request without a namespace leaves nothing behind"


def top_of(logits: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The ``count`` greatest logits with their ids, or fewer: no NaN, nothing impossible; of equals the first."""
    possible = [(token, logit) for token, logit in enumerate(logits) if logit > -math.inf]
    return sorted(possible, key=lambda pair: (-pair[1], pair[0]))[:count]
