"""What followed the context where it occurred before: a bounded sample of places, those that agree longest first."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import numpy as np

from ssd.compiled.addresses import Float64s, Int64s, TokenIds, inlined, kernel, load_uint32, prefetch
from ssd.compiled.records import Int64, Record
from ssd.retrieval.lanes import (
    Lanes,
    Walkers,
    ask_to_widen,
    code_address,
    longest_in_lanes,
    new_rank,
    num_new,
    position_at,
    widen,
)
from ssd.retrieval.pattern import MAX_MATCH_LENGTH
from ssd.retrieval.scan import MAX_SCAN_HITS, scan

NOTHING: Final = -1
"""What follows the end of a sequence. Equal to SEPARATOR and to no token."""

MAX_LEVELS: Final = 3
"""Match lengths whose evidence is compared: the longest of each source, then shorter ones by halves."""

ENOUGH_SUPPORT: Final = 16.0
"""No shorter match is looked up once one has this many occurrences: it would only be less specific."""

MAX_SCANNED_SAMPLES: Final = 32
"""Places taken from one scanned text (tail or own)."""

MAX_SEGMENT_SAMPLES: Final = 24
"""Places taken from all segments together, or one of each where there are more segments than that."""

MAX_SAMPLES: Final = 2 * MAX_SCANNED_SAMPLES + 2 * MAX_SEGMENT_SAMPLES

_OWN_RECENCY: Final = 1 << 62
_TAIL_RECENCY: Final = 1 << 61
_RING_RECENCY: Final = 1 << 60  # of ring-born segments; static ones are older than anything
_SEGMENT_BITS: Final = 40

IN_SEGMENT: Final = 0
_IN_TAIL: Final = 1
_OWN: Final = 2


class Evidence(Record):
    """Sampled places, MAX_SAMPLES at most; those of a longer match come before those of a shorter one.

    ``kind`` : where a place lies; ``at`` : address of the code there (segment) or the position (tail, own text);
    ``width`` : bytes of a code (segment). ``recency`` : greater is later; own text after tail after segments.
    ``weights`` : occurrences a sample stands for.

    Up to MAX_LEVELS match lengths, longest first: level i of ``num_levels`` has ``lengths[i]`` tokens and is the first
    ``ends[i]`` samples.
    """

    kind: Annotated[Int64s, np.int64, MAX_SAMPLES]
    at: Annotated[Int64s, np.int64, MAX_SAMPLES]
    width: Annotated[Int64s, np.int64, MAX_SAMPLES]
    recency: Annotated[Int64s, np.int64, MAX_SAMPLES]
    weights: Annotated[Float64s, np.float64, MAX_SAMPLES]
    num_levels: Int64
    lengths: Annotated[Int64s, np.int64, MAX_LEVELS]
    ends: Annotated[Int64s, np.int64, MAX_LEVELS]


class Hits(Record):
    """What a scan found: positions and agreeing lengths; and how many there are of each length."""

    positions: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    lengths: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    counts: Annotated[Int64s, np.int64, MAX_MATCH_LENGTH + 1]


class Texts(NamedTuple):
    """The scanned texts: the request's own, and the ring with the bounds of its tail."""

    context: TokenIds
    ring: TokenIds
    tail_start: int
    tail_stop: int


@inlined
def num_samples(evidence: Evidence) -> int:
    """Samples of all levels."""
    return int(evidence.ends[evidence.num_levels - 1]) if evidence.num_levels > 0 else 0


@inlined
def next_token(evidence: Evidence, sample: int, depth: int, texts: Texts) -> int:
    """The token ``depth`` places after a sample's, NOTHING where its sequence ends.

    Not asked again after NOTHING. Own text that reaches the context's end goes on from its own begin, as in LZ77:
    repetition is taken to go on.
    """
    kind, at = evidence.kind[sample], evidence.at[sample]
    if kind == IN_SEGMENT:
        width = evidence.width[sample]
        code = load_uint32(at + width * depth) & ((1 << (8 * width)) - 1)
        return code - 1  # type: ignore[no-any-return]
    if kind == _IN_TAIL:
        if at + depth >= texts.tail_stop:
            return NOTHING
        return int(texts.ring[(at + depth) & (len(texts.ring) - 1)])
    n = len(texts.context)
    return int(texts.context[at + depth if at + depth < n else at + depth % (n - at)])


@inlined
def move_sample(evidence: Evidence, sample: int, tokens: int) -> None:
    """Put a sample ``tokens`` places further; its sequence must not end before."""
    evidence.at[sample] += tokens * (evidence.width[sample] if evidence.kind[sample] == IN_SEGMENT else 1)


@inlined
def origin_of(recency: int) -> int:
    """Where a place of the index lies, by its recency: 0 static segment, 1 segment born in the ring, 2 tail."""
    return int(recency >= _RING_RECENCY) + int(recency >= _TAIL_RECENCY)


@inlined
def own_position(recency: int) -> int:
    """Where in the context a place of the request's own text lies, by its recency."""
    return int(recency - _OWN_RECENCY)


@inlined
def is_lost(evidence: Evidence, sample: int, texts: Texts) -> bool:
    """Whether a place of the tail is no longer in it."""
    return bool(evidence.kind[sample] == _IN_TAIL and evidence.at[sample] < texts.tail_start)


@inlined
def is_own(evidence: Evidence, sample: int) -> bool:
    """Whether a sample comes from the request's own text."""
    return bool(evidence.kind[sample] == _OWN)


@kernel
def _find_in(text: TokenIds, start: int, stop: int, context: TokenIds, longest: int, hits: Hits) -> tuple[int, int]:
    """Scan into ``hits``: how many, and the longest. Counts are of the lengths up to ``longest``."""
    found = scan(text, start, stop, context, longest, hits.positions, hits.lengths)
    hits.counts[: longest + 1] = 0
    most = 0
    for i in range(found):
        hits.counts[hits.lengths[i]] += 1
        most = max(most, hits.lengths[i])
    return found, most


@kernel
def _take_scanned(
    hits: Hits, found: int, below: int, length: int, kind: int, taken: int, evidence: Evidence, size: int
) -> tuple[int, int]:
    """Add the most recent hits that agree on ``length`` tokens or more but fewer than ``below``: (size, taken) then."""
    new = 0
    if found > 0:
        for agreeing in range(length, below):
            new += hits.counts[agreeing]
    if new == 0:
        return size, taken
    room = min(new, MAX_SCANNED_SAMPLES - taken)
    recency = np.int64(_OWN_RECENCY if kind == _OWN else _TAIL_RECENCY)
    stop = size + room
    for i in range(found):
        if size == stop:
            break
        if length <= hits.lengths[i] < below:
            evidence.kind[size] = kind
            evidence.at[size] = hits.positions[i]
            evidence.recency[size] = recency + hits.positions[i]
            evidence.weights[size] = new / room
            size += 1
    return size, taken + room


@kernel
def _take_segments(
    lanes: Lanes,
    walkers: Walkers,
    num_lanes: int,
    static_lanes: int,
    length: int,
    taken: int,
    evidence: Evidence,
    size: int,
) -> tuple[int, int]:
    """Add the new places that agree on ``length`` tokens, evenly strided if they are too many: (size, taken) then."""
    new = 0
    for lane in range(num_lanes):
        ask_to_widen(lanes[lane], length)
    widen(lanes, walkers, num_lanes, MAX_SEGMENT_SAMPLES)
    for lane in range(num_lanes):
        new += num_new(walkers, lane)
    if new == 0:
        return size, taken
    room = max(1, MAX_SEGMENT_SAMPLES - taken)
    stride = (new + room - 1) // room
    for lane in range(num_lanes - 1, -1, -1):
        here = num_new(walkers, lane)
        if here == 0:
            continue
        samples = (here + stride - 1) // stride
        if taken + samples > 2 * MAX_SEGMENT_SAMPLES:
            continue
        width, base = lanes[lane].width, np.int64(_RING_RECENCY if lane >= static_lanes else 0)
        for i in range(samples):
            number = i if stride == 1 else i * here // samples
            position = position_at(lanes[lane], new_rank(lanes, walkers, lane, number))
            evidence.kind[size] = IN_SEGMENT
            evidence.at[size] = code_address(lanes[lane], position)
            evidence.width[size] = width
            prefetch(evidence.at[size])
            evidence.recency[size] = base + (np.int64(lane) << _SEGMENT_BITS) + position
            evidence.weights[size] = here / samples
            size += 1
        taken += samples
    return size, taken


@kernel
def gather(
    texts: Texts,
    lanes: Lanes,
    walkers: Walkers,
    num_lanes: int,
    static_lanes: int,
    longest: int,
    min_length: int,
    max_levels: int,
    with_own: bool,
    own: Hits,
    tail: Hits,
    evidence: Evidence,
) -> None:
    """Sample the places where the context's last tokens stand, at up to ``max_levels`` match lengths.

    ``lanes`` : the first ``num_lanes``, of which the first ``static_lanes`` are of static segments, have been searched
    for ``longest`` tokens of ``texts.context``. ``with_own`` :
    also in the request's own text. ``own``, ``tail`` : scratch. The levels are the longest match of own text and
    index, then shorter ones by halves and the longest of the other, until one has ENOUGH_SUPPORT occurrences.

    Up to MAX_SCANNED_SAMPLES places of own text and of the tail are taken, the most recent of each level, and up to
    MAX_SEGMENT_SAMPLES in segments, evenly strided over those of a level; each stands for as many as were left out.
    """
    context = texts.context
    num_own, own_length = 0, 0
    if with_own:
        num_own, own_length = _find_in(context, 0, len(context) - 1, context, longest, own)
    num_tail, index_length = _find_in(texts.ring, texts.tail_start, texts.tail_stop, context, longest, tail)
    index_length = max(index_length, longest_in_lanes(lanes, num_lanes))
    length, num_levels, other = max(own_length, index_length), 0, min(own_length, index_length)
    size, below, support = 0, longest + 1, 0.0
    own_taken, tail_taken, segments_taken = 0, 0, 0
    while length >= max(1, min_length) and num_levels < max_levels:
        first = size
        size, own_taken = _take_scanned(own, num_own, below, length, _OWN, own_taken, evidence, size)
        size, tail_taken = _take_scanned(tail, num_tail, below, length, _IN_TAIL, tail_taken, evidence, size)
        size, segments_taken = _take_segments(
            lanes, walkers, num_lanes, static_lanes, length, segments_taken, evidence, size
        )
        for sample in range(first, size):
            support += evidence.weights[sample]
        evidence.lengths[num_levels], evidence.ends[num_levels] = length, size
        num_levels += 1
        if support >= ENOUGH_SUPPORT:
            break
        below = length
        shorter = min(length - 1, length // 2)
        # The other source's own longest match is a level of its own: nothing more specific is known from there.
        length = other if shorter < other < length else shorter
    evidence.num_levels = num_levels
