"""What followed a context where it occurred before: a bounded sample of places, those that agree longest first.

While the output repeats stored text word for word, the places that agreed longest at one step, moved on by the tokens
that came since, are still there at the next one: comparing those few tokens takes the place of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from ssd.compiled.addresses import (
    Address,
    Float64s,
    Int64,
    Int64s,
    Record,
    TokenIds,
    dtype_of,
    inlined,
    int32_array,
    kernel,
    load_uint32,
    prefetch,
    view_of,
)
from ssd.retrieval.lanes import (
    MAX_MATCH_LENGTH,
    Lanes,
    Walkers,
    ask_to_widen,
    code_address,
    lanes_at,
    longest_in_lanes,
    new_rank,
    num_new,
    open_lanes,
    rank_address,
    search_lanes,
    walkers_at,
    widen,
)
from ssd.retrieval.search import MAX_SCAN_HITS, pattern_length, scan
from ssd.retrieval.snapshot import SnapshotRecord, segments_at

NOTHING: Final = -1
"""What follows the end of a sequence. Equal to SEPARATOR and to no token."""

MAX_LEVELS: Final = 3
"""Match lengths whose evidence is compared: the longest of each source, then shorter ones by halves."""

ENOUGH_SUPPORT: Final = 16.0
"""No shorter match is looked up once one has this many occurrences: it would only be less specific."""

MAX_SCANNED_SAMPLES: Final = 32
"""Places taken from one scanned text (tail, own)."""

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


EVIDENCE_BYTES: Final = dtype_of(Evidence).itemsize


class Hits(Record):
    """What a scan found: positions and agreeing lengths; and how many there are of each length."""

    positions: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    lengths: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    counts: Annotated[Int64s, np.int64, MAX_MATCH_LENGTH + 1]


class Scanned(Record):
    """Places of one scanned text. Those of level i end at ``ends[i]`` and stand for ``weights[i]`` occurrences each."""

    positions: Annotated[Int64s, np.int64, MAX_SCANNED_SAMPLES]
    ends: Annotated[Int64s, np.int64, MAX_LEVELS]
    weights: Annotated[Float64s, np.float64, MAX_LEVELS]


class LookupScratch(Record):
    """Memory that lookups take turns with.

    ``lanes`` : Lane[num_lanes], ``walkers`` : Walker[2 * num_lanes], ``patterns`` : uint8[PATTERNS_BYTES]. ``own``,
    ``tail`` : what a scan found in them, of which ``own_taken`` and ``tail_taken`` are evidence.
    """

    num_lanes: Int64
    lanes: Address
    walkers: Address
    patterns: Address
    own: Hits
    tail: Hits
    own_taken: Scanned
    tail_taken: Scanned


evidence_at = view_of(Evidence)


class Texts(NamedTuple):
    """The scanned texts: the request's own, and the ring with the bounds of its tail."""

    context: TokenIds
    ring: TokenIds
    tail_start: int
    tail_stop: int


@inlined
def texts_of(context: TokenIds, snapshot: SnapshotRecord) -> Texts:
    """A context and the ring of a snapshot."""
    return Texts(context, int32_array(snapshot.ring, snapshot.ring_size), snapshot.tail_start, snapshot.tail_stop)


@inlined
def token_before(texts: Texts) -> int:
    """The token before the context's last one, NOTHING where there is none."""
    n = len(texts.context)
    return int(texts.context[n - 2]) if n > 1 else NOTHING


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
    """Where a place lies that is not own text, by its recency: 0 static segment, 1 segment born in the ring, 2 tail."""
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


@inlined
def _count_lengths(hits: Hits, found: int, longest: int) -> int:
    """Count the first ``found`` hits by their lengths, up to ``longest``; the longest there is."""
    hits.counts[: longest + 1] = 0
    most = 0
    for i in range(found):
        hits.counts[hits.lengths[i]] += 1
        most = max(most, hits.lengths[i])
    return most


@kernel
def _choose_scanned(
    hits: Hits, found: int, longest: int, num_possible: int, evidence: Evidence, scanned: Scanned
) -> None:
    """Choose of each level the most recent hits that agree on its length or more but fewer than the level before."""
    taken, below = 0, longest + 1
    for level in range(num_possible):
        length, new = evidence.lengths[level], 0
        if found > 0:
            for agreeing in range(length, below):
                new += hits.counts[agreeing]
        room = min(new, MAX_SCANNED_SAMPLES - taken)
        stop = taken + room
        for i in range(found):
            if taken == stop:
                break
            if length <= hits.lengths[i] < below:
                scanned.positions[taken] = hits.positions[i]
                taken += 1
        scanned.ends[level], scanned.weights[level] = taken, new / max(room, 1)
        below = length


@kernel
def _scan(
    searched: SnapshotRecord,
    context: TokenIds,
    longest: int,
    in_segments: int,
    min_length: int,
    scratch: LookupScratch,
    evidence: Evidence,
) -> int:
    """Say how many levels there may be, now that the longest match in segments is known; scan the other texts."""
    ring, own, tail = int32_array(searched.ring, searched.ring_size), scratch.own, scratch.tail
    num_own = scan(context, 0, len(context) - 1, context, longest, own.positions, own.lengths)
    own_length = _count_lengths(own, num_own, longest)
    num_tail = scan(ring, searched.tail_start, searched.tail_stop, context, longest, tail.positions, tail.lengths)
    index_length = max(in_segments, _count_lengths(tail, num_tail, longest))
    length, other, num_possible = max(own_length, index_length), min(own_length, index_length), 0
    while length >= max(1, min_length) and num_possible < MAX_LEVELS:
        evidence.lengths[num_possible] = length
        num_possible += 1
        shorter = min(length - 1, length // 2)
        # The other source's own longest match is a level of its own: nothing more specific is known from there.
        length = other if shorter < other < length else shorter
    _choose_scanned(own, num_own, longest, num_possible, evidence, scratch.own_taken)
    _choose_scanned(tail, num_tail, longest, num_possible, evidence, scratch.tail_taken)
    return num_possible


@inlined
def _take_scanned(scanned: Scanned, level: int, kind: int, recency: int, evidence: Evidence, size: int) -> int:
    """Add the chosen hits of a level to the first ``size`` samples; how many there are then."""
    for i in range(scanned.ends[level - 1] if level > 0 else 0, scanned.ends[level]):
        evidence.kind[size] = kind
        evidence.at[size], evidence.width[size] = scanned.positions[i], 1
        evidence.recency[size] = np.int64(recency) + scanned.positions[i]
        evidence.weights[size] = scanned.weights[level]
        size += 1
    return size


@kernel
def _take_segments(lanes: Lanes, walkers: Walkers, num_lanes: int, taken: int, evidence: Evidence, size: int) -> int:
    """Add the places that were new at the last widening, evenly strided if they are too many, to the first ``size``.

    ``taken`` : places of segments that are there already. Returns how many samples there are then. Only where their
    ranks lie: ``_resolve`` says where the places are, once that has been brought near.
    """
    new = 0
    for lane in range(num_lanes):
        new += num_new(walkers, lane)
    if new == 0:
        return size
    room = max(1, MAX_SEGMENT_SAMPLES - taken)
    stride = (new + room - 1) // room
    for lane in range(num_lanes - 1, -1, -1):
        here = num_new(walkers, lane)
        if here == 0:
            continue
        samples = (here + stride - 1) // stride
        if taken + samples > 2 * MAX_SEGMENT_SAMPLES:
            continue
        for i in range(samples):
            number = i if stride == 1 else i * here // samples
            evidence.kind[size], evidence.recency[size] = IN_SEGMENT, lane
            evidence.at[size] = rank_address(lanes[lane], new_rank(lanes, walkers, lane, number))
            prefetch(evidence.at[size])
            evidence.weights[size] = here / samples
            size += 1
        taken += samples
    return size


@kernel
def _resolve(lanes: Lanes, num_static: int, first: int, size: int, evidence: Evidence) -> None:
    """Say where the samples ``[first, size)`` of segments lie, and have what follows there brought near."""
    for sample in range(first, size):
        number = evidence.recency[sample]
        lane, base = lanes[number], np.int64(_RING_RECENCY if number >= num_static else 0)
        position = min(load_uint32(evidence.at[sample]), lane.num_tokens)
        evidence.at[sample], evidence.width[sample] = code_address(lane, position), lane.width
        prefetch(evidence.at[sample])
        evidence.recency[sample] = base + (np.int64(number) << _SEGMENT_BITS) + position


@kernel
def look_up(
    searched: SnapshotRecord,
    scratch: LookupScratch,
    context: TokenIds,
    max_length: int,
    min_length: int,
    evidence: Evidence,
) -> None:
    """Sample the places where the last tokens of a context stand, in itself and in the index, at some match lengths.

    The levels are the longest match of own text and index, then shorter ones by halves and the longest of the other,
    until one has ENOUGH_SUPPORT occurrences, MAX_LEVELS at most.

    Up to MAX_SCANNED_SAMPLES places of own text and of the tail are taken, the most recent of each level, and up to
    MAX_SEGMENT_SAMPLES in segments, evenly strided over those of a level; each stands for as many as were left out.
    """
    evidence.num_levels, longest = 0, pattern_length(context, max_length)
    if longest < min_length:
        return
    num_lanes = searched.num_segments
    segments = segments_at(searched.segments, num_lanes)
    lanes, walkers = lanes_at(scratch.lanes, num_lanes), walkers_at(scratch.walkers, 2 * num_lanes)
    open_lanes(segments, context, longest, scratch.patterns, lanes, walkers)
    search_lanes(lanes, num_lanes)
    in_segments = longest_in_lanes(lanes, num_lanes)
    num_possible = _scan(searched, context, longest, in_segments, min_length, scratch, evidence)
    size, taken, support = 0, 0, 0.0
    for level in range(num_possible):
        if support >= ENOUGH_SUPPORT:
            break
        for lane in range(num_lanes):
            ask_to_widen(lanes[lane], evidence.lengths[level])
        widen(lanes, walkers, num_lanes, MAX_SEGMENT_SAMPLES)
        begin = size
        size = _take_scanned(scratch.own_taken, level, _OWN, _OWN_RECENCY, evidence, size)
        size = _take_scanned(scratch.tail_taken, level, _IN_TAIL, _TAIL_RECENCY, evidence, size)
        scanned = size
        size = _take_segments(lanes, walkers, num_lanes, taken, evidence, size)
        taken += size - scanned
        for sample in range(begin, size):
            support += evidence.weights[sample]
        evidence.ends[level] = size
        evidence.num_levels = level + 1
        _resolve(lanes, searched.num_static, scanned, size, evidence)


MAX_FOLLOWED: Final = 8
"""Places kept: those of the longest match, the first of them."""

_COMPARED: Final = 8  # last tokens by which a context is known again
_WEIGHT_ONE: Final = 65536.0

NO_TABLE: Final = -1
"""The number of no segment table: nothing is kept."""


class FollowedPlace(Record):
    """A sample, see `lookup.Evidence`. ``weight`` : in units of 2^-16."""

    kind: Int64
    at: Int64
    width: Int64
    recency: Int64
    weight: Int64


class Followed(Record):
    """Places kept from one step to the next.

    ``table`` : number of the segment table they are in. ``length`` : of the context they were kept for, ``ends_with`` :
    a number of its last tokens. ``agreeing`` : tokens that agreed before them.
    """

    table: Int64
    length: Int64
    ends_with: Int64
    agreeing: Int64
    count: Int64
    places: Annotated[Sequence[FollowedPlace], FollowedPlace, MAX_FOLLOWED]


@inlined
def _end_of(context: TokenIds, length: int) -> int:
    """A number of the last tokens of ``context[:length]``: another context has another, most probably."""
    number = np.int64(length)
    for i in range(max(0, length - _COMPARED), length):
        number = (number * 1_000_003) ^ np.int64(context[i])
    return int(number)


@kernel
def follow(followed: Followed, table: int, texts: Texts, max_length: int, evidence: Evidence) -> None:
    """Make the places kept that went on as the context did the evidence: 1 level, or none when a search is needed.

    ``table`` : number of the segment table; places in another are not looked at, nor for a context that does not go on
    from the one they were kept for, nor places that the tail has lost since. The level is as sure as one that a search
    finds: at least ``max_length`` tokens agree.
    """
    evidence.num_levels = 0
    size, first = 0, followed.length
    grown = len(texts.context) - first
    if followed.table != table or grown < 0 or followed.agreeing + grown < max_length:
        return
    if _end_of(texts.context, first) != followed.ends_with:
        return
    for i in range(followed.count):
        place = followed.places[i]
        evidence.kind[size], evidence.at[size], evidence.width[size] = place.kind, place.at, place.width
        evidence.recency[size], evidence.weights[size] = place.recency, place.weight / _WEIGHT_ONE
        if is_lost(evidence, size, texts):
            continue
        depth = 0
        while depth < grown:
            token = next_token(evidence, size, depth, texts)
            if token < 0 or token != texts.context[first + depth]:
                break
            depth += 1
        if depth == grown:
            move_sample(evidence, size, grown)
            size += 1
    evidence.lengths[0], evidence.ends[0] = min(max_length, followed.agreeing + grown), size
    evidence.num_levels = 1 if size > 0 else 0


@kernel
def keep(followed: Followed, table: int, texts: Texts, evidence: Evidence) -> None:
    """Keep the places of the longest match for the next step."""
    followed.table = NO_TABLE
    if evidence.num_levels == 0:
        return
    count = min(evidence.ends[0], MAX_FOLLOWED)
    for i in range(count):
        place = followed.places[i]
        place.kind, place.at, place.width = evidence.kind[i], evidence.at[i], evidence.width[i]
        place.recency, place.weight = evidence.recency[i], int(evidence.weights[i] * _WEIGHT_ONE)
    length = len(texts.context)
    followed.table, followed.length, followed.ends_with = table, length, _end_of(texts.context, length)
    followed.agreeing, followed.count = evidence.lengths[0], count
