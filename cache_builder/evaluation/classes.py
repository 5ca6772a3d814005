"""Classes of traffic that can be seen in a log without being told: what kind of repetition a request brings.

All but the first letter of a request's fate is decided by how much of what it says stood somewhere before; these say
where. A request's class is the first of `DEFINITIONS` that is true of it, whatever the order of the log.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from cache_builder.evaluation.log import Log
from cache_builder.replay.rows import Row, TokenIds

ASKED_AGAIN: Final = "asked again"
QUOTES: Final = "quotes its prompt"
NEXT_TURN: Final = "next turn"
SHARED: Final = "shared instructions"
NEW: Final = "new text"

DEFINITIONS: Final = {
    ASKED_AGAIN: "the same prompt stands in the logs more than once",
    QUOTES: "at least half of the output stands in its own prompt, in runs of 8 tokens or more",
    NEXT_TURN: "its prompt goes on from the prompt and the answer of another request",
    SHARED: "its prompt begins with the same 64 tokens as at least three others",
    NEW: "none of these",
}

_RUN_TOKENS: Final = 8
_TURN_TOKENS: Final = 16
_SHARED_TOKENS: Final = 64
_LEAST_SHARING: Final = 4
_FACTOR: Final = 0x9E3779B97F4A7C15

Keys = npt.NDArray[np.uint64]


def classes_of(log: Log) -> list[str]:
    """The class of each request, by its number. O(tokens)."""
    prompts, beginnings = Counter[int](), Counter[int]()
    answered: set[int] = set()
    powers = _powers(int(np.diff(log.starts).max(initial=1)))
    for number in range(len(log)):
        row = log.row(number)
        prompts[_digest(row.context)] += 1
        if len(row.context) >= _SHARED_TOKENS:
            beginnings[_digest(row.context[:_SHARED_TOKENS])] += 1
        behind = len(row.context) // _TURN_TOKENS  # the first block that ends in the answer
        text = row.text()
        if len(row.context) and (behind + 1) * _TURN_TOKENS <= len(text):
            answered.add(int(_beginnings(text[: (behind + 1) * _TURN_TOKENS], powers)[-1]))
    return [_class_of(log.row(number), prompts, beginnings, answered, powers) for number in range(len(log))]


def _class_of(row: Row, prompts: Counter[int], beginnings: Counter[int], answered: set[int], powers: Keys) -> str:
    prompt = row.context
    if len(prompt) and prompts[_digest(prompt)] > 1:
        return ASKED_AGAIN
    if 2 * _num_quoted(row) >= len(row.output) > 0:
        return QUOTES
    if not answered.isdisjoint(_beginnings(prompt, powers).tolist()):
        return NEXT_TURN
    if len(prompt) >= _SHARED_TOKENS and beginnings[_digest(prompt[:_SHARED_TOKENS])] >= _LEAST_SHARING:
        return SHARED
    return NEW


def _digest(tokens: TokenIds) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).tobytes())


def _powers(count: int) -> Keys:
    """uint64[count], 1, F, F^2, ... modulo 2^64."""
    factors = np.full(count, _FACTOR, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _beginnings(tokens: TokenIds, powers: Keys) -> Keys:
    """uint64[n // 16]: a hash of the first 16, 32, ... tokens. O(n)."""
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
    ends: Keys = np.cumsum(terms, dtype=np.uint64)[_TURN_TOKENS - 1 :: _TURN_TOKENS]
    return (ends ^ (ends >> np.uint64(29))) * np.uint64(_FACTOR)


def runs(tokens: TokenIds, length: int = _RUN_TOKENS) -> Keys:
    """uint64[n - length + 1]: a hash of each run of ``length`` tokens, by where it begins. O(n)."""
    room = max(0, len(tokens) - length + 1)
    keys = np.zeros(room, np.uint64)
    for place in range(length):
        keys = keys * np.uint64(_FACTOR) + tokens[place : place + room].astype(np.uint64)
    return (keys ^ (keys >> np.uint64(29))) * np.uint64(_FACTOR)


def _num_quoted(row: Row) -> int:
    """Tokens of the output that lie in runs of the prompt."""
    said = np.isin(runs(row.output), runs(row.context))
    begins = np.flatnonzero(said)
    if not len(begins):
        return 0
    change = np.zeros(len(row.output) + 1, np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, begins + _RUN_TOKENS, -1)
    return int((np.cumsum(change[:-1]) > 0).sum())
