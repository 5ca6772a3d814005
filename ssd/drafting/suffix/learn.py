"""What a request's last draft was judged by, kept until the target's own tokens say what came of it.

Learning from the context instead of from counts of accepted tokens teaches more: also a token that was left out of the
draft, and one that was cut from it, was right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel
from ssd.compiled.records import Int64, Record
from ssd.drafting.suffix.acceptance import ERROR_BUCKETS, INPUTS, Model, learn

MAX_JUDGED: Final = 48
"""Candidates kept of one draft, the first of it."""

_ERROR_ONE: Final = 1 << 20
_ERROR_RATE: Final = 0.1


class JudgedCandidate(Record):
    """A candidate and what it was judged by.

    ``parent`` : the judged candidate it goes on from, -1 at the context's end. ``depth`` : draft tokens before it.
    ``came`` : 1 when the token came, -1 when it did not, 0 while that is not known. ``weight_set``, ``inputs`` : see
    `acceptance.chance_of`.
    """

    token: Int64
    parent: Int64
    depth: Int64
    came: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, INPUTS]


class JudgedDraft(Record):
    """The candidates of a request's last draft: the drafted tokens, in their order, then those left out.

    ``start`` : length of the context that was drafted after. ``num_drafted`` : of the candidates, those that were in
    the draft. ``mean_error`` : of all drafts of the request, running mean of label - chance, in units of 2^-20.
    """

    count: Int64
    start: Int64
    num_drafted: Int64
    mean_error: Int64
    candidates: Annotated[Sequence[JudgedCandidate], JudgedCandidate, MAX_JUDGED]


@inlined
def forget_draft(judged: JudgedDraft) -> None:
    """A new request: nothing was drafted, and no error is known."""
    judged.count, judged.start, judged.num_drafted, judged.mean_error = 0, 0, 0, 0


@inlined
def begin_draft(judged: JudgedDraft, context_length: int) -> None:
    """A new draft."""
    judged.count, judged.start, judged.num_drafted = 0, context_length, 0


@inlined
def error_bucket(judged: JudgedDraft) -> int:
    """How the request's drafts fared against their estimates lately: 0..ERROR_BUCKETS - 1, half of it as estimated."""
    error = judged.mean_error / _ERROR_ONE
    return int(min(ERROR_BUCKETS - 1, max(0, int((error + 0.4) * 10.0))))


@inlined
def keep_judged(
    judged: JudgedDraft, token: int, parent: int, depth: int, weight_set: int, inputs: Int64s, drafted: bool
) -> None:
    """Keep what a candidate was judged by. ``parent`` : the judged one it goes on from, -1 at the context's end."""
    count = judged.count
    if count == MAX_JUDGED:
        return
    candidate = judged.candidates[count]
    candidate.token, candidate.parent, candidate.depth, candidate.weight_set = token, parent, depth, weight_set
    for i in range(INPUTS):
        candidate.inputs[i] = inputs[i]
    judged.count = count + 1
    judged.num_drafted += int(drafted)


@inlined
def _learn_one(judged: JudgedDraft, candidate: JudgedCandidate, came: bool, model: Model) -> None:
    candidate.came = 1 if came else -1
    error = learn(model, candidate.inputs, candidate.weight_set, 1.0 if came else 0.0)
    judged.mean_error += int(_ERROR_RATE * (error * _ERROR_ONE - judged.mean_error))


@kernel
def learn_from_context(judged: JudgedDraft, context: TokenIds, model: Model) -> None:
    """Learn from what came after the context that was drafted after. What is behind a wrong token teaches nothing."""
    for i in range(judged.count):
        candidate = judged.candidates[i]
        place, parent = judged.start + candidate.depth, candidate.parent
        candidate.came = 0
        if place < len(context) and (parent < 0 or judged.candidates[parent].came == 1):
            _learn_one(judged, candidate, context[place] == candidate.token, model)
    judged.count = 0


@kernel
def learn_from_path(judged: JudgedDraft, num_verified: int, path: TokenIds, model: Model) -> None:
    """Learn from what was accepted of the last draft: the request has ended, its text is not seen again.

    ``num_verified`` : tokens of the draft that were not cut before it was verified. ``path`` : int32[n], the indices
    of the n accepted ones; 0, 1, 2 ... of a chain. Those whose predecessors all are on it were tested.
    """
    for i in range(min(judged.num_drafted, num_verified)):
        candidate = judged.candidates[i]
        depth = candidate.depth
        if depth <= len(path) and (depth == 0 or path[depth - 1] == candidate.parent):
            _learn_one(judged, candidate, depth < len(path) and path[depth] == i, model)
    judged.count = 0
