"""What the target chose behind a token that was wrong: a guess at the same places of the text that goes on.

Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427) and lookahead decoding (Fu et al. 2024, arXiv 2402.02057) feed
such guesses again; here they are offered, and judged with all else. A sampled guess was chosen with the noise of its
place, which is the noise of the next pass there.
"""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, inlined
from ssd.compiled.records import Int64, Record
from ssd.drafting.offers import GUESS
from ssd.drafting.suffix.gather import NOTHING
from ssd.drafting.suffix.offered import MAX_GUESSED, ROOT, Forest, offer

_DRAFTED_TOO: Final = 0.7
"""Chance that is given to a guess which the draft said as well, though behind another token."""
_GUESSED: Final = 0.3
"""Of another one. What either is worth is learned."""


class Guesses(Record):
    """Kept of a request's last pass: ``count`` tokens, one after the other, and whether the draft said each too.

    ``before``, ``last`` : the two tokens that the text ended with then, which the guesses come after.
    """

    count: Int64
    before: Int64
    last: Int64
    tokens: Annotated[Int64s, np.int64, MAX_GUESSED]
    drafted_too: Annotated[Int64s, np.int64, MAX_GUESSED]


@inlined
def _next_fed(parents: Int64s, is_tree: bool, count: int, node: int, token: int, fed: Int64s) -> int:
    """What was fed behind a node: ``token`` if it was, else the first; NOTHING where the draft ended."""
    if not is_tree:
        return node + 1 if node + 1 < count else NOTHING
    first = NOTHING
    for child in range(node + 1, count):
        if parents[child] == node:
            if fed[child] == token:
                return child
            if first == NOTHING:
                first = child
    return first


@inlined
def keep_guesses(
    guesses: Guesses, fed: Int64s, parents: Int64s, is_tree: bool, count: int, chosen: Int64s, end: int
) -> None:
    """Keep what was chosen behind the first wrong token of one row, and on along its draft.

    The row as `ScoredPass` has it, ``count`` positions of it; ``end`` : the last of those that were right. O(positions
    * guesses), of a chain O(guesses).
    """
    size, node = 0, NOTHING
    if 0 <= end < count:
        guesses.before, guesses.last = fed[end], chosen[end]
        node = _next_fed(parents, is_tree, count, end, chosen[end], fed)
    while node >= 0 and size < MAX_GUESSED:
        after = _next_fed(parents, is_tree, count, node, chosen[node], fed)
        guesses.tokens[size] = chosen[node]
        guesses.drafted_too[size] = int(after >= 0 and fed[after] == chosen[node])
        node, size = after, size + 1
    guesses.count = size


@inlined
def offer_guesses(guesses: Guesses, context: TokenIds, forest: Forest) -> None:
    """Add to the forest what was guessed, where the context is that of the last pass. O(guesses)."""
    n = len(context)
    if guesses.count == 0 or n < 2 or context[n - 1] != guesses.last or context[n - 2] != guesses.before:
        return
    node = ROOT
    for i in range(guesses.count):
        node = offer(forest, node, guesses.tokens[i], _DRAFTED_TOO if guesses.drafted_too[i] else _GUESSED, GUESS)
