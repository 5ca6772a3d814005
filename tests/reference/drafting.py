"""Slow twins of lookup, drafting and replay: plain Python over lists, short enough to be obviously right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.retrieval.segment import SEPARATOR, Segment
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.retrieval.suffix_array import build_segment
from tests.reference.retrieval import longest_agreement


def make_snapshot(
    segments: Sequence[Sequence[int]], tail: Sequence[int] = (), ring_size: int = 64, start: int = 0
) -> Snapshot:
    """A snapshot of these segment texts and this tail, whose first token lies at position ``start`` or later."""
    built: list[Segment] = []
    for number, text in enumerate(segments):
        built.append(build_segment(np.array(text, np.int32), start=start, segment_id=f"s{number}"))
        start += len(text)
    ring = np.full(ring_size, 7, np.int32)
    for i, token in enumerate(tail):
        ring[(start + i) & (ring_size - 1)] = token
    return Snapshot(1, SegmentTable(built), ring, start, start + len(tail))


def texts(snapshot: Snapshot) -> list[list[int]]:
    """All text of a snapshot, oldest first, the tail last."""
    mask = len(snapshot.ring) - 1
    tail = [int(snapshot.ring[p & mask]) for p in range(snapshot.memtable_start, snapshot.memtable_stop)]
    return [segment.tokens.tolist() for segment in snapshot.segments] + [tail]


def occurrences(text: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """Start offsets of ``pattern`` in ``text``."""
    m = len(pattern)
    return [i for i in range(len(text) - m + 1) if list(text[i : i + m]) == list(pattern)]


def continuation(text: Sequence[int], position: int, limit: int) -> tuple[int, ...]:
    """Up to ``limit`` tokens from ``position`` on, cut at the end of the sequence."""
    taken = list(text[position : position + limit])
    return tuple(taken[: taken.index(SEPARATOR)] if SEPARATOR in taken else taken)


Evidence = list[tuple[tuple[int, ...], tuple[int, int, int], bool]]
"""Occurrences of a pattern: what followed, where (own text after the index's, which text, position), is it own text."""


def evidence(
    snapshot: Snapshot,
    context: Sequence[int],
    length: int,
    limit: int,
    in_index: bool,
) -> Evidence:
    """Every occurrence of the last ``length`` tokens of ``context``; its own text is taken to repeat from its end."""
    pattern = list(context[len(context) - length :])
    found: Evidence = []
    for number, text in enumerate(texts(snapshot) if in_index else []):
        found += [
            (continuation(text, i + length, limit), (0, number, i + length), False) for i in occurrences(text, pattern)
        ]
    for i in occurrences(context, pattern):
        if i + length < len(context):
            repeated = list(context[i + length :])
            while len(repeated) < limit:
                repeated.append(repeated[len(repeated) - (len(context) - i - length)])
            found.append((continuation(repeated, 0, limit), (1, 0, i + length), True))
    return found


def suffix_levels(
    snapshot: Snapshot,
    context: Sequence[int],
    max_length: int,
    min_length: int,
    limit: int,
    most: int,
    enough: int,
) -> list[tuple[int, Evidence]]:
    """Match lengths and their evidence: the longest of own text or index, then shorter ones by thirds."""
    longest = 0
    while longest < min(max_length, len(context)) and context[len(context) - 1 - longest] >= 0:
        longest += 1
    nothing = make_snapshot([])
    own = next((n for n in range(longest, 0, -1) if evidence(nothing, context, n, 1, False)), 0)
    index, _ = longest_agreement(snapshot, context, longest)
    levels: list[tuple[int, Evidence]] = []
    length, below = max(own, index), min(own, index)
    while limit and length >= max(1, min_length) and len(levels) < most:
        levels.append((length, evidence(snapshot, context, length, limit, length <= index)))
        if len(levels[-1][1]) >= enough:
            break
        shorter = min(length - 1, length // 2)
        length = below if shorter < below < length else shorter
    return levels
