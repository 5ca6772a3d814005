"""What a request's last draft was judged by, kept until the target's own tokens say what came of it.

Learning from the context instead of from counts of accepted tokens teaches more: also a token that was left out of the
draft, and one that was cut from it, was right or wrong.
"""

from __future__ import annotations

from typing import Final

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel
from ssd.drafting.suffix.acceptance import INPUTS, MOODS, Model, learn

MAX_LESSONS: Final = 48
"""Candidates kept of one draft, the first of it."""

_COUNT: Final = 0
_START: Final = 1  # length of the context that was drafted after
_MOOD: Final = 2  # running mean of label - chance, in units of 1 / _MOOD_ONE
_DRAFTED: Final = 3  # of the lessons, those that were in the draft
_HEADER: Final = 4
_TOKEN: Final = 0
_PARENT: Final = 1
_DEPTH: Final = 2
_CAME: Final = 3  # 1 when the token came, -1 when it did not
_SET: Final = 4
_INPUTS: Final = 5
_COLUMNS: Final = _INPUTS + INPUTS
LESSONS_INT64S: Final = _HEADER + MAX_LESSONS * _COLUMNS

_MOOD_ONE: Final = 1 << 20
_MOOD_RATE: Final = 0.1


@inlined
def forget_lessons(lessons: Int64s) -> None:
    """A new request: nothing was drafted, in a neutral mood."""
    lessons[:_HEADER] = 0


@inlined
def begin_lessons(lessons: Int64s, context_length: int) -> None:
    """A new draft."""
    lessons[_COUNT], lessons[_START], lessons[_DRAFTED] = 0, context_length, 0


@inlined
def mood_of(lessons: Int64s) -> int:
    """How the request's drafts fared against their estimates lately: 0..MOODS - 1, MOODS / 2 as estimated."""
    mood = lessons[_MOOD] / _MOOD_ONE
    return int(min(MOODS - 1, max(0, int((mood + 0.4) * 10.0))))


@inlined
def add_lesson(
    lessons: Int64s, token: int, parent: int, depth: int, chosen: int, inputs: Int64s, drafted: bool
) -> None:
    """Keep what a candidate was judged by. ``parent`` : the lesson it goes on from, -1 at the context's end."""
    count = lessons[_COUNT]
    if count == MAX_LESSONS:
        return
    lesson = lessons[_HEADER + count * _COLUMNS : _HEADER + (count + 1) * _COLUMNS]
    lesson[_TOKEN], lesson[_PARENT], lesson[_DEPTH], lesson[_SET] = token, parent, depth, chosen
    for i in range(INPUTS):
        lesson[_INPUTS + i] = inputs[i]
    lessons[_COUNT] = count + 1
    lessons[_DRAFTED] += int(drafted)


@inlined
def _learn_one(lessons: Int64s, lesson: Int64s, came: bool, model: Model) -> None:
    lesson[_CAME] = 1 if came else -1
    error = learn(model, lesson[_INPUTS:], lesson[_SET], 1.0 if came else 0.0)
    lessons[_MOOD] += int(_MOOD_RATE * (error * _MOOD_ONE - lessons[_MOOD]))


@kernel
def learn_from_context(lessons: Int64s, context: TokenIds, model: Model) -> None:
    """Learn from what came after the context that was drafted after. Lessons behind a wrong token teach nothing."""
    start = lessons[_START]
    for i in range(lessons[_COUNT]):
        lesson = lessons[_HEADER + i * _COLUMNS : _HEADER + (i + 1) * _COLUMNS]
        place, parent = start + lesson[_DEPTH], lesson[_PARENT]
        lesson[_CAME] = 0
        if place < len(context) and (parent < 0 or lessons[_HEADER + parent * _COLUMNS + _CAME] == 1):
            _learn_one(lessons, lesson, context[place] == lesson[_TOKEN], model)
    lessons[_COUNT] = 0


@kernel
def learn_from_path(lessons: Int64s, num_verified: int, path: TokenIds, model: Model) -> None:
    """Learn from what was accepted of the last draft: the request has ended, its text is not seen again.

    ``num_verified`` : tokens of the draft that were not cut before it was verified. ``path`` : int32[n], the indices
    of the n accepted ones; 0, 1, 2 ... of a chain. Those whose predecessors all are on it were tested. The first
    lessons are the drafted tokens, in their order.
    """
    for i in range(min(lessons[_DRAFTED], num_verified)):
        lesson = lessons[_HEADER + i * _COLUMNS : _HEADER + (i + 1) * _COLUMNS]
        depth = lesson[_DEPTH]
        if depth <= len(path) and (depth == 0 or path[depth - 1] == lesson[_PARENT]):
            _learn_one(lessons, lesson, depth < len(path) and path[depth] == i, model)
    lessons[_COUNT] = 0
