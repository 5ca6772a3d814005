"""Draft heads change no token, say what a head that reads everything anew would say, and lose nothing of what pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import DraftConfig, DraftShape, EngineConfig, SamplingParams
from ssd.drafting import Arbiter, make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import Draft, Drafter, DraftRequest, SamplingRow
from ssd.engine import Engine, Request
from ssd.model.heads.drafter import HeadDrafter, comb, product
from ssd.model.heads.head import FINAL, Head
from ssd.model.target import pad_rows
from ssd.model.ways.slot_target import SlotTarget
from ssd.retrieval.cache_state import LearnedState
from tests.heads import PerfectHead, RandomParallelHead, forgetful_model, head_drafter, random_eagle3
from tests.models import VOCAB, tiny_model
from tests.test_lossless import EOS, options
from tests.whole_answers import Answer, finish_all, whole

SLOTS, LENGTH = 3, 48
NAMES = ("perfect", "random", "whole vocabulary", "parallel")


def kind_of(name: str, dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[SlotTarget, HeadDrafter]:
    """A fresh target and drafter: of a head that is always right, of random ones."""
    model = (forgetful_model() if name == "perfect" else tiny_model()).to(dtype)
    head: Head
    if name == "perfect":
        head = PerfectHead(model)
    elif name == "parallel":
        head = RandomParallelHead(64, VOCAB).to(dtype)
    else:
        head = random_eagle3(model, (1, 0, FINAL), None if name == "whole vocabulary" else 96)
    return head_drafter(model, head, **sizes)


@cache
def kept(name: str, dtype: torch.dtype = torch.float32) -> tuple[SlotTarget, HeadDrafter]:
    return kind_of(name, dtype, num_slots=4, max_length=96)


# -- exactness ---------------------------------------------------------------------------------------------------


def run(
    target: SlotTarget,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    k: int = 6,
    shape: DraftShape = "auto",
    config: EngineConfig | None = None,
    late: int = 0,
) -> tuple[Engine, list[Answer]]:
    """Answers to requests, the last ``late`` of which come after two steps."""
    draft = DraftConfig(num_speculative_tokens=k, draft_shape=shape)
    engine = Engine(target, drafter=drafter, draft=draft, eos_token_ids=[EOS], config=config)
    for request in requests[: len(requests) - late]:
        engine.submit(request)
    begun = [output for _ in range(2) for output in engine.step()]
    for request in requests[len(requests) - late :]:
        engine.submit(request)
    found = finish_all(engine, begun)
    assert engine.metrics.drafter_failures == 0
    return engine, [whole(found[request.request_id]) for request in requests]


def request_of(
    index: int, prompt: Sequence[int], sampling: SamplingParams, namespace: str | None = None, priority: int = 0
) -> Request:
    return Request(
        request_id=str(index),
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        namespace=namespace,
        priority=priority,
    )


def plain(target: SlotTarget, requests: Sequence[Request]) -> list[Answer]:
    return run(target, make_drafter("none", DraftConfig()), requests, k=0)[1]


@settings(max_examples=20)
@given(
    sampling=options,
    prompt=st.lists(st.integers(3, 40), min_size=1, max_size=12),
    shape=st.sampled_from(["auto", "tree", "chain"]),
)
@pytest.mark.parametrize("name", NAMES)
def test_no_option_lets_a_head_change_the_output(
    name: str, sampling: SamplingParams, prompt: list[int], shape: DraftShape
) -> None:
    target, drafter = kept(name)
    params = replace(sampling, seed=sampling.seed or 0)
    requests = [request_of(0, prompt, params), request_of(1, prompt, SamplingParams(max_tokens=9, temperature=0.0))]
    expected = plain(target, requests)
    for chosen in (drafter, Arbiter([SuffixDrafter(), drafter])):
        assert run(target, chosen, requests, shape=shape)[1] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_full_house_with_reuse_and_preemption_says_what_plain_decoding_says(name: str, dtype: torch.dtype) -> None:
    """More requests than slots, with beginnings in common, and late ones that take the slots of others."""
    target, drafter = kept(name, dtype)
    random = np.random.default_rng(3)
    common = random.integers(3, 40, 24).tolist()
    requests = [
        request_of(
            index,
            [*common[: 24 - index], *random.integers(3, 40, 1 + index % 5).tolist()],
            SamplingParams(
                max_tokens=24, temperature=0.8 * (index % 2), top_k=8, seed=index, ignore_eos=True, logprobs=1
            ),
            namespace="shared",
            priority=-1 if index > 8 else 0,
        )
        for index in range(12)
    ]
    expected = plain(target, [replace(request, priority=0) for request in requests])
    config = EngineConfig(scheduling_policy="priority", prefill_chunk_tokens=16)
    for shape in ("chain", "tree"):
        engine, found = run(target, drafter, requests, shape=shape, config=config, late=3)
        assert found == expected
        assert engine.metrics.num_preemptions
        drafted = engine.metrics.by_source["head"]
        if name == "perfect":
            assert drafted.num_accepted_tokens > 0.9 * leading(drafted.num_draft_tokens, shape)


def leading(number: int, shape: str) -> float:
    """How many of the tokens drafted a head that is right gets accepted: trees have leaves."""
    return number if shape == "chain" else 0.3 * number


# -- what a head says --------------------------------------------------------------------------------------------


def ask(
    slot: int, name: str, context: Sequence[int], sampling: SamplingRow | None = None, limit: int = 5
) -> DraftRequest:
    return DraftRequest(
        name, np.array(context, np.int32), 1, None, limit, prices=np.zeros(1), sampling=sampling, slot=slot, tree=True
    )


class House:
    """A target and its drafter as an engine would use them, at random, beside what they should hold."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.target, self.drafter = kind_of(name, dtype, num_slots=SLOTS, max_length=LENGTH, chunk_tokens=5)
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]
        self.names = [""] * SLOTS
        self.count = 0

    def begin(self, slot: int, tokens: list[int], *, donor: int | None) -> None:
        """A request takes a slot, with the beginning of another's text where there is a donor."""
        self.leave(slot)
        self.count += 1
        self.names[slot] = f"request {self.count}"
        shared: list[int] = []
        if donor is not None and donor != slot:
            shared = self.texts[donor][: max(0, min(len(self.texts[donor]) - 1, 12))]
            self.target.copy_prefix(donor, slot, len(shared))
        self.texts[slot] = [*shared, *tokens]
        self._feed(slot)

    def leave(self, slot: int, *, keep: int = 0) -> None:
        if self.names[slot]:
            self.drafter.finish(self.names[slot])
        self.names[slot] = ""
        self.target.rollback(slot, min(keep, self.target.length(slot)))

    def come_again(self, slot: int) -> None:
        """The request was preempted: its slot is emptied, and filled anew."""
        if self.names[slot]:
            self.drafter.finish(self.names[slot])
            self.target.rollback(slot, 0)
            self._feed(slot)

    def go_on(self, slot: int, draft: list[int], accepted: int) -> None:
        """A pass over the last token and a tree, of which a path is kept; another token follows."""
        if not self.names[slot] or len(self.texts[slot]) + len(draft) + 2 >= LENGTH:
            return
        fed = np.array([[self.texts[slot][-1], *draft]], np.int64)
        count = fed.shape[1]
        self.target.forward_trees([slot], fed, [count], np.array([[-1, *([0] * len(draft))]]))
        path = [0, 1 + accepted % len(draft)] if draft else [0]
        self.target.keep_paths([slot], [count], [np.array(path)])
        self.texts[slot] += [*fed[0, path[1:]].tolist(), 3 + accepted]

    def check(self, slots: Sequence[int], temperature: float) -> None:
        """The drafter's proposals, together, are those of one that reads everything from the beginning."""
        slots = [slot for slot in slots if self.names[slot]]
        requests = [self._request(slot, temperature) for slot in slots]
        drafts = self._propose(requests)
        for slot, draft in zip(slots, drafts, strict=True):
            assert_same_draft(draft, self._fresh(slot, temperature), exact=self.dtype == torch.float32)

    def fail(self, slot: int) -> None:
        """A pass of the head fails half way; the drafter says so, and goes on as if nothing had been."""
        if len(self.texts[slot]) < 2 or not self.names[slot]:
            return

        def broken(*_given: Any, **_named: Any) -> Any:
            raise RuntimeError("out of memory")

        whole = self.drafter._head.forward
        self.drafter._head.forward = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            self.drafter.propose([self._request(slot, 0.0)])
        self.drafter._head.forward = whole  # type: ignore[method-assign]

    def _propose(self, requests: list[DraftRequest]) -> list[Draft]:
        """It reads a few positions at a time, so it may have to be asked again."""
        for _ in range(LENGTH):
            drafts = self.drafter.propose(requests)
            if all(len(draft.token_ids) or len(each.context) < 2 for draft, each in zip(drafts, requests, strict=True)):
                return drafts
        raise AssertionError("it never came to an end")

    def _request(self, slot: int, temperature: float) -> DraftRequest:
        sampling = SamplingRow(params=SamplingParams(temperature=temperature), noise=SequenceNoise.seeded(7))
        return replace(ask(slot, self.names[slot], self.texts[slot], sampling), learned=SHARED)

    def _fresh(self, slot: int, temperature: float) -> Draft:
        target, drafter = kept_fresh(self.name, self.dtype)
        text = self.texts[slot]
        target.rollback(0, 0)
        if len(text) > 1:
            target.prefill([0], pad_rows([np.array(text[:-1])]), [len(text) - 1])
        request = replace(self._request(slot, temperature), slot=0, request_id="fresh")
        if drafter._slots is not None:
            drafter._slots.reread()
        (draft,) = drafter.propose([request])
        return draft

    def _feed(self, slot: int) -> None:
        part = np.array(self.texts[slot][self.target.length(slot) : -1], np.int64)
        if len(part):
            self.target.prefill([slot], part[None], [len(part)])


SHARED = LearnedState()


@pytest.mark.parametrize("other", [SHARED, LearnedState(), None])
def test_what_a_head_read_for_one_namespace_is_read_again_for_another(other: LearnedState | None) -> None:
    """How soon it can draft would tell what was asked there."""
    target, drafter = kind_of("whole vocabulary", torch.float32, num_slots=1, max_length=LENGTH)
    slots, text = drafter._slots, np.arange(3, 12, dtype=np.int32)
    assert slots is not None
    target.prefill([0], text[None, :-1].astype(np.int64), [len(text) - 1])
    slots.read([slots.follow(0, "one", text, None, SHARED)])
    held = int(slots._kv_cache.lengths[0])
    assert held > 5
    slots.follow(0, "one", text, None, SHARED)
    assert slots._kv_cache.lengths[0] == len(text) - 2
    slots.follow(0, "other", text, None, other)
    assert slots._kv_cache.lengths[0] == (len(text) - 2 if other is SHARED else 0)


@cache
def kept_fresh(name: str, dtype: torch.dtype) -> tuple[SlotTarget, HeadDrafter]:
    return kind_of(name, dtype, num_slots=1, max_length=LENGTH)


def assert_same_draft(found: Draft, wanted: Draft, *, exact: bool) -> None:
    if exact:
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        if found.probabilities is not None and wanted.probabilities is not None:
            np.testing.assert_allclose(found.probabilities, wanted.probabilities, atol=1e-3)
    else:  # two passes round to eight bits differently: the same token, or one that is as likely
        assert (found.probabilities is None) == (wanted.probabilities is None)
        if found.probabilities is not None and wanted.probabilities is not None:
            assert abs(found.probabilities[0] - wanted.probabilities[0]) < 0.2


texts = st.lists(st.integers(3, 40), min_size=1, max_size=14)
slots = st.integers(0, SLOTS - 1)
happenings: st.SearchStrategy[Callable[[House], None]] = st.one_of(
    st.builds(
        lambda slot, text, donor: lambda house: house.begin(slot, text, donor=donor),
        slots, texts, st.none() | slots,
    ),
    st.builds(lambda slot, keep: lambda house: house.leave(slot, keep=keep), slots, st.integers(0, 9)),
    st.builds(lambda slot: lambda house: house.come_again(slot), slots),
    st.builds(
        lambda slot, draft, accepted: lambda house: house.go_on(slot, draft, accepted),
        slots, st.lists(st.integers(3, 40), max_size=4), st.integers(0, 9),
    ),
    st.builds(
        lambda some, heat: lambda house: house.check(some, heat),
        st.lists(slots, min_size=1, unique=True), st.sampled_from([0.0, 0.9]),
    ),
    st.builds(lambda slot: lambda house: house.fail(slot), slots),
)  # fmt: skip


@settings(max_examples=40)
@given(happened=st.lists(happenings, min_size=4, max_size=16))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["random", "parallel"])
def test_whatever_happened_a_head_says_what_it_would_say_of_the_text_alone(
    name: str, dtype: torch.dtype, happened: list[Callable[[House], None]]
) -> None:
    """Slots change hands, texts share beginnings, drafts are wrong, requests come again, passes of the head fail."""
    house = House(name, dtype)
    for happen in happened:
        happen(house)
    house.check(range(SLOTS), 0.0)
    house.check(range(SLOTS), 0.9)


def test_a_head_that_is_right_is_accepted_whole() -> None:
    """Greedy and sampled: the head draws with the target's own noise."""
    target, drafter = kept("perfect")
    requests = [
        request_of(
            index,
            [5 + index, 9],
            SamplingParams(max_tokens=48, temperature=temperature, top_k=8, seed=3, ignore_eos=True),
        )
        for index, temperature in enumerate([0.0, 0.7, 1.0, 1.5])
    ]
    engine, _ = run(target, drafter, requests, shape="chain", k=7)
    drafted = engine.metrics.by_source["head"]
    # But for a token where this head holds all equally likely: more than it proposes.
    assert drafted.num_draft_tokens > 100 and drafted.num_accepted_tokens > 0.85 * drafted.num_draft_tokens


def test_nothing_is_drafted_where_nothing_can_be_read() -> None:
    """One token has no features yet; a slot that holds less; no slot; no room."""
    target, drafter = kept("random")
    target.prefill([1], np.full((1, 9), 7), [9])
    text = [7] * 9 + [8]
    refused = [
        ask(1, "short", [7]),
        ask(2, "empty", text),
        replace(ask(1, "nowhere", text), slot=None),
        replace(ask(1, "nowhere", text), slot=-1),
        replace(ask(1, "none", text), limit=0),
    ]
    assert [len(draft.token_ids) for draft in drafter.propose(refused)] == [0] * len(refused)
    target.rollback(1, 0)


def test_what_is_new_to_a_head_takes_time_to_begin() -> None:
    target, drafter = kind_of("random", num_slots=2, max_length=96)
    drafter.warm_up()
    assert drafter.seconds_per_token(1) > 0
    target.prefill([0], np.full((1, 70), 7), [70])
    long = ask(0, "long", [7] * 70 + [8])
    drafter.propose([long])
    assert drafter.seconds_to_begin(long) == 0.0
    assert drafter.seconds_to_begin(replace(long, request_id="another")) > 0.0


laws = st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=1, max_size=5)


@given(laws, st.floats(0.0, 0.5), st.integers(1, 20))
def test_trees_are_the_likeliest_that_pay(weights: list[list[float]], price: float, limit: int) -> None:
    """A parallel head's paths against a search through all of them; a comb against its definition."""
    chances = np.array([[each / sum(law) for each in sorted(law, reverse=True)] for law in weights])
    ids = np.arange(chances.size).reshape(chances.shape)
    prices = np.array([price])

    def paths(draft: Draft) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        by_node: list[tuple[int, ...]] = []
        parents = np.arange(-1, len(draft.token_ids) - 1) if draft.parents is None else draft.parents
        for token, parent, chance in zip(draft.token_ids.tolist(), parents.tolist(), draft.chances(), strict=True):
            by_node.append((*(by_node[parent] if parent >= 0 else ()), token))
            found[by_node[-1]] = float(chance)
        return found

    every: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(len(chances)):
        every |= {
            (*path, int(ids[depth, rank])): chance * float(chances[depth, rank])
            for path, chance in list(every.items())
            if len(path) == depth
            for rank in range(3)
        }
    del every[()]
    found = paths(product(ids, chances, prices, limit))
    paying = sorted((chance for chance in every.values() if chance > price), reverse=True)[:limit]
    assert sorted(found.values(), reverse=True) == pytest.approx(paying or [float(chances[0, 0])])
    assert all(every[path] == pytest.approx(chance) for path, chance in found.items())

    chain = [int(each) for each in ids[:, 0]]
    found = paths(comb(list(ids), list(chances), prices, limit))
    depth = min(len(chances), limit)
    assert all(tuple(chain[: i + 1]) in found for i in range(depth)) and len(found) <= limit
    leaves = {path: chance for path, chance in found.items() if path != tuple(chain[: len(path)])}
    assert all(path[:-1] == tuple(chain[: len(path) - 1]) and chance > price for path, chance in leaves.items())
