"""Following text that is being repeated: what a request keeps from one step to the next.

While the output repeats stored text word for word, the places that agreed longest at one step, moved on by the tokens
that came since, are still there at the next one: comparing those few tokens takes the place of a search.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel
from ssd.drafting.suffix.gather import Levels, Pool, Texts, is_lost, move_sample, next_token

MAX_FOLLOWED: Final = 8
"""Places kept: those of the longest match, the first of them."""

_COMPARED: Final = 8  # last tokens by which a context is known again

_TABLE: Final = 0
_LENGTH: Final = 1
_AGREEING: Final = 2
_COUNT: Final = 3
_ENDS_WITH: Final = 4
_HEADER: Final = 5
_PLACE: Final = 5
STATE_INT64S: Final = _HEADER + _PLACE * MAX_FOLLOWED

NO_TABLE: Final = -1
"""In the first word: nothing is kept."""


@inlined
def _end_of(context: TokenIds, length: int) -> int:
    """A number of the last tokens of ``context[:length]``: another context has another, most probably."""
    number = np.int64(length)
    for i in range(max(0, length - _COMPARED), length):
        number = (number * 1_000_003) ^ np.int64(context[i])
    return int(number)


@kernel
def follow(state: Int64s, table: int, texts: Texts, max_length: int, pool: Pool, levels: Levels) -> int:
    """Fill ``pool`` with the places kept that went on as the context did; 1 level, or 0 when a search is needed.

    ``table`` : number of the segment table; places in another are not looked at, nor for a context that does not go on
    from the one they were kept for, nor places that the tail has lost since. The level is as sure as one that a search
    finds: at least ``max_length`` tokens agree.
    """
    size, first = 0, state[_LENGTH]
    grown = len(texts.context) - first
    if state[_TABLE] != table or grown < 0 or state[_AGREEING] + grown < max_length:
        return 0
    if _end_of(texts.context, first) != state[_ENDS_WITH]:
        return 0
    for i in range(state[_COUNT]):
        place = state[_HEADER + _PLACE * i : _HEADER + _PLACE * (i + 1)]
        pool.kind[size], pool.at[size], pool.width[size], pool.recency[size] = place[0], place[1], place[2], place[3]
        pool.weights[size] = place[4] / 65536.0
        if is_lost(pool, size, texts):
            continue
        depth = 0
        while depth < grown:
            token = next_token(pool, size, depth, texts)
            if token < 0 or token != texts.context[first + depth]:
                break
            depth += 1
        if depth == grown:
            move_sample(pool, size, grown)
            size += 1
    levels.lengths[0], levels.ends[0] = min(max_length, state[_AGREEING] + grown), size
    return 1 if size > 0 else 0


@kernel
def keep(state: Int64s, table: int, texts: Texts, pool: Pool, levels: Levels, num_levels: int) -> None:
    """Keep the places of the longest match for the next step."""
    state[_TABLE] = NO_TABLE
    if num_levels == 0:
        return
    count = min(MAX_FOLLOWED, levels.ends[0])
    state[_TABLE], state[_LENGTH], state[_AGREEING], state[_COUNT] = table, len(texts.context), levels.lengths[0], count
    state[_ENDS_WITH] = _end_of(texts.context, len(texts.context))
    for i in range(count):
        place = state[_HEADER + _PLACE * i : _HEADER + _PLACE * (i + 1)]
        place[0], place[1], place[2], place[3] = pool.kind[i], pool.at[i], pool.width[i], pool.recency[i]
        place[4] = np.int64(pool.weights[i] * 65536.0)
