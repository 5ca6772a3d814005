"""Find earlier occurrences of the last tokens of a context, and sample a bounded number of these occurrences.

The searched texts are the request's own context, the recent text in the ring buffer, and the segments of the retrieval
cache. Longer matches are preferred.

While the output repeats stored text verbatim, the occurrences of one step, advanced by the new tokens, still match in
the next step. Then comparing these tokens replaces a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from ssd.jit.addresses import (
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
from ssd.retrieval.scan import MAX_SCAN_HITS, pattern_length, scan
from ssd.retrieval.snapshot import SnapshotRecord, segments_at
from ssd.retrieval.suffix_array_search import (
    MAX_MATCH_LENGTH,
    RangeExpanders,
    SegmentSearches,
    added_rank,
    binary_search_all,
    code_address,
    expand_ranges,
    expanders_at,
    longest_match_of_all,
    num_added,
    rank_address,
    request_range,
    searches_at,
    start_searches,
)

NO_TOKEN: Final = -1
"""The value that is used in place of a token if there is none. It equals SEPARATOR and is never a token id."""

MAX_LEVELS: Final = 3
"""The maximum number of match lengths ("levels") at which one context is looked up.

The first levels are the lengths of the longest match in the context and of the longest match in the cache. Each further
level is half as long.
"""

ENOUGH_SUPPORT: Final = 16.0
"""The number of text matches that suffices: if this many are found, shorter, less specific matches are not looked up.
"""

MAX_SCANNED_SAMPLES: Final = 32
"""The maximum number of matches that a lookup uses from the context, and also from the recent text of the cache."""

MAX_SEGMENT_SAMPLES: Final = 24
"""The maximum number of matches that a lookup uses from all segments of the cache together (at least one per segment).
"""

MAX_SAMPLES: Final = 2 * MAX_SCANNED_SAMPLES + 2 * MAX_SEGMENT_SAMPLES
_CONTEXT_RECENCY: Final = 1 << 62
_TAIL_RECENCY: Final = 1 << 61
_RING_RECENCY: Final = 1 << 60  # segments that come from the ring; prebuilt ones are older than all else
_SEGMENT_BITS: Final = 40
IN_SEGMENT: Final = 0
_IN_TAIL: Final = 1
_IN_CONTEXT: Final = 2


class MatchSamples(Record):
    """Sampled occurrences of the last tokens of a context, at most MAX_SAMPLES, grouped by match length, longest first.

    A sample belongs to the greatest of up to MAX_LEVELS match lengths ("levels") that it reaches.

    Attributes:
        kind: The kind of text of each sample: IN_SEGMENT, _IN_TAIL or _IN_CONTEXT.
        at: The token after the match: its address in a segment, its position in the recent text or in the context.
        width: The size of a token in bytes, in a segment.
        recency: Greater means later. The context is later than the recent text, which is later than segments.
        weights: The number of occurrences that a sample stands for.
        num_levels: The number of match lengths.
        lengths: The match length of each level, in tokens.
        ends: For each level, the number of samples of this and all longer match lengths.
    """

    kind: Annotated[Int64s, np.int64, MAX_SAMPLES]
    at: Annotated[Int64s, np.int64, MAX_SAMPLES]
    width: Annotated[Int64s, np.int64, MAX_SAMPLES]
    recency: Annotated[Int64s, np.int64, MAX_SAMPLES]
    weights: Annotated[Float64s, np.float64, MAX_SAMPLES]
    num_levels: Int64
    lengths: Annotated[Int64s, np.int64, MAX_LEVELS]
    ends: Annotated[Int64s, np.int64, MAX_LEVELS]


MATCH_SAMPLES_BYTES: Final = dtype_of(MatchSamples).itemsize


class ScanHits(Record):
    """The matches that a scan of one text found: the position and length of each, and the count of each length.

    A position is that of the token after the match.
    """

    positions: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    lengths: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    counts: Annotated[Int64s, np.int64, MAX_MATCH_LENGTH + 1]


class SampledHits(Record):
    """The occurrences sampled from one scanned text, grouped by match length ("levels"), longest first.

    Attributes:
        positions: The position after each match.
        ends: For each level, the number of samples of this and all longer match lengths.
        weights: For each level, the number of occurrences that each of its samples stands for.
    """

    positions: Annotated[Int64s, np.int64, MAX_SCANNED_SAMPLES]
    ends: Annotated[Int64s, np.int64, MAX_LEVELS]
    weights: Annotated[Float64s, np.float64, MAX_LEVELS]


class LookupScratch(Record):
    """Scratch memory that all lookups of a drafter share.

    Attributes:
        num_lanes: The number of segments that there is room for.
        lanes: The address of SegmentSearch[num_lanes], the state of the binary search in each segment.
        walkers: The address of RangeExpander[2 * num_lanes], the state of the range expansion in each segment.
        patterns: The address of uint8[PATTERNS_BYTES], the searched tokens in the encoding of each segment.
    """

    num_lanes: Int64
    lanes: Address
    walkers: Address
    patterns: Address
    context_hits: ScanHits
    recent_hits: ScanHits
    context_samples: SampledHits
    recent_samples: SampledHits


match_samples_at = view_of(MatchSamples)


class SearchedTexts(NamedTuple):
    """The texts that a lookup scans: the context, and the recent text of the cache in its ring buffer."""

    context: TokenIds
    ring: TokenIds
    memtable_start: int
    memtable_stop: int


@inlined
def searched_texts(context: TokenIds, snapshot: SnapshotRecord) -> SearchedTexts:
    return SearchedTexts(
        context, int32_array(snapshot.ring, snapshot.ring_size), snapshot.memtable_start, snapshot.memtable_stop
    )


@inlined
def token_before(texts: SearchedTexts) -> int:
    """Return the token before the last token of the context; NO_TOKEN if there is none."""
    n = len(texts.context)
    return int(texts.context[n - 2]) if n > 1 else NO_TOKEN


@inlined
def num_samples(samples: MatchSamples) -> int:
    return int(samples.ends[samples.num_levels - 1]) if samples.num_levels > 0 else 0


@inlined
def next_token(samples: MatchSamples, sample: int, depth: int, texts: SearchedTexts) -> int:
    """Return the token at offset ``depth`` after a text match; NO_TOKEN if the matched sequence has ended.

    Do not call it with a greater depth after it returned NO_TOKEN. A match in the context that reaches the context's
    end continues from the matched position, as in LZ77, because repetition probably continues.
    """
    kind, at = samples.kind[sample], samples.at[sample]
    if kind == IN_SEGMENT:
        width = samples.width[sample]
        code = load_uint32(at + width * depth) & ((1 << (8 * width)) - 1)
        return code - 1  # type: ignore[no-any-return]
    if kind == _IN_TAIL:
        if at + depth >= texts.memtable_stop:
            return NO_TOKEN
        return int(texts.ring[(at + depth) & (len(texts.ring) - 1)])
    n = len(texts.context)
    return int(texts.context[at + depth if at + depth < n else at + depth % (n - at)])


@inlined
def advance_sample(samples: MatchSamples, sample: int, tokens: int) -> None:
    """Move a saved match forward by ``tokens`` tokens, because the new tokens of the context equal the matched text."""
    samples.at[sample] += tokens * (samples.width[sample] if samples.kind[sample] == IN_SEGMENT else 1)


@inlined
def index_source_of(recency: int) -> int:
    """Return the part of the retrieval cache in which a match lies, decoded from its ``recency`` in `MatchSamples`.

    The result is 0 for a prebuilt segment, 1 for another segment, and 2 for recent text.
    """
    return int(recency >= _RING_RECENCY) + int(recency >= _TAIL_RECENCY)


@inlined
def context_position(recency: int) -> int:
    """Return the position of a match in the request's context, decoded from its ``recency`` in `MatchSamples`."""
    return int(recency - _CONTEXT_RECENCY)


@inlined
def has_left_ring(samples: MatchSamples, sample: int, texts: SearchedTexts) -> bool:
    """Return whether the text of a match has been overwritten in the ring buffer or moved to a segment."""
    return bool(samples.kind[sample] == _IN_TAIL and samples.at[sample] < texts.memtable_start)


@inlined
def is_from_context(samples: MatchSamples, sample: int) -> bool:
    return bool(samples.kind[sample] == _IN_CONTEXT)


@inlined
def _count_lengths(hits: ScanHits, found: int, longest: int) -> int:
    hits.counts[: longest + 1] = 0
    most = 0
    for i in range(found):
        hits.counts[hits.lengths[i]] += 1
        most = max(most, hits.lengths[i])
    return most


@kernel
def _sample_hits(
    hits: ScanHits, found: int, longest: int, num_possible: int, samples: MatchSamples, scanned: SampledHits
) -> None:
    """Select the most recent occurrences of each match length ("level") in a scanned text.

    An occurrence is selected only for the longest match length that it reaches.
    """
    taken, below = 0, longest + 1
    for level in range(num_possible):
        length, new = samples.lengths[level], 0
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
def _scan_texts(
    searched: SnapshotRecord,
    context: TokenIds,
    longest: int,
    in_segments: int,
    min_length: int,
    scratch: LookupScratch,
    samples: MatchSamples,
) -> int:
    """Scan the context and the cache's recent text for matches, and choose the match lengths ("levels") of a lookup.

    ``in_segments`` is the length of the longest match in the segments. Returns the number of match lengths.
    """
    ring, own, tail = int32_array(searched.ring, searched.ring_size), scratch.context_hits, scratch.recent_hits
    num_own = scan(context, 0, len(context) - 1, context, longest, own.positions, own.lengths)
    own_length = _count_lengths(own, num_own, longest)
    num_tail = scan(
        ring, searched.memtable_start, searched.memtable_stop, context, longest, tail.positions, tail.lengths
    )
    index_length = max(in_segments, _count_lengths(tail, num_tail, longest))
    length, other, num_possible = max(own_length, index_length), min(own_length, index_length), 0
    while length >= max(1, min_length) and num_possible < MAX_LEVELS:
        samples.lengths[num_possible] = length
        num_possible += 1
        shorter = min(length - 1, length // 2)
        # The longest match in the other text is a level too: that text has nothing more specific.
        length = other if shorter < other < length else shorter
    _sample_hits(own, num_own, longest, num_possible, samples, scratch.context_samples)
    _sample_hits(tail, num_tail, longest, num_possible, samples, scratch.recent_samples)
    return num_possible


@inlined
def _add_hits(scanned: SampledHits, level: int, kind: int, recency: int, samples: MatchSamples, size: int) -> int:
    for i in range(scanned.ends[level - 1] if level > 0 else 0, scanned.ends[level]):
        samples.kind[size] = kind
        samples.at[size], samples.width[size] = scanned.positions[i], 1
        samples.recency[size] = np.int64(recency) + scanned.positions[i]
        samples.weights[size] = scanned.weights[level]
        size += 1
    return size


@kernel
def _add_segment_matches(
    lanes: SegmentSearches, walkers: RangeExpanders, num_lanes: int, taken: int, samples: MatchSamples, size: int
) -> int:
    """Append the matches that the last range expansion found in segments; return the new number of samples.

    If there are too many matches, they are sampled at even distances. Only the address of a match's rank in the suffix
    array is written; `_locate_segment_matches` reads the position once the prefetch has arrived. ``taken`` is the
    number of samples from segments so far, and ``size`` that of all samples so far.
    """
    new = 0
    for lane in range(num_lanes):
        new += num_added(walkers, lane)
    if new == 0:
        return size
    room = max(1, MAX_SEGMENT_SAMPLES - taken)
    stride = (new + room - 1) // room
    for lane in range(num_lanes - 1, -1, -1):
        here = num_added(walkers, lane)
        if here == 0:
            continue
        num_here = (here + stride - 1) // stride
        if taken + num_here > 2 * MAX_SEGMENT_SAMPLES:
            continue
        for i in range(num_here):
            number = i if stride == 1 else i * here // num_here
            samples.kind[size], samples.recency[size] = IN_SEGMENT, lane
            samples.at[size] = rank_address(lanes[lane], added_rank(lanes, walkers, lane, number))
            prefetch(samples.at[size])
            samples.weights[size] = here / num_here
            size += 1
        taken += num_here
    return size


@kernel
def _locate_segment_matches(
    lanes: SegmentSearches, num_static: int, first: int, size: int, samples: MatchSamples
) -> None:
    for sample in range(first, size):
        number = samples.recency[sample]
        lane, base = lanes[number], np.int64(_RING_RECENCY if number >= num_static else 0)
        position = min(load_uint32(samples.at[sample]), lane.num_tokens)
        samples.at[sample], samples.width[sample] = code_address(lane, position), lane.width
        prefetch(samples.at[sample])
        samples.recency[sample] = base + (np.int64(number) << _SEGMENT_BITS) + position


@kernel
def sample_matches(
    searched: SnapshotRecord,
    scratch: LookupScratch,
    context: TokenIds,
    max_length: int,
    min_length: int,
    samples: MatchSamples,
) -> None:
    """Find and sample earlier occurrences of the last tokens of a context, in the context and in the retrieval cache.

    Several match lengths are looked up: that of the longest match in the context, that of the longest match in the
    cache, and shorter ones, each half as long, until one has ENOUGH_SUPPORT occurrences; MAX_LEVELS at most.

    Up to MAX_SCANNED_SAMPLES occurrences come from the context, and as many from the recent text of the cache, the most
    recent ones of each match length. Up to MAX_SEGMENT_SAMPLES come from segments, at even distances. The weight of a
    sample includes the occurrences that were left out.
    """
    samples.num_levels, longest = 0, pattern_length(context, max_length)
    if longest < min_length:
        return
    num_lanes = searched.num_segments
    segments = segments_at(searched.segments, num_lanes)
    lanes, walkers = searches_at(scratch.lanes, num_lanes), expanders_at(scratch.walkers, 2 * num_lanes)
    start_searches(segments, context, longest, scratch.patterns, lanes, walkers)
    binary_search_all(lanes, num_lanes)
    in_segments = longest_match_of_all(lanes, num_lanes)
    num_possible = _scan_texts(searched, context, longest, in_segments, min_length, scratch, samples)
    size, taken, support = 0, 0, 0.0
    for level in range(num_possible):
        if support >= ENOUGH_SUPPORT:
            break
        for lane in range(num_lanes):
            request_range(lanes[lane], samples.lengths[level])
        expand_ranges(lanes, walkers, num_lanes, MAX_SEGMENT_SAMPLES)
        begin = size
        size = _add_hits(scratch.context_samples, level, _IN_CONTEXT, _CONTEXT_RECENCY, samples, size)
        size = _add_hits(scratch.recent_samples, level, _IN_TAIL, _TAIL_RECENCY, samples, size)
        scanned = size
        size = _add_segment_matches(lanes, walkers, num_lanes, taken, samples, size)
        taken += size - scanned
        for sample in range(begin, size):
            support += samples.weights[sample]
        samples.ends[level] = size
        samples.num_levels = level + 1
        _locate_segment_matches(lanes, searched.num_prebuilt, scanned, size, samples)


MAX_SAVED: Final = 8
"""The maximum number of matches of the longest match length that are saved for a request's next step."""

_COMPARED: Final = 8  # the number of last tokens that identify a context
_WEIGHT_ONE: Final = 65536.0

NO_SEGMENT_TABLE: Final = -1
"""The value of ``MatchCursor.table`` if no text matches are saved."""


class SavedMatch(Record):
    """A text match that is saved for a request's next step; ``weight`` is in units of 2^-16, see `MatchSamples`."""

    kind: Int64
    at: Int64
    width: Int64
    recency: Int64
    weight: Int64


class MatchCursor(Record):
    """The text matches that are saved from one step of a request to the next.

    Attributes:
        table: The number of the segment table that the matches refer to; NO_SEGMENT_TABLE if no matches are saved.
        length: The length of the context for which the matches were found.
        ends_with: A hash of the last tokens of that context.
    """

    table: Int64
    length: Int64
    ends_with: Int64
    match_length: Int64
    count: Int64
    matches: Annotated[Sequence[SavedMatch], SavedMatch, MAX_SAVED]


@inlined
def _end_of(context: TokenIds, length: int) -> int:
    number = np.int64(length)
    for i in range(max(0, length - _COMPARED), length):
        number = (number * 1_000_003) ^ np.int64(context[i])
    return int(number)


@kernel
def resume_matches(
    cursor: MatchCursor, table: int, texts: SearchedTexts, max_length: int, samples: MatchSamples
) -> None:
    """Continue the text matches saved in the last step that agree with the new tokens, so that no search is needed.

    ``samples`` receives these matches as one level, of at least ``max_length`` matching tokens. It receives no level if
    a search is needed: if the segment table has changed, if the context does not extend the searched one, or if no
    saved match agrees.
    """
    samples.num_levels = 0
    size, first = 0, cursor.length
    grown = len(texts.context) - first
    if cursor.table != table or grown < 0 or cursor.match_length + grown < max_length:
        return
    if _end_of(texts.context, first) != cursor.ends_with:
        return
    for i in range(cursor.count):
        place = cursor.matches[i]
        samples.kind[size], samples.at[size], samples.width[size] = place.kind, place.at, place.width
        samples.recency[size], samples.weights[size] = place.recency, place.weight / _WEIGHT_ONE
        if has_left_ring(samples, size, texts):
            continue
        depth = 0
        while depth < grown:
            token = next_token(samples, size, depth, texts)
            if token < 0 or token != texts.context[first + depth]:
                break
            depth += 1
        if depth == grown:
            advance_sample(samples, size, grown)
            size += 1
    samples.lengths[0], samples.ends[0] = min(max_length, cursor.match_length + grown), size
    samples.num_levels = 1 if size > 0 else 0


@kernel
def save_matches(cursor: MatchCursor, table: int, texts: SearchedTexts, samples: MatchSamples) -> None:
    """Save the longest text matches, so that the request's next step can continue them without a search."""
    cursor.table = NO_SEGMENT_TABLE
    if samples.num_levels == 0:
        return
    count = min(samples.ends[0], MAX_SAVED)
    for i in range(count):
        place = cursor.matches[i]
        place.kind, place.at, place.width = samples.kind[i], samples.at[i], samples.width[i]
        place.recency, place.weight = samples.recency[i], int(samples.weights[i] * _WEIGHT_ONE)
    length = len(texts.context)
    cursor.table, cursor.length, cursor.ends_with = table, length, _end_of(texts.context, length)
    cursor.match_length, cursor.count = samples.lengths[0], count
