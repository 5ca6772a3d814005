"""What coupled noise chose before: the table against a dictionary, and drafts against the slow twin, node by node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import SamplingParams
from ssd.drafting import sample_cache
from ssd.drafting.noise import SequenceNoise, UInt
from ssd.drafting.protocol import Draft, DraftRequest, SamplingContext
from ssd.drafting.sample_cache import (
    BUCKET_SIZE,
    MAX_CONFIRMED,
    NO_SAMPLE,
    NamespaceSampleCaches,
    SampleCache,
    cached_sample_at,
    learn_samples,
    sample_table_at,
    sampled_token,
    times_confirmed,
)
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.drafting.token_recycling import IDLE_PASSES, MAX_TABLES
from ssd.jit.addresses import kernel
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot
from tests.reference import acceptance as slow
from tests.reference.noise import coupled_key, gumbel
from tests.reference.successors import entries_of_row
from tests.test_acceptance import asked_of, check_draft, levels_of
from tests.test_scored_sources import few_snapshots, said, told
from tests.test_search import contexts

SECRET, STREAM = 7, 3

Choices = dict[int, tuple[int, int]]

texts = st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(0, 3))


@kernel
def _choice(choices: int, key: np.uint64) -> UInt:
    return cached_sample_at(sample_table_at(choices), key)


def choice(table: SampleCache, key: int) -> tuple[int, int] | None:
    """The token that was chosen last under a key, and how often it was confirmed; None where nothing is known."""
    found = np.uint64(_choice(table.address, np.uint64(key)))
    return None if found == NO_SAMPLE else (sampled_token(found), times_confirmed(found))


def int32(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def noise_of(text: list[int], prompt_length: int, window: int, stream: int = STREAM) -> SequenceNoise:
    noise = SequenceNoise.coupled(SECRET, stream, prompt_length=prompt_length, window=window)
    noise.advance(int32(text))
    return noise


def key_behind(text: list[int], window: int) -> int:
    return coupled_key(SECRET, STREAM, text, window)


def enter(choices: Choices, text: list[int], prompt_length: int, window: int) -> int:
    """Enter what a request was told; of how many of the last tokens that was known."""
    run = 0
    for at in range(prompt_length, len(text)):
        key, token = key_behind(text[:at], window), text[at]
        before, confirmed = choices.get(key, (-1, 0))
        run = run + 1 if before == token else 0
        choices[key] = token, min(MAX_CONFIRMED, confirmed + 1) if before == token else 0
    return run


def asked(
    name: str,
    text: list[int],
    noise: SequenceNoise,
    limit: int,
    *,
    learned: LearnedState | None,
    temperature: float = 0.7,
    **more: Any,
) -> DraftRequest:
    sampling = SamplingContext(params=SamplingParams(temperature=temperature), noise=noise)
    return DraftRequest(
        name, int32(text), 0, more.pop("snapshot", None), limit, sampling=sampling, learned=learned, **more
    )


def teach(
    drafter: SuffixDrafter,
    text: list[int],
    prompt_length: int,
    window: int,
    learned: LearnedState,
    allow_caching: bool = True,
) -> None:
    request = asked("t", text, noise_of(text, prompt_length, window), 0, learned=learned, allow_caching=allow_caching)
    drafter.propose([request])
    drafter.finish("t")


@given(st.lists(texts, max_size=6), st.integers(1, 3))
def test_a_table_knows_what_was_chosen_last_under_every_key(told: list[Any], window: int) -> None:
    table, expected = SampleCache(), Choices()
    for text, prompt_length in told:
        noise = noise_of(text, prompt_length, window)
        learn_samples(table.address, noise.address, True)
        learn_samples(table.address, noise.address, True)  # nothing is new
        enter(expected, text, prompt_length, window)
    assert {key: choice(table, key) for key in expected} == expected
    assert table._table.num_entries == len(expected)


def test_a_table_grows_to_its_bound_and_then_forgets_what_was_confirmed_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_cache, "FIRST_BUCKETS", 1 << 5)
    monkeypatch.setattr(sample_cache, "MAX_BUCKETS", 1 << 9)
    table, most = SampleCache(), BUCKET_SIZE << 9

    def learn(seed: int, length: int) -> list[int]:
        text: list[int] = np.random.default_rng(seed).integers(0, 1 << 24, length).tolist()
        noise = noise_of(text, 0, 8)
        learn_samples(table.address, noise.address, True)
        return text

    def known(text: list[int]) -> list[tuple[int, int] | None]:
        return [choice(table, key_behind(text[:at], 8)) for at in range(len(text))]

    for _ in range(3):
        first = learn(0, 100)
        table.make_room()
    for number in range(1, 40):
        learn(number, 200)
        table.make_room()
    assert most >= table._table.num_entries > 0.9 * most
    assert sum(found is not None and found[0] == token for found, token in zip(known(first), first, strict=True)) > 95
    newest = learn(40, 10)
    assert known(newest) == [(token, 0) for token in newest]
    absent = np.random.default_rng(1).integers(0, 1 << 63, 10_000).tolist()
    assert sum(choice(table, key) is not None for key in absent) < 10


def test_ids_that_an_entry_cannot_hold_are_left_out() -> None:
    table, text = SampleCache(), [1, 1 << 24, -1, 5]
    noise = noise_of(text, 1, 2)
    learn_samples(table.address, noise.address, True)
    assert [choice(table, key_behind(text[:at], 2)) for at in (1, 2, 3)] == [None, None, (5, 0)]


taught = st.tuples(
    st.lists(texts, max_size=4), told, st.integers(0, 9), st.integers(1, 3), st.booleans(), st.sampled_from([0.3, 1.0])
)
situations = (few_snapshots, contexts.filter(bool), st.integers(1, 6), taught, st.sampled_from([0.02, 0.2]))


def situation(
    snapshot: Snapshot,
    context: list[int],
    others: list[tuple[list[int], int]],
    positions: list[Any],
    number: int,
    window: int,
    allow_caching: bool,
    temperature: float,
) -> tuple[SuffixDrafter, DraftRequest, slow.Asked]:
    """A drafter that other requests of the stream have taught, a request of it, and what the twin knows."""
    drafter, learned, choices = SuffixDrafter(), LearnedState(), Choices()
    successors: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    if positions:
        scored = said(positions, number, learned)
        drafter.observe([], scored)
        drafter.learn_scores(scored)
        for b in range(len(positions)):
            successors |= dict(entries_of_row(scored, b))
    for text, prompt_length in others:
        enter(choices, text, prompt_length, window)
        teach(drafter, text, prompt_length, window, learned)
    prompt_length = min(number, len(context))
    run = enter(dict(choices), context, prompt_length, window)

    def key_of(draft: list[int]) -> int:
        return key_behind([*context, *draft], window)

    def noise_behind(draft: list[int], token: int) -> float:
        return gumbel(key_of(draft), token)

    known = asked_of(
        snapshot,
        context,
        prompt_length=prompt_length,
        successors=successors,
        temperature_bucket=1 if temperature <= 0.5 else 2,
        noise=noise_behind,
        temperature=temperature,
        choices=lambda draft: choices.get(key_of(list(draft))),
        said_before=run,
    )
    noise = noise_of(context, prompt_length, window)
    request = asked("a", context, noise, 6, learned=learned, temperature=temperature, allow_caching=allow_caching)
    return drafter, replace(request, snapshot=snapshot, prompt_length=prompt_length), known


@given(*situations, st.booleans())
@settings(max_examples=120)
def test_drafts_know_the_noise_behind_every_token(
    snapshot: Snapshot, context: list[int], limit: int, taught: Any, price: float, tree: bool
) -> None:
    levels = levels_of(snapshot, context, limit + 1)
    drafter, request, known = situation(snapshot, context, *taught)
    request = replace(request, limit=limit, token_costs=np.array([price]), allow_tree=tree)
    check_draft(drafter.propose([request])[0], request, levels, known)


def drafted(drafter: SuffixDrafter, text: list[int], learned: LearnedState, **more: Any) -> Draft:
    name, stream = more.pop("name", "a"), more.pop("stream", STREAM)
    noise = noise_of(text, 4, 4, stream)
    return drafter.propose([asked(name, text, noise, 64, learned=learned, token_costs=np.array([1e-9]), **more)])[0]


ANSWER = [1, 2, 3, 4, *range(100, 200)]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("retrieval", [False, True])
def test_what_a_stream_said_is_drafted_to_its_end_without_any_place_that_says_so(tree: bool, retrieval: bool) -> None:
    drafter, learned = SuffixDrafter(retrieval=retrieval), LearnedState()
    for _ in range(3):
        teach(drafter, ANSWER, 4, 4, learned)
    draft = drafted(drafter, ANSWER[:10], learned, allow_tree=tree)
    assert (draft.token_ids.tolist(), draft.source) == (ANSWER[10:74], "coupled")
    assert (
        len(drafted(SuffixDrafter(use_sample_cache=False), ANSWER[:10], learned, name="b", allow_tree=tree).token_ids)
        == 0
    )


def test_what_may_not_teach_teaches_nobody_and_namespaces_are_apart() -> None:
    drafter, learned, other = SuffixDrafter(retrieval=False), LearnedState(), LearnedState()
    teach(drafter, ANSWER, 4, 4, learned, allow_caching=False)
    assert len(drafted(drafter, ANSWER[:10], learned, name="b").token_ids) == 0
    teach(drafter, ANSWER, 4, 4, learned)
    assert len(drafted(drafter, ANSWER[:10], learned, name="c").token_ids) > 0
    assert len(drafted(drafter, ANSWER[:10], other, name="d").token_ids) == 0
    assert len(drafted(drafter, ANSWER[:10], None, name="e").token_ids) == 0  # type: ignore[arg-type]


def test_a_table_that_is_only_read_is_in_use() -> None:
    tables, namespaces = NamespaceSampleCaches(), [LearnedState() for _ in range(MAX_TABLES + 1)]

    def table_of(learned: LearnedState, allow_caching: bool) -> int:
        return tables.table_address(
            asked("a", ANSWER, noise_of(ANSWER, 4, 4), 0, learned=learned, allow_caching=allow_caching)
        )

    for learned in namespaces[:-1]:
        table_of(learned, True)
    for _ in range(IDLE_PASSES):
        tables.begin_pass()
    read = table_of(namespaces[0], False)
    assert table_of(namespaces[-1], True) and table_of(namespaces[0], False) == read > 0


def test_what_is_said_while_a_request_runs_is_known_at_its_next_step() -> None:
    drafter, learned = SuffixDrafter(retrieval=False), LearnedState()
    noise = noise_of(ANSWER[:40], 4, 4)
    drafter.propose([asked("running", ANSWER[:40], noise, 4, learned=learned, allow_caching=True)])
    assert drafted(drafter, ANSWER[:10], learned).token_ids.tolist() == ANSWER[10:40]
    noise.advance(int32(ANSWER))
    drafter.finish("running")
    assert drafted(drafter, ANSWER[:40], learned, name="b").token_ids.tolist() == ANSWER[40:104]


def test_noise_that_has_not_taken_note_of_the_text_is_not_foreseen() -> None:
    drafter, learned = SuffixDrafter(retrieval=False), LearnedState()
    teach(drafter, ANSWER, 4, 4, learned)
    request = asked("a", ANSWER[:12], noise_of(ANSWER[:10], 4, 4), 64, learned=learned, token_costs=np.array([1e-9]))
    assert len(drafter.propose([request])[0].token_ids) == 0
