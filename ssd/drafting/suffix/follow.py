"""Following text that is being repeated: what a request keeps from one step to the next.

While the output repeats stored text word for word, the places that agreed longest at one step, moved on by the tokens
that came since, are still there at the next one: comparing those few tokens takes the place of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import TokenIds, inlined, kernel
from ssd.compiled.records import Int64, Record
from ssd.drafting.suffix.gather import Evidence, Texts, is_lost, move_sample, next_token

MAX_FOLLOWED: Final = 8
"""Places kept: those of the longest match, the first of them."""

_COMPARED: Final = 8  # last tokens by which a context is known again

_WEIGHT_ONE: Final = 65536.0

NO_TABLE: Final = -1
"""The number of no segment table: nothing is kept."""


class FollowedPlace(Record):
    """A sample, see `gather.Evidence`. ``weight`` : in units of 2^-16."""

    kind: Int64
    at: Int64
    width: Int64
    recency: Int64
    weight: Int64


class Followed(Record):
    """Places kept from one step to the next.

    ``table`` : number of the segment table they are in. ``length`` : of the context they were kept for, ``ends_with`` :
    a number of its last tokens. ``agreeing`` : tokens that agreed before them.
    """

    table: Int64
    length: Int64
    ends_with: Int64
    agreeing: Int64
    count: Int64
    places: Annotated[Sequence[FollowedPlace], FollowedPlace, MAX_FOLLOWED]


@inlined
def _end_of(context: TokenIds, length: int) -> int:
    """A number of the last tokens of ``context[:length]``: another context has another, most probably."""
    number = np.int64(length)
    for i in range(max(0, length - _COMPARED), length):
        number = (number * 1_000_003) ^ np.int64(context[i])
    return int(number)


@kernel
def follow(followed: Followed, table: int, texts: Texts, max_length: int, evidence: Evidence) -> None:
    """Make the places kept that went on as the context did the evidence: 1 level, or none when a search is needed.

    ``table`` : number of the segment table; places in another are not looked at, nor for a context that does not go on
    from the one they were kept for, nor places that the tail has lost since. The level is as sure as one that a search
    finds: at least ``max_length`` tokens agree.
    """
    evidence.num_levels = 0
    size, first = 0, followed.length
    grown = len(texts.context) - first
    if followed.table != table or grown < 0 or followed.agreeing + grown < max_length:
        return
    if _end_of(texts.context, first) != followed.ends_with:
        return
    for i in range(followed.count):
        place = followed.places[i]
        evidence.kind[size], evidence.at[size], evidence.width[size] = place.kind, place.at, place.width
        evidence.recency[size], evidence.weights[size] = place.recency, place.weight / _WEIGHT_ONE
        if is_lost(evidence, size, texts):
            continue
        depth = 0
        while depth < grown:
            token = next_token(evidence, size, depth, texts)
            if token < 0 or token != texts.context[first + depth]:
                break
            depth += 1
        if depth == grown:
            move_sample(evidence, size, grown)
            size += 1
    evidence.lengths[0], evidence.ends[0] = min(max_length, followed.agreeing + grown), size
    evidence.num_levels = 1 if size > 0 else 0


@kernel
def keep(followed: Followed, table: int, texts: Texts, evidence: Evidence) -> None:
    """Keep the places of the longest match for the next step."""
    followed.table = NO_TABLE
    if evidence.num_levels == 0:
        return
    count = min(evidence.ends[0], MAX_FOLLOWED)
    for i in range(count):
        place = followed.places[i]
        place.kind, place.at, place.width = evidence.kind[i], evidence.at[i], evidence.width[i]
        place.recency, place.weight = evidence.recency[i], int(evidence.weights[i] * _WEIGHT_ONE)
    length = len(texts.context)
    followed.table, followed.length, followed.ends_with = table, length, _end_of(texts.context, length)
    followed.agreeing, followed.count = evidence.lengths[0], count
