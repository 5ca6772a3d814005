"""Which of the known prompts was asked? Nearest neighbours among traces of the attacker's own (arXiv 2411.01076)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from benchmarks.side_channels.wire import Trace
from server.answers.stream import DONE

Distance = Callable[[Trace, Trace], float]


def _at_places(first: Sequence[float], second: Sequence[float]) -> float:
    longest = max(len(first), len(second))
    padded = [(*values, *([0.0] * (longest - len(values)))) for values in (first, second)]
    return float(sum(abs(a - b) for a, b in zip(*padded, strict=True)))


def _pauses(trace: Trace) -> list[float]:
    return [after - before for before, after in zip((0.0, *trace.times), trace.times, strict=False)]


def _ends(trace: Trace, envelope: int) -> frozenset[int]:
    """Where the text stood after each record, which has so many bytes around each piece of text."""
    text, ends = 0, []
    for size in (*trace.sizes[:-1], trace.sizes[-1] - len(DONE)):  # which may be a record of its own
        if size >= envelope:
            text += size % envelope
            ends.append(text)
    return frozenset(ends)


def _other_ends(first: frozenset[int], second: frozenset[int]) -> float:
    return 1 - len(first & second) / max(1, len(first | second))


def _bags(first: Trace, second: Trace) -> float:
    mine, others = Counter(first.sizes), Counter(second.sizes)
    return float(sum(((mine - others) + (others - mine)).values()))


def distances(known: Sequence[Trace]) -> dict[str, Distance]:
    """Ways to compare two traces. ``known`` : the attacker's own, from which it learns what is around a text."""
    envelope = max(1, min(size for trace in known for size in trace.sizes[:-1] or trace.sizes) - 1)

    @cache
    def ends(trace: Trace) -> frozenset[int]:
        return _ends(trace, envelope)

    return {
        "sizes by place": lambda a, b: _at_places(a.sizes, b.sizes),
        "sizes in any order": _bags,
        "ends of records in the text": lambda a, b: _other_ends(ends(a), ends(b)),
        "pauses by place": lambda a, b: _at_places(_pauses(a), _pauses(b)),
        "bytes": lambda a, b: float(abs(sum(a.sizes) - sum(b.sizes))),
        "seconds": lambda a, b: abs(a.times[-1] - b.times[-1]),
        "records": lambda a, b: float(abs(len(a.sizes) - len(b.sizes))),
        "sizes and pauses": lambda a, b: _at_places(a.sizes, b.sizes) / 100 + _at_places(_pauses(a), _pauses(b)) / 0.02,
    }


def guess(trace: Trace, known: Sequence[tuple[int, Trace]], distance: Distance) -> int:
    """The prompt of the nearest known trace."""
    return min(known, key=lambda pair: distance(trace, pair[1]))[0]


def rate(known: Sequence[tuple[int, Trace]], seen: Sequence[tuple[int, Trace]]) -> tuple[float, str]:
    """Share of the victim's traces whose prompt is guessed, and the distance the attacker took. O(traces squared).

    It takes the one that guesses most of its own traces, each left out in turn.
    """
    ways = distances([trace for _, trace in known])
    scores = {
        name: sum(
            guess(trace, [pair for i, pair in enumerate(known) if i != left_out], distance) == prompt
            for left_out, (prompt, trace) in enumerate(known)
        )
        for name, distance in ways.items()
    }
    best = max(scores, key=lambda name: scores[name])
    return sum(guess(trace, known, ways[best]) == prompt for prompt, trace in seen) / len(seen), best


def interval(share: float, number: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share of ``number``."""
    z = 1.96
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number)) / (1 + z * z / number)
    return max(0.0, middle - half), min(1.0, middle + half)
