"""A place in the text that the client predicts, kept where the output leaves it.

OpenAI's predicted outputs: the client sends text that most of the output will equal, such as the file to be edited. The
output is followed in it; where it differs the place is found again behind the edit.
"""

from __future__ import annotations

from typing import Final

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel
from ssd.drafting.suffix.gather import Hits
from ssd.retrieval.scan import scan

_PLACE: Final = 0  # in the prediction, where the output is thought to go on
_AGREED: Final = 1  # tokens before it that agree, since the last difference
_FOLLOWED: Final = 2  # length of the context that was followed so far
_WAS_WRONG: Final = 3
PREDICTION_INT64S: Final = 4

_LONGEST: Final = 32
_FAR: Final = 64
"""A single token that agrees means little so far from where the output left."""


@inlined
def place_of(state: Int64s) -> tuple[int, int, bool]:
    """Where the output is thought to go on, for how many tokens it agreed, and whether it was never wrong."""
    return int(state[_PLACE]), int(state[_AGREED]), state[_WAS_WRONG] == 0


@inlined
def begin_prediction(state: Int64s, prompt_length: int) -> None:
    """A new request: the output is thought to begin as the prediction does."""
    state[:] = 0
    state[_FOLLOWED] = prompt_length


@kernel
def follow_prediction(state: Int64s, prediction: TokenIds, context: TokenIds, hits: Hits) -> None:
    """Follow what came since. O(new tokens), and O(prediction) for each of which that differs.

    Where a token differs the place moves on by one, as if one was replaced by one, and the context's last tokens are
    sought in all of the prediction: the longest agreement wins, the nearest to the old place among equals.
    """
    place, agreed = state[_PLACE], state[_AGREED]
    for i in range(state[_FOLLOWED], len(context)):
        if place < len(prediction) and prediction[place] == context[i]:
            place, agreed = place + 1, agreed + 1
            continue
        place, agreed = min(place + 1, len(prediction)), 0
        state[_WAS_WRONG] = 1
    state[_FOLLOWED] = len(context)
    if state[_WAS_WRONG] and agreed < _LONGEST:
        found = scan(prediction, 0, len(prediction), context, min(len(context), _LONGEST), hits.positions, hits.lengths)
        best, longest = place, agreed
        for hit in range(found):
            length, distance = hits.lengths[hit], abs(hits.positions[hit] - place)
            is_nearer = length == longest and length > 0 and distance < abs(best - place)
            if (length > longest or is_nearer) and (length > 1 or distance <= _FAR):
                best, longest = hits.positions[hit], length
        place, agreed = best, longest
    state[_PLACE], state[_AGREED] = place, agreed
