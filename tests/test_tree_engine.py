"""Drafting trees changes no token: the engine against itself without speculation, on trees right, wrong and absurd."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import RandomDrafter
from ssd.config import DraftConfig, DraftShape, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest
from ssd.engine import Engine, Request
from ssd.errors import ConfigError
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from tests.models import VOCAB, tiny_model
from tests.trees import BranchingDrafter
from tests.whole_answers import Answer, answers_of

EOS = 2
LIMIT = 8
FINGERPRINT = "0" * 32


@functools.cache
def target_of(architecture: str) -> Target:
    """One target each; windows are 6 long, key heads are shared, gemma2 caps its scores, gpt_oss has sinks."""
    return open_target(tiny_model(architecture), num_slots=4, max_length=64, max_draft_tokens=LIMIT, exact="on")


def make_engine(architecture: str, drafter: Drafter | None, *, shape: DraftShape = "tree",
                caches: CacheSet | None = None, batch: int = 4) -> Engine:  # fmt: skip
    draft = DraftConfig(num_speculative_tokens=LIMIT if drafter else 0, draft_shape=shape)
    return Engine(
        target_of(architecture),
        drafter=drafter or make_drafter("none", draft),
        caches=caches,
        config=EngineConfig(max_num_seqs=batch, coupled_streams=1, coupled_window=2),
        draft=draft,
        noise_root=lambda: b"of all",
        eos_token_ids=[EOS],
    )


def run(engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams]) -> list[Answer]:
    pairs = enumerate(zip(prompts, sampling, strict=True))
    return answers_of(
        engine, [Request(request_id=str(index), prompt_token_ids=p, sampling=params) for index, (p, params) in pairs]
    )


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())


requests = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 14),
            temperature=st.sampled_from([0.0, 0.0, 0.8, 1.3]),
            top_p=st.sampled_from([1.0, 0.9]),
            top_k=st.sampled_from([0, 20]),
            repetition_penalty=st.sampled_from([1.0, 1.2]),
            frequency_penalty=st.sampled_from([0.0, 0.6]),
            presence_penalty=st.sampled_from([0.0, -0.5]),
            logit_bias=st.sampled_from([(), ((2, 4.0), (7, 3.0))]),
            min_tokens=st.sampled_from([0, 4]),
            seed=st.integers(0, 99) | st.none(),  # without one: coupled
            logprobs=st.sampled_from([None, 2]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(
    st.sampled_from(["llama", "mistral", "gemma2", "gpt_oss", "gpt2"]),
    st.sampled_from(["random", "random", "wide", "deep", "same"]),
    requests,
    st.integers(0, 2**32 - 1),
)
def test_trees_change_no_token(
    architecture: str, shape: str, asked: list[tuple[int, SamplingParams]], seed: int
) -> None:
    prompts = [prompt_of(seed + i, length) for i, (length, _) in enumerate(asked)]
    sampling = [params for _, params in asked]
    plain = [run(make_engine(architecture, None, batch=1), [p], [s])[0] for p, s in zip(prompts, sampling, strict=True)]
    answers = {prompt: answer.token_ids for prompt, answer in zip(prompts, plain, strict=True)}
    drafter = BranchingDrafter(answers, VOCAB, seed=seed, shape=shape)
    engine = make_engine(architecture, drafter)
    assert run(engine, prompts, sampling) == plain
    metrics = engine.metrics
    assert metrics.drafter_failures == 0
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens <= metrics.num_draft_tokens
    assert metrics.num_accepted_tokens == sum(accepted for _, accepted in drafter.paths)
    for draft, num_accepted in drafter.paths:
        assert draft.parents is None or (draft.path is not None and len(draft.path) == num_accepted)


class Disordered(RandomDrafter):
    """Trees that are none: a parent behind its child, itself, too few, too many; one too large; no tokens at all."""

    _parents = ([1, -1, 0], [0, 0, 1], [-1, -1], [-1, 0, 1, 2], [-2, -1, 0])
    calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls += 1
        number = self.calls % (len(self._parents) + 2)
        if number > len(self._parents):
            return [Draft(np.full(3, VOCAB + 5, np.int32))] * len(requests)
        if number == len(self._parents):
            return [Draft(np.full(90, 7, np.int32), parents=np.full(90, -1, np.int32)) for _ in requests]
        return [Draft(np.full(3, 7, np.int32), parents=np.array(self._parents[number], np.int32)) for _ in requests]


def test_what_is_no_tree_is_a_counter_and_changes_nothing() -> None:
    prompts, sampling = [prompt_of(seed, 9) for seed in (1, 2)], [SamplingParams(max_tokens=14, temperature=0.0)] * 2
    engine = make_engine("llama", Disordered(VOCAB))
    assert run(engine, prompts, sampling) == run(make_engine("llama", None), prompts, sampling)
    assert engine.metrics.drafter_failures > 5
    assert engine.metrics.num_draft_tokens > 0  # the one that was too big was cut


class Asked(RandomDrafter):
    """Notes whether it was asked for trees."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.trees: set[bool] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.trees |= {request.tree for request in requests}
        return super().propose(requests)


def test_trees_are_asked_for_where_they_can_be_verified(caplog: pytest.LogCaptureFixture) -> None:
    sampling = [SamplingParams(max_tokens=3, temperature=1.0)]
    asked: list[tuple[DraftShape, bool]] = [("tree", True), ("chain", False), ("auto", True)]
    for shape, expected in asked:
        drafter = Asked()
        draft = DraftConfig(num_speculative_tokens=LIMIT, draft_shape=shape)
        run(Engine(target_of("llama"), drafter=drafter, draft=draft, eos_token_ids=[EOS]), [(5, 6)], sampling)
        assert drafter.trees == {expected}
    drafter = Asked()
    together = [SamplingParams(max_tokens=1, temperature=1.0)] * 2  # neither is ever alone
    run(make_engine("llama", drafter, shape="auto"), [(5, 6), (5, 7)], together)
    assert drafter.trees == {False}
    target = open_target(tiny_model("falcon"), num_slots=1, max_length=32)
    with caplog.at_level(logging.WARNING):
        drafter = Asked()
        run(
            Engine(target, drafter=drafter, draft=DraftConfig(draft_shape="tree"), eos_token_ids=[EOS]),
            [(5, 6)],
            sampling,
        )
    assert drafter.trees == {False} and "chains only" in caplog.text
    with pytest.raises(ConfigError, match="draft_shape must be one of auto, chain, tree"):
        DraftConfig(draft_shape="bush")  # type: ignore[arg-type]


def test_the_last_step_of_a_tree_teaches_every_token_that_was_tested() -> None:
    """The text is not seen again, so the path says what came: its tokens, and which siblings did not."""
    text = np.array([3, 4, 5, 3, 4, 6, 3, 4, 5, 3, 4], np.int32)
    learned = {}
    for name in ("path", "none accepted", "unknown", "cut"):
        drafter = SuffixDrafter(price=0.01)
        draft = drafter.propose([DraftRequest("a", text, 3, None, 8, tree=True)])[0]
        assert draft.parents is not None and len(draft.token_ids) == 8
        parents = draft.parents.tolist()
        before = drafter.model_of(None).num_learned
        child = parents.index(0)
        path = np.array([0, child], np.int32)
        told, accepted = {
            "path": (Draft(draft.token_ids, parents=draft.parents, path=path), 2),
            "none accepted": (Draft(draft.token_ids, parents=draft.parents, path=path[:0]), 0),
            "unknown": (draft, 2),
            "cut": (Draft(draft.token_ids[:1], parents=draft.parents[:1], path=path[:1]), 1),
        }[name]
        drafter.observe("a", told, accepted)
        drafter.finish("a")
        learned[name] = drafter.model_of(None).num_learned - before
    tested = [parent for parent in parents if parent in (-1, 0, child)]
    assert learned == {"path": len(tested), "none accepted": parents.count(-1), "unknown": 0, "cut": 1}
