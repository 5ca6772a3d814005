"""Draft from the client's prediction of the output (OpenAI's predicted outputs).

The client sends text that most of the output will equal, such as the file to be edited. The output is compared with it
token by token; after a difference, the last output tokens are searched in the prediction again.
"""

from __future__ import annotations

from typing import Final

from ssd.drafting.draft_records import NO_TOKEN, DraftParams, PredictionCursor
from ssd.drafting.draft_scratch import ScanHits
from ssd.jit.addresses import TokenIds, inlined, int32_array, kernel
from ssd.retrieval.scan import scan

_LONGEST: Final = 32

_FAR: Final = 64
"""The maximum distance in tokens from the expected position in the prediction to a match of only one token.

A match of one token that is farther away is ignored.
"""


@inlined
def reset_prediction(state: PredictionCursor, prompt_length: int) -> None:
    state.position, state.match_length, state.num_compared, state.has_differed = 0, 0, prompt_length, 0


@kernel
def advance_prediction(state: PredictionCursor, prediction: TokenIds, context: TokenIds, hits: ScanHits) -> None:
    """Compare the new output tokens with the client's prediction, and find where the output continues in it.

    After a difference, the last tokens of the context are searched in the whole prediction. The output is expected to
    continue after the longest match; among equally long matches, the nearest to the old position wins. Without a match,
    the position advances by one token, as if one token was replaced. O(new tokens), and O(prediction) more for each
    token that differs.
    """
    position, match_length = state.position, state.match_length
    for i in range(state.num_compared, len(context)):
        if position < len(prediction) and prediction[position] == context[i]:
            position, match_length = position + 1, match_length + 1
            continue
        position, match_length = min(position + 1, len(prediction)), 0
        state.has_differed = 1
    state.num_compared = len(context)
    if state.has_differed and match_length < _LONGEST:
        found = scan(prediction, 0, len(prediction), context, min(len(context), _LONGEST), hits.positions, hits.lengths)
        best, longest = position, match_length
        for hit in range(found):
            length, distance = hits.lengths[hit], abs(hits.positions[hit] - position)
            is_nearer = length == longest and length > 0 and distance < abs(best - position)
            if (length > longest or is_nearer) and (length > 1 or distance <= _FAR):
                best, longest = hits.positions[hit], length
        position, match_length = best, longest
    state.position, state.match_length = position, match_length


@inlined
def predicted_token(params: DraftParams, prediction: PredictionCursor, depth: int) -> int:
    """Return the token that the client predicts ``depth`` draft tokens after the context; NO_TOKEN if there is none."""
    position = prediction.position + depth
    return (
        int(int32_array(params.prediction, params.prediction_length)[position])
        if position < params.prediction_length
        else NO_TOKEN
    )
