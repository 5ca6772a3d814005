"""Draft heads and models change no token, and say what one that reads everything anew would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedModel

from ssd.bundled import HEAD_PATH, MODEL_PATH
from ssd.config import DraftConfig, DraftShape, EngineConfig, SamplingParams
from ssd.cost_model.calibration import DraftBackoff
from ssd.drafting import HybridDrafter
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import Draft, Drafter, DraftOutcome, DraftRequest, SamplingContext
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.engine import Engine, Request
from ssd.errors import ConfigError, ModelError
from ssd.model.draft.candidates import build_draft
from ssd.model.draft.drafter import DraftModelDrafter, HeadDrafter, NetworkDrafter, load_draft_model
from ssd.model.draft.slots import HeadSlots
from ssd.model.heads.networks import Head
from ssd.model.kv.tree import leading_chain
from ssd.model.layers.hidden_states import FINAL
from ssd.model.loading.load_target import open_target
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import PassOutput
from ssd.model.target import pad_rows
from ssd.retrieval.cache_state import LearnedState
from ssd.text.codec import TextCodec
from tests.engines import ask, make_engine
from tests.heads import PerfectHead, forgetful_model, head_drafter, random_eagle3, random_medusa
from tests.models import VOCAB, tiny_model
from tests.test_lossless import options
from tests.whole_answers import Answer, answers_of, finish_all, whole

SLOTS, LENGTH = 3, 48
NAMES = ("perfect", "random", "whole vocabulary", "parallel", "model")


def kind_of(name: str, dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[SlotRunner, NetworkDrafter]:
    """A fresh target and drafter: of a head that is always right, of random ones."""
    model = (forgetful_model() if name == "perfect" else tiny_model()).to(dtype)
    head: Head
    if name == "perfect":
        head = PerfectHead(model)
    elif name == "parallel":
        head = random_medusa(64, VOCAB).to(dtype)
    elif name == "model":
        return model_drafter(model, **sizes)
    else:
        head = random_eagle3(model, (1, 0, FINAL), None if name == "whole vocabulary" else 96)
    return head_drafter(model, head, **sizes)


def model_drafter(
    model: PreTrainedModel, *, num_slots: int = 4, max_length: int = 96, chunk_tokens: int = 512
) -> tuple[SlotRunner, NetworkDrafter]:
    """A target, and a smaller model of random weights that is as exact."""
    small = tiny_model(hidden_size=32, num_hidden_layers=1).to(model.dtype)
    target, draft = (
        open_target(each, num_slots=num_slots, max_length=max_length, max_draft_tokens=7, batch_invariant="on")
        for each in (model, small)
    )
    assert isinstance(target, SlotRunner)
    return target, DraftModelDrafter(draft, chunk_tokens=chunk_tokens)


kept = cache(kind_of)


# -- exactness ---------------------------------------------------------------------------------------------------


def run(
    target: SlotRunner, drafter: Drafter | str, requests: Sequence[Request], *, late: int = 0, **more: Any
) -> tuple[Engine, list[Answer]]:
    """Answers to requests, the last ``late`` of which come after two steps."""
    engine = make_engine(drafter, target, limit=6, **more)
    for request in requests[: len(requests) - late]:
        engine.submit(request)
    begun = [output for _ in range(2) for output in engine.step()]
    for request in requests[len(requests) - late :]:
        engine.submit(request)
    found = finish_all(engine, begun)
    assert engine.metrics.drafter_failures == 0
    return engine, [whole(found[request.request_id]) for request in requests]


@settings(max_examples=12)
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
    requests = [ask("0", prompt, params, namespace=None), ask("1", prompt, max_tokens=9, namespace=None)]
    expected = run(target, "none", requests)[1]
    for chosen in (drafter, HybridDrafter([SuffixDrafter(), drafter])):
        assert run(target, chosen, requests, shape=shape)[1] == expected


def test_steps_in_which_nothing_is_drafted_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes a second. If several were one step, a head would seem to cost a fraction of what it costs."""
    target, drafter = kept("random")
    now, forward, chosen = 0.0, target.forward, HybridDrafter([SuffixDrafter(), drafter], clock=lambda: now)

    def take_a_second(*args: Any, **kwargs: Any) -> PassOutput:
        nonlocal now
        now += 1.0
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", take_a_second)
    monkeypatch.setattr(DraftBackoff, "period", lambda *_: 5)
    run(target, chosen, [ask("0", [3, 4], temperature=1.0, seed=0, max_tokens=60, ignore_eos=True)])
    assert chosen._step_rate.seconds_per_step == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in NAMES), ("random", torch.bfloat16)])
def test_a_full_house_with_reuse_and_preemption_says_what_plain_decoding_says(name: str, dtype: torch.dtype) -> None:
    """More requests than slots, with beginnings in common, and late ones that take the slots of others."""
    target, drafter = kept(name, dtype)
    random = np.random.default_rng(3)
    common = random.integers(3, 40, 24).tolist()
    requests = [
        ask(
            str(index),
            [*common[: 24 - index], *random.integers(3, 40, 1 + index % 5).tolist()],
            max_tokens=24,
            temperature=0.8 * (index % 2),
            top_k=8,
            seed=index,
            ignore_eos=True,
            logprobs=1,
            namespace="shared",
            priority=-1 if index > 8 else 0,
        )
        for index in range(12)
    ]
    expected = run(target, "none", [replace(request, priority=0) for request in requests])[1]
    config: dict[str, Any] = {"scheduling_policy": "priority", "prefill_chunk_tokens": 16}
    for shape in ("chain", "tree"):
        engine, found = run(target, drafter, requests, shape=shape, late=3, **config)
        assert found == expected
        assert engine.metrics.num_preemptions
        if name == "perfect":
            drafted = engine.metrics.by_source["head"]
            share = 0.9 if shape == "chain" else 0.27  # trees have leaves
            assert drafted.num_accepted_tokens > share * drafted.num_draft_tokens


# -- what a head says --------------------------------------------------------------------------------------------


def asked(
    slot: int, name: str, context: Sequence[int], sampling: SamplingContext | None = None, limit: int = 5
) -> DraftRequest:
    return DraftRequest(
        name,
        np.array(context, np.int32),
        1,
        None,
        limit,
        token_costs=np.zeros(1),
        sampling=sampling,
        slot=slot,
        allow_tree=True,
    )


class House:
    """A target and its drafter as an engine would use them, at random, beside what they should hold."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.target, self.drafter = kept(name, dtype, num_slots=SLOTS, max_length=LENGTH, chunk_tokens=5)
        for slot in range(SLOTS):
            self.target.rollback(slot, 0)
        self.drafter._slots.clear()
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
            shared = self.texts[donor][: min(self.target.length(donor), 12)]
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
        self.target.forward([slot], fed, [count], parents=np.array([[-1, *([0] * len(draft))]]))
        path = [0, 1 + accepted % len(draft)] if draft else [0]
        self.target.accept_paths([slot], [count], [np.array(path)])
        self.texts[slot] += [*fed[0, path[1:]].tolist(), 3 + accepted]

    def check(self, slots: Sequence[int], temperature: float) -> None:
        """The drafter's proposals, together, are those of one that reads everything from the beginning."""
        slots = [slot for slot in slots if self.names[slot]]
        requests = [self._request(slot, temperature) for slot in slots]
        drafts = self._propose(requests)
        for slot, draft in zip(slots, drafts, strict=True):
            assert_same_draft(draft, self._fresh(slot, temperature), exact=self.dtype == torch.float32)

    def fail(self, slot: int) -> None:
        """A pass of the head fails half way, unless its text is still being read; nothing of it is left behind."""
        if len(self.texts[slot]) < 2 or not self.names[slot]:
            return

        def broken(*_given: Any, **_named: Any) -> Any:
            raise RuntimeError("out of memory")

        choose = self.drafter._add_candidates
        self.drafter._add_candidates = broken  # type: ignore[method-assign]
        try:
            assert not len(self.drafter.propose([self._request(slot, 0.0)])[0].token_ids)
        except RuntimeError as error:
            assert str(error) == "out of memory"
        finally:
            self.drafter._add_candidates = choose  # type: ignore[method-assign]

    def _propose(self, requests: list[DraftRequest]) -> list[Draft]:
        """It reads a few positions at a time, so it may have to be asked again."""
        least = 2 if isinstance(self.drafter, HeadDrafter) else 1
        for _ in range(LENGTH):
            drafts = self.drafter.propose(requests)
            if all(
                len(draft.token_ids) or len(each.context) < least for draft, each in zip(drafts, requests, strict=True)
            ):
                return drafts
        raise AssertionError("it never came to an end")

    def _request(self, slot: int, temperature: float) -> DraftRequest:
        sampling = SamplingContext(params=SamplingParams(temperature=temperature), noise=SequenceNoise.seeded(7))
        return replace(asked(slot, self.names[slot], self.texts[slot], sampling), learned=SHARED)

    def _fresh(self, slot: int, temperature: float) -> Draft:
        target, drafter = kept(self.name, self.dtype, num_slots=1, max_length=LENGTH)
        text = self.texts[slot]
        target.rollback(0, 0)
        if len(text) > 1:
            target.prefill([0], pad_rows([np.array(text[:-1])]), [len(text) - 1])
        request = replace(self._request(slot, temperature), slot=0, request_id="fresh")
        drafter._slots.clear()
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
    assert isinstance(slots, HeadSlots)

    def asked_in(name: str, learned: LearnedState | None) -> DraftRequest:
        return replace(asked(0, name, text.tolist()), learned=learned)

    target.prefill([0], text[None, :-1].astype(np.int64), [len(text) - 1])
    state = slots.assign(asked_in("one", SHARED))
    assert state is not None
    slots.read([state])
    held = int(slots._kv_cache.lengths[0])
    assert held > 5
    slots.assign(asked_in("one", SHARED))
    assert slots._kv_cache.lengths[0] == len(text) - 2
    slots.assign(asked_in("other", other))
    assert slots._kv_cache.lengths[0] == (len(text) - 2 if other is SHARED else 0)


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
        slots,
        texts,
        st.none() | slots,
    ),
    st.builds(lambda slot, keep: lambda house: house.leave(slot, keep=keep), slots, st.integers(0, 9)),
    st.builds(lambda slot: lambda house: house.come_again(slot), slots),
    st.builds(
        lambda slot, draft, accepted: lambda house: house.go_on(slot, draft, accepted),
        slots,
        st.lists(st.integers(3, 40), max_size=4),
        st.integers(0, 9),
    ),
    st.builds(
        lambda some, heat: lambda house: house.check(some, heat),
        st.lists(slots, min_size=1, unique=True),
        st.sampled_from([0.0, 0.9]),
    ),
    st.builds(lambda slot: lambda house: house.fail(slot), slots),
)


@settings(max_examples=25)
@given(happened=st.lists(happenings, min_size=4, max_size=16))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("random", torch.float32), ("random", torch.bfloat16), ("parallel", torch.float32), ("model", torch.float32)],
)
def test_whatever_happened_a_network_says_what_it_would_say_of_the_text_alone(
    name: str, dtype: torch.dtype, happened: list[Callable[[House], None]]
) -> None:
    """Slots change hands, texts share beginnings, drafts are wrong, requests come again, passes of the head fail."""
    house = House(name, dtype)
    for happen in happened:
        happen(house)
    house.check(range(SLOTS), 0.0)
    house.check(range(SLOTS), 0.9)


def test_nothing_is_drafted_where_nothing_can_be_read() -> None:
    """One token has no features yet; a slot that holds less; no slot; no room."""
    target, drafter = kept("random")
    target.prefill([1], np.full((1, 9), 7), [9])
    text = [7] * 9 + [8]
    refused = [
        asked(1, "short", [7]),
        asked(2, "empty", text),
        replace(asked(1, "nowhere", text), slot=None),
        replace(asked(1, "nowhere", text), slot=-1),
        replace(asked(1, "none", text), limit=0),
    ]
    assert [len(draft.token_ids) for draft in drafter.propose(refused)] == [0] * len(refused)
    target.rollback(1, 0)


def test_what_is_new_to_a_head_takes_time_to_begin() -> None:
    target, drafter = kind_of("random", num_slots=2, max_length=96)
    drafter.warm_up()
    assert drafter.seconds_per_token(1) > 0
    target.prefill([0], np.full((1, 70), 7), [70])
    long = asked(0, "long", [7] * 70 + [8])
    drafter.propose([long])
    assert drafter.seconds_to_start(long) == 0.0
    assert drafter.seconds_to_start(replace(long, request_id="another")) > 0.0


laws = st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=1, max_size=5)


@given(laws, st.floats(0.0, 0.5), st.integers(1, 20))
def test_a_draft_is_a_chain_with_the_leaves_that_pay(weights: list[list[float]], price: float, limit: int) -> None:
    chances = np.array([[each / sum(law) for each in sorted(law, reverse=True)] for law in weights])
    ids = np.arange(chances.size).reshape(chances.shape)
    prices = np.array([price])
    chain = [int(each) for each in ids[:, 0]]
    draft = build_draft(list(ids), list(chances), prices, limit)
    found: dict[tuple[int, ...], float] = {}
    by_node: list[tuple[int, ...]] = []
    for token, parent, chance in zip(
        draft.token_ids.tolist(), draft.parents_of_all(), draft.path_probabilities(), strict=True
    ):
        by_node.append((*(by_node[parent] if parent >= 0 else ()), token))
        found[by_node[-1]] = float(chance)
    depth = min(len(chances), limit)
    assert all(tuple(chain[: i + 1]) in found for i in range(depth)) and len(found) <= limit
    leaves = {path: chance for path, chance in found.items() if path != tuple(chain[: len(path)])}
    assert all(path[:-1] == tuple(chain[: len(path) - 1]) and chance > price for path, chance in leaves.items())


@pytest.mark.parametrize("right", [0, 4])
def test_what_comes_of_drafts_says_what_the_next_are_worth(right: int) -> None:
    _, drafter = kind_of("model", num_slots=1, max_length=32)
    before = drafter._calibration[True].estimate(np.array([0.5]))[0]
    for _ in range(30):
        (draft,) = drafter.propose([asked(0, "a", [5, 6, 7])])
        num_accepted = min(right, leading_chain(np.array(draft.parents_of_all())))
        drafter.observe([DraftOutcome("a", draft, num_accepted)])
    after = drafter._calibration[True].estimate(np.array([0.5]))[0]
    assert after < before if right == 0 else after > before


# -- draft models ------------------------------------------------------------------------------------------------


def test_no_room_and_foreign_tokens_mean_no_draft_of_a_model() -> None:
    _, drafter = kind_of("model", num_slots=1, max_length=LENGTH)
    for context, length in (([5] * 46, 2), ([5] * 48, 0), ([5] * 60, 0), ([5, VOCAB], 0), ([5, -1], 0)):
        (draft,) = drafter.propose([asked(0, "a", context)])
        assert leading_chain(np.array(draft.parents_of_all())) == length
        drafter.finish("a")
    assert not len(drafter.propose([asked(1, "b", [5, 6])])[0].token_ids), "the target has more slots"


@cache
def codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


def saved(directory: Path, vocab_size: int, more_tokens: Sequence[str] = ()) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    tokenizer.add_tokens(list(more_tokens))
    tokenizer.save_pretrained(directory)
    tiny_model(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=1).save_pretrained(directory)
    return directory


def test_an_engine_with_a_draft_model_from_files_says_the_same() -> None:
    found = []
    for draft_model in (None, MODEL_PATH):
        engine = Engine.from_pretrained(
            MODEL_PATH,
            dtype="float32",
            device="cpu",
            config=EngineConfig(max_num_seqs=2, max_model_len=64),
            draft=DraftConfig(num_speculative_tokens=4),
            draft_model=draft_model,
        )
        engine.warm_up()
        requests = [ask(str(heat), [5, 9, 11], temperature=heat, seed=5, presence_penalty=0.7) for heat in (0, 0.9)]
        found.append(answers_of(engine, requests))
    assert found[0] == found[1]


def test_a_drafter_that_judges_no_drafts_has_none_beside_it() -> None:
    with pytest.raises(ConfigError, match='requires the drafter "ssd"'):
        Engine.from_pretrained(MODEL_PATH, drafter="none", draft_head=HEAD_PATH)


@pytest.mark.parametrize(
    ("fewer", "more_tokens", "message"),
    [(0, ["<another>"], "another tokenizer"), (1, [], "do not belong together")],
)
def test_a_draft_model_of_another_vocabulary_is_refused(
    fewer: int, more_tokens: list[str], message: str, tmp_path: Path
) -> None:
    directory = saved(tmp_path, codec().vocab_size - fewer, more_tokens)
    with pytest.raises(ModelError, match=message):
        load_draft_model(directory, kept("model")[0], codec())


def test_no_token_is_drafted_that_the_target_does_not_score(tmp_path: Path) -> None:
    directory = saved(tmp_path, codec().vocab_size + 64)
    target = open_target(tiny_model(vocab_size=codec().vocab_size), num_slots=1, max_length=32)
    drafter = load_draft_model(directory, target, codec(), dtype="float32", device="cpu")
    sampling = SamplingContext(
        params=SamplingParams(logit_bias=((codec().vocab_size - 1, 50.0),)), noise=SequenceNoise.seeded(1)
    )
    assert drafter.propose([asked(0, "a", [5], sampling)])[0].token_ids.max() < target.vocab_size


def test_a_recurrent_draft_model_is_refused() -> None:
    with pytest.raises(ModelError, match="recurrent"):
        DraftModelDrafter(open_target(tiny_model("Mamba"), num_slots=1, max_length=32))
