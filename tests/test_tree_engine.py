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
from server.command.arguments import parse_arguments
from ssd.config import CacheConfig, DraftConfig, DraftShape, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest
from ssd.engine import Engine, FinishReason, Request, RequestOutput
from ssd.errors import ConfigError
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from tests.models import VOCAB, tiny_model
from tests.trees import BranchingDrafter
from tests.whole_answers import whole

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


def run(
    engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams]
) -> list[list[RequestOutput]]:
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    outputs: list[list[RequestOutput]] = [[] for _ in prompts]
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


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
    answers = {prompt: tokens_of(outputs) for prompt, outputs in zip(prompts, plain, strict=True)}
    drafter = BranchingDrafter(answers, VOCAB, seed=seed, shape=shape)
    engine = make_engine(architecture, drafter)
    found = run(engine, prompts, sampling)
    for mine, expected in zip(found, plain, strict=True):
        assert whole(mine) == whole(expected)
        stats = mine[-1].stats
        assert stats.num_output_tokens <= stats.num_accepted_tokens + stats.num_verify_steps
        assert stats.num_accepted_tokens <= stats.num_draft_tokens
    metrics = engine.metrics
    assert metrics.drafter_failures == 0
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens
    assert metrics.num_accepted_tokens == sum(outputs[-1].stats.num_accepted_tokens for outputs in found)
    for draft, num_accepted in drafter.paths:
        assert draft.parents is None or (draft.path is not None and len(draft.path) == num_accepted)


def test_the_right_branch_is_accepted_wherever_it_stands() -> None:
    prompt = prompt_of(1, 9)
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    expected = tokens_of(run(make_engine("llama", None), [prompt], [sampling])[0])

    class Knowing(BranchingDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            done = len(requests[0].context) - len(prompt)
            right = expected[done : done + 3]
            tokens = [9, right[0], 9, *right[1:]][: requests[0].limit]
            parents = [-1, -1, 0, 1, 3][: len(tokens)]
            return [Draft(np.array(tokens, np.int32), source="own", parents=np.array(parents, np.int32))]

    assert 9 not in expected
    drafter = Knowing({}, VOCAB)
    engine = make_engine("llama", drafter)
    outputs = run(engine, [prompt], [sampling])[0]
    assert tokens_of(outputs) == expected
    assert [draft.path.tolist() for draft, _ in drafter.paths if draft.path is not None] == [[1, 3, 4]] * 2
    # Four tokens a step; of the last two the tree, cut to one token, has the wrong one.
    assert outputs[-1].stats.num_verify_steps == 4
    assert engine.metrics.accepted_per_position == [2, 2, 2]
    assert engine.metrics.by_source["own"].num_accepted_tokens == 6


def test_a_stop_inside_an_accepted_path_ends_there_and_only_that_is_learned() -> None:
    prompt = prompt_of(3, 9)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    expected = tokens_of(run(make_engine("llama", None), [prompt], [sampling])[0])
    at = next(i for i in range(2, 12) if expected[i] not in expected[:i])
    stopping = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(expected[at],), ignore_eos=True)
    with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        drafter = BranchingDrafter({prompt: expected}, VOCAB, seed=4)
        outputs = run(make_engine("llama", drafter, caches=caches), [prompt], [stopping])[0]
        assert tokens_of(outputs) == expected[: at + 1]
        assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason == expected[at]
        assert caches.get("default").snapshot().num_tokens == len(prompt) + at + 2
    assert all(draft.path is None or len(draft.path) == accepted for draft, accepted in drafter.paths)


class Disordered(RandomDrafter):
    """Trees that are none: a parent behind its child, itself, too few, too many; then one beyond the limit."""

    _parents = ([1, -1, 0], [0, 0, 1], [-1, -1], [-1, 0, 1, 2], [-2, -1, 0])
    calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls += 1
        number = self.calls % (len(self._parents) + 1)
        if number == len(self._parents):
            return [Draft(np.full(90, 7, np.int32), parents=np.full(90, -1, np.int32)) for _ in requests]
        return [Draft(np.full(3, 7, np.int32), parents=np.array(self._parents[number], np.int32)) for _ in requests]


def test_what_is_no_tree_is_a_counter_and_changes_nothing() -> None:
    prompts, sampling = [prompt_of(seed, 9) for seed in (1, 2)], [SamplingParams(max_tokens=14, temperature=0.0)] * 2
    expected = [tokens_of(outputs) for outputs in run(make_engine("llama", None), prompts, sampling)]
    engine = make_engine("llama", Disordered(VOCAB))
    found = run(engine, prompts, sampling)
    assert [tokens_of(outputs) for outputs in found] == expected
    assert engine.metrics.drafter_failures > 5
    assert engine.metrics.num_draft_tokens > 0  # the one that was too big was cut


@pytest.mark.parametrize("drafter", ["ssd", "prompt-lookup"])
@pytest.mark.parametrize(("temperature", "is_coupled"), [(0.0, False), (0.9, False), (0.9, True)])
def test_every_drafter_may_be_asked_for_trees(drafter: str, temperature: float, is_coupled: bool) -> None:
    prompts = [prompt_of(seed % 3, 12) for seed in range(9)]
    seeds = [None if is_coupled else seed % 3 for seed in range(9)]
    sampling = [SamplingParams(max_tokens=20, temperature=temperature, seed=seed) for seed in seeds]
    expected = [tokens_of(outputs) for outputs in run(make_engine("llama", None), prompts, sampling)]
    with CacheSet(CacheConfig(), fingerprint=FINGERPRINT, inline=True) as caches:
        engine = make_engine("llama", make_drafter(drafter, DraftConfig()), caches=caches)
        assert [tokens_of(outputs) for outputs in run(engine, prompts, sampling)] == expected
        assert engine.metrics.drafter_failures == 0
        assert engine.metrics.num_accepted_tokens > 0 or temperature > 0


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
    assert parse_arguments(["--draft-shape", "tree"], {}).speculation.draft.draft_shape == "tree"
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
