"""A place in the text that the client predicts, kept where the output leaves it.

OpenAI's predicted outputs: the client sends text that most of the output will equal, such as the file to be edited. The
output is followed in it; where it differs the place is found again behind the edit.
"""

from __future__ import annotations

from typing import Final

from ssd.compiled.addresses import TokenIds, inlined, kernel
from ssd.compiled.records import Int64, Record
from ssd.drafting.suffix.gather import Hits
from ssd.retrieval.search import scan

_LONGEST: Final = 32
_FAR: Final = 64
"""A single token that agrees means little so far from where the output left."""


class PredictionPlace(Record):
    """Where in its prediction a request's output is.

    ``place`` : where it is thought to go on; ``agreed`` : tokens before that which agree, since the last difference.
    ``num_followed`` : length of the context that was followed so far. ``was_wrong`` : whether any token differed.
    """

    place: Int64
    agreed: Int64
    num_followed: Int64
    was_wrong: Int64


@inlined
def begin_prediction(state: PredictionPlace, prompt_length: int) -> None:
    """Begin with a request, whose output is thought to begin as the prediction does."""
    state.place, state.agreed, state.num_followed, state.was_wrong = 0, 0, prompt_length, 0


@kernel
def follow_prediction(state: PredictionPlace, prediction: TokenIds, context: TokenIds, hits: Hits) -> None:
    """Follow what came since. O(new tokens), and O(prediction) for each of which that differs.

    Where a token differs the place moves on by one, as if one was replaced by one, and the context's last tokens are
    sought in all of the prediction: the longest agreement wins, the nearest to the old place among equals.
    """
    place, agreed = state.place, state.agreed
    for i in range(state.num_followed, len(context)):
        if place < len(prediction) and prediction[place] == context[i]:
            place, agreed = place + 1, agreed + 1
            continue
        place, agreed = min(place + 1, len(prediction)), 0
        state.was_wrong = 1
    state.num_followed = len(context)
    if state.was_wrong and agreed < _LONGEST:
        found = scan(prediction, 0, len(prediction), context, min(len(context), _LONGEST), hits.positions, hits.lengths)
        best, longest = place, agreed
        for hit in range(found):
            length, distance = hits.lengths[hit], abs(hits.positions[hit] - place)
            is_nearer = length == longest and length > 0 and distance < abs(best - place)
            if (length > longest or is_nearer) and (length > 1 or distance <= _FAR):
                best, longest = hits.positions[hit], length
        place, agreed = best, longest
    state.place, state.agreed = place, agreed
