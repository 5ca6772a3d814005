"""What the target itself is going to say, before it has spoken: its candidates here before, and its own noise.

A sampled token is ``argmax(log p + g)``, and the noise g is a pure function of token and key, and the key one of seed
and position or of what stands before (`noise`): known now.
Given it, a token that the target holds at p comes with the chance ``exp(-exp(-(log(p / (1 - p)) + g)))``: the greatest
score of the others is Gumbel distributed (Maddison et al. 2014, section 3). Where an entry says what the target held
likely here before, its noisy scores are compared outright. How far either is to be trusted is learned, as of any view.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import (
    Address,
    Float64,
    Float64s,
    Int64,
    Int64s,
    Record,
    Uint64,
    UInt64s,
    inlined,
    int32_array,
)
from ssd.drafting.choices import NO_CHOICE, choice_at, choices_at, learn_choices, times_confirmed, token_of
from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, DraftRecord, parent_of
from ssd.drafting.lookup import NOTHING
from ssd.drafting.noise import coupled_place, gumbel_at, hash_behind, key_at, noise_at, times_counted
from ssd.drafting.successors import NO_ENTRY, SHARES, SUCCESSORS, row_after_one, row_after_two, successors_at

NOT_ASKED: Final = -1
"""The number of candidates where they were not looked up."""


class Recycled(Record):
    """One entry of a `SuccessorTable`.

    ``count`` : its tokens, 0 where there is no entry, NOT_ASKED where none was sought. ``is_pair`` : it is known after
    two tokens. ``tokens``, ``shares`` : as there.
    """

    count: Int64
    is_pair: Int64
    tokens: Annotated[Int64s, np.int64, SUCCESSORS]
    shares: Annotated[Int64s, np.int64, SUCCESSORS]


@inlined
def recall(successors: int, earlier: int, before: int, recycled: Recycled) -> None:
    """Make the entry after two tokens, else after the last one, ``recycled``; ``earlier`` is NOTHING for no token.

    ``successors`` : address of the table. O(1).
    """
    recycled.count = 0
    if before < 0:
        return
    table = successors_at(successors)
    row = row_after_two(table, earlier, before) if earlier >= 0 else NO_ENTRY
    recycled.is_pair = int(row != NO_ENTRY)
    if row == NO_ENTRY:
        row = row_after_one(table, before)
    if row == NO_ENTRY:
        return
    entry, count = table.entries[row], 0
    while count < SUCCESSORS and entry.tokens[count] >= 0:
        recycled.tokens[count], recycled.shares[count] = entry.tokens[count], entry.shares[count]
        count += 1
    recycled.count = count


@inlined
def rank_of(recycled: Recycled, token: int) -> int:
    """Where in the entry a token stands, SUCCESSORS where it does not."""
    for rank in range(recycled.count):
        if recycled.tokens[rank] == token:
            return rank
    return SUCCESSORS


VERDICTS: Final = 7
"""0: no entry; 1: not in it; in it 2: far behind the best, 3: close behind it; the best 4: by little, 5: clearly, 6: by
far."""

HEIGHTS: Final = 8
"""Buckets of noise."""

TYPICAL_SHARE: Final = np.array([0.015, 0.045, 0.09, 0.18, 0.36, 0.62, 0.81, 0.95])
"""What a share of an entry stands for."""

assert len(TYPICAL_SHARE) == SHARES
_LOG_SHARE: Final = np.log(TYPICAL_SHARE)
_CLOSE: Final = 1.0
_CLEARLY: Final = 0.5
_BY_FAR: Final = 1.5


class Foreseen(Record):
    """Noise at a position of a draft.

    ``is_known`` : 0 where the target does not draw, or not with noise that is known. ``noise`` : address of the
    `NoiseRecord`, ``request`` and ``window`` : of that. ``context`` : int32[start], the text before the draft.
    ``temperature`` : the request's. ``key`` : of the position. ``hashes`` : where the window is not 0, of what stands
    behind each node n at n + 1, see `hash_behind`. ``scores`` : of the tokens of the entry there, log shares at the
    request's temperature and noise. ``best`` : which is greatest; ``lead`` : its score less that of the second,
    infinite where there is none.
    """

    is_known: Int64
    noise: Address
    request: Uint64
    window: Int64
    context: Address
    start: Int64
    temperature: Float64
    key: Uint64
    hashes: Annotated[UInt64s, np.uint64, MAX_DRAFT + 1]
    best: Int64
    lead: Float64
    scores: Annotated[Float64s, np.float64, SUCCESSORS]


@inlined
def begin_position(foreseen: Foreseen, out: DraftRecord, node: int, depth: int) -> None:
    """Take up the noise behind a node of the draft ``out``, -1 for its beginning, behind ``depth`` of its tokens.

    Of coupled noise, the positions on the path to it must have been taken up before. O(1), coupled O(window + depth).
    """
    if foreseen.window == 0:
        foreseen.key = key_at(foreseen.request, foreseen.start + depth)
    else:
        _begin_coupled(foreseen, out, node)


@inlined
def _begin_coupled(foreseen: Foreseen, out: DraftRecord, node: int) -> None:
    context, parents = int32_array(foreseen.context, foreseen.start), out.parents[: MAX_DRAFT if out.is_tree else 0]
    found = hash_behind(foreseen.window, context, foreseen.start, out.tokens, parents, node)
    times, above = times_counted(noise_at(foreseen.noise), found), node
    while above >= 0:
        above = parent_of(out, above)
        times += foreseen.hashes[above + 1] == found
    foreseen.hashes[node + 1] = found
    foreseen.key = key_at(foreseen.request, coupled_place(found, times))


@inlined
def weigh(foreseen: Foreseen, recycled: Recycled) -> None:
    """Compare the tokens of an entry as the target will, if it holds them as likely as it did. O(tokens)."""
    foreseen.best = 0
    second = -math.inf
    for rank in range(recycled.count):
        noise = gumbel_at(foreseen.key, recycled.tokens[rank])
        score = _LOG_SHARE[recycled.shares[rank]] / foreseen.temperature + noise
        foreseen.scores[rank] = score
        if rank == 0:
            continue
        if score > foreseen.scores[foreseen.best]:
            second, foreseen.best = foreseen.scores[foreseen.best], rank
        elif score > second:
            second = score
    foreseen.lead = foreseen.scores[foreseen.best] - second


@inlined
def verdict_on(foreseen: Foreseen, recycled: Recycled, rank: int) -> int:
    """What noise and the entry say of its token at ``rank``, SUCCESSORS for another one: 0..VERDICTS - 1."""
    if recycled.count <= 0:
        return 0
    if rank == SUCCESSORS:
        return 1
    if rank != foreseen.best:
        return 3 if foreseen.scores[foreseen.best] - foreseen.scores[rank] < _CLOSE else 2
    if foreseen.lead < _CLEARLY:
        return 4
    return 5 if foreseen.lead < _BY_FAR else 6


@inlined
def height_of(foreseen: Foreseen, token: int) -> int:
    """The bucket of a token's noise, 0..HEIGHTS - 1."""
    noise = gumbel_at(foreseen.key, token)
    return int(min(HEIGHTS - 1, max(0, int(2.0 * (noise + 1.0) + 1.0))))


RUNS: Final = 6
"""Buckets of a number of tokens in a row."""

_RUN_BUCKETS: Final = np.searchsorted([1, 2, 4, 8, 16], np.arange(17), side="right")


class Keyed(Record):
    """What was chosen before under the key of the position that is looked at.

    ``choices`` : address of the `ChoiceTable`, 0 where none is looked up. ``token`` : the one chosen, NOTHING where the
    key is new; ``confirmed`` : how often in a row. ``run`` : how many tokens right before the position, drafted or said
    already, are what was known there. ``said_before`` : ``run`` at the context's end.

    ``tokens``, ``runs`` : the same of every position looked at, those behind node n at n + 1.
    """

    choices: Address
    token: Int64
    confirmed: Int64
    run: Int64
    said_before: Int64
    tokens: Annotated[Int64s, np.int64, MAX_DRAFT + 1]
    runs: Annotated[Int64s, np.int64, MAX_DRAFT + 1]


@inlined
def run_bucket(run: int) -> int:
    """0..RUNS - 1."""
    return int(_RUN_BUCKETS[min(run, 16)])


@inlined
def _recall_choice(keyed: Keyed, foreseen: Foreseen, out: DraftRecord, node: int) -> None:
    choice = choice_at(choices_at(keyed.choices), foreseen.key)
    keyed.token, keyed.confirmed, keyed.run = NOTHING, times_confirmed(choice), keyed.said_before
    if choice != np.uint64(NO_CHOICE):
        keyed.token = token_of(choice)
    if node >= 0:
        above = parent_of(out, node) + 1
        keyed.run = keyed.runs[above] + 1 if keyed.tokens[above] == out.tokens[node] else 0
    keyed.tokens[node + 1], keyed.runs[node + 1] = keyed.token, keyed.run


@inlined
def begin_node(keyed: Keyed, foreseen: Foreseen, out: DraftRecord, node: int, depth: int) -> None:
    """Take up the position behind a node of a draft, -1 for the context's end, behind ``depth`` of its tokens.

    The positions on the path to it have been taken up before. O(depth) with coupled noise, else O(1).
    """
    if foreseen.is_known:
        begin_position(foreseen, out, node, depth)
    if keyed.choices != 0:
        _recall_choice(keyed, foreseen, out, node)


@inlined
def foresee(params: DraftParams, foreseen: Foreseen, keyed: Keyed) -> None:
    """Take up the noise that the target draws with for this request, if it does, and what is known of it."""
    foreseen.is_known, keyed.choices, keyed.token = int(params.temperature > 0.0), 0, NOTHING
    if params.temperature <= 0.0:
        return
    noise = noise_at(params.noise)
    foreseen.noise, foreseen.request, foreseen.window = params.noise, noise.request, noise.window
    foreseen.context, foreseen.start, foreseen.temperature = params.context, params.context_length, params.temperature
    if params.sample_cache != 0:
        learn_choices(params.sample_cache, params.noise, params.allow_caching == 1)
        keyed.choices, keyed.said_before = params.sample_cache, noise.run
