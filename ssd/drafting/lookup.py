"""Find earlier occurrences of the last tokens of a context, and sample a bounded number of these occurrences.

The searched texts are the request's own context, the memtable, and the segments of the retrieval cache. Longer matches
are preferred.

While the output repeats stored text verbatim, the occurrences found in one step also match in the next step, at
positions advanced by the new tokens. Then only the new tokens are compared, and nothing is searched.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ssd.drafting.draft_records import (
    IN_CONTEXT,
    IN_MEMTABLE,
    IN_SEGMENT,
    MAX_SAVED,
    NO_SEGMENT_TABLE,
    NO_TOKEN,
    MatchCursor,
    MatchSample,
)
from ssd.drafting.draft_scratch import (
    MAX_LEVELS,
    MAX_SCANNED_SAMPLES,
    MAX_SEGMENT_SAMPLES,
    LookupScratch,
    MatchSamples,
    SampledHits,
    ScanHits,
)
from ssd.jit.addresses import TokenIds, inlined, int32_array, kernel, load_uint32, prefetch
from ssd.retrieval.scan import pattern_length, scan
from ssd.retrieval.snapshot import SnapshotRecord, segments_at
from ssd.retrieval.suffix_array_search import (
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

ENOUGH_SUPPORT: Final = 16.0
"""The number of text matches after which a lookup stops, instead of searching for shorter matches, which are less
specific.
"""

_CONTEXT_RECENCY: Final = 1 << 62
_MEMTABLE_RECENCY: Final = 1 << 61
_FLUSHED_RECENCY: Final = 1 << 60  # segments of flushed text; prebuilt ones are older than all else
_SEGMENT_BITS: Final = 40


class SearchedTexts(NamedTuple):
    """The texts that a lookup scans: the context, and the memtable, which lies in the ring buffer."""

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
def num_samples(samples: MatchSamples) -> int:
    return int(samples.ends[samples.num_levels - 1]) if samples.num_levels > 0 else 0


@inlined
def next_token(match: MatchSample, depth: int, texts: SearchedTexts) -> int:
    """Return the token at offset ``depth`` after a text match; NO_TOKEN if the matched sequence has ended.

    Do not call it with a greater depth after it returned NO_TOKEN. A match in the context that reaches the context's
    end continues from the matched position, as in LZ77, because repetition probably continues.
    """
    kind, at = match.kind, match.at
    if kind == IN_SEGMENT:
        width = match.width
        code = load_uint32(at + width * depth) & ((1 << (8 * width)) - 1)
        return code - 1
    if kind == IN_MEMTABLE:
        if at + depth >= texts.memtable_stop:
            return NO_TOKEN
        return int(texts.ring[(at + depth) & (len(texts.ring) - 1)])
    n = len(texts.context)
    return int(texts.context[at + depth if at + depth < n else at + depth % (n - at)])


@inlined
def index_source_of(recency: int) -> int:
    """Return the part of the retrieval cache in which a match lies, decoded from the ``recency`` of a `MatchSample`.

    The result is 0 for a prebuilt segment, 1 for another segment, and 2 for the memtable.
    """
    return int(recency >= _FLUSHED_RECENCY) + int(recency >= _MEMTABLE_RECENCY)


@inlined
def context_position(recency: int) -> int:
    """Return the position of a match in the request's context, decoded from the ``recency`` of a `MatchSample`."""
    return int(recency - _CONTEXT_RECENCY)


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
    size, below = 0, longest + 1
    for level in range(num_possible):
        length, new = samples.lengths[level], 0
        if found > 0:
            for agreeing in range(length, below):
                new += hits.counts[agreeing]
        room = min(new, MAX_SCANNED_SAMPLES - size)
        stop = size + room
        for i in range(found):
            if size == stop:
                break
            if length <= hits.lengths[i] < below:
                scanned.positions[size] = hits.positions[i]
                size += 1
        scanned.ends[level], scanned.weights[level] = size, new / max(room, 1)
        below = length


@kernel
def _scan_texts(
    snapshot: SnapshotRecord,
    context: TokenIds,
    longest: int,
    in_segments: int,
    min_length: int,
    scratch: LookupScratch,
    samples: MatchSamples,
) -> int:
    """Scan the context and the memtable for matches, and choose the match lengths ("levels") of a lookup.

    ``in_segments`` is the length of the longest match in the segments. Returns the number of match lengths.
    """
    ring, start, stop = int32_array(snapshot.ring, snapshot.ring_size), snapshot.memtable_start, snapshot.memtable_stop
    in_context, memtable = scratch.context_hits, scratch.memtable_hits
    num_in_context = scan(context, 0, len(context) - 1, context, longest, in_context.positions, in_context.lengths)
    longest_in_context = _count_lengths(in_context, num_in_context, longest)
    num_memtable = scan(ring, start, stop, context, longest, memtable.positions, memtable.lengths)
    longest_in_index = max(in_segments, _count_lengths(memtable, num_memtable, longest))
    length, other = max(longest_in_context, longest_in_index), min(longest_in_context, longest_in_index)
    num_possible = 0
    while length >= max(1, min_length) and num_possible < MAX_LEVELS:
        samples.lengths[num_possible] = length
        num_possible += 1
        shorter = min(length - 1, length // 2)
        # The longest match in the other text is a level too: that text has nothing more specific.
        length = other if shorter < other < length else shorter
    _sample_hits(in_context, num_in_context, longest, num_possible, samples, scratch.context_samples)
    _sample_hits(memtable, num_memtable, longest, num_possible, samples, scratch.memtable_samples)
    return num_possible


@inlined
def _add_hits(scanned: SampledHits, level: int, kind: int, recency: int, samples: MatchSamples, size: int) -> int:
    for i in range(scanned.ends[level - 1] if level > 0 else 0, scanned.ends[level]):
        match = samples.matches[size]
        match.kind, match.at, match.width = kind, scanned.positions[i], 1
        match.recency, match.weight = int(recency + scanned.positions[i]), scanned.weights[level]
        size += 1
    return size


@kernel
def _add_segment_matches(
    searches: SegmentSearches,
    expanders: RangeExpanders,
    num_segments: int,
    num_sampled: int,
    samples: MatchSamples,
    size: int,
) -> int:
    """Append the matches that the last range expansion found in segments; return the new number of samples.

    If there are too many matches, they are sampled at even distances. To hide memory latency, only the address of a
    match's entry in the suffix array is written and prefetched; `_locate_segment_matches` reads it later.
    ``num_sampled`` samples from segments and ``size`` samples in total were found before.
    """
    new = 0
    for segment in range(num_segments):
        new += num_added(expanders, segment)
    if new == 0:
        return size
    room = max(1, MAX_SEGMENT_SAMPLES - num_sampled)
    stride = (new + room - 1) // room
    for segment in range(num_segments - 1, -1, -1):
        here = num_added(expanders, segment)
        if here == 0:
            continue
        num_here = (here + stride - 1) // stride
        if num_sampled + num_here > 2 * MAX_SEGMENT_SAMPLES:
            continue
        for i in range(num_here):
            number = i if stride == 1 else i * here // num_here
            match = samples.matches[size]
            match.kind, match.recency = IN_SEGMENT, segment
            match.at = rank_address(searches[segment], added_rank(searches, expanders, segment, number))
            prefetch(match.at)
            match.weight = here / num_here
            size += 1
        num_sampled += num_here
    return size


@kernel
def _locate_segment_matches(
    searches: SegmentSearches, num_prebuilt: int, first: int, size: int, samples: MatchSamples
) -> None:
    for sample in range(first, size):
        match = samples.matches[sample]
        number = match.recency
        search, base = searches[number], _FLUSHED_RECENCY if number >= num_prebuilt else 0
        position = min(load_uint32(match.at), search.num_tokens)
        match.at, match.width = code_address(search, position), search.width
        prefetch(match.at)
        match.recency = base + (number << _SEGMENT_BITS) + position


@kernel
def sample_matches(
    snapshot: SnapshotRecord,
    scratch: LookupScratch,
    context: TokenIds,
    max_length: int,
    min_length: int,
    samples: MatchSamples,
) -> None:
    """Find and sample earlier occurrences of the last tokens of a context, in the context and in the retrieval cache.

    Match lengths are tried from long to short. The first is the length of the longest match, and each further length is
    half of the length before it. The longest match in the context and the longest match in the cache are both tried.
    The lookup stops after MAX_LEVELS lengths, or once ENOUGH_SUPPORT occurrences are found.

    For all lengths together, up to MAX_SCANNED_SAMPLES samples come from the context, and up to as many from the
    memtable; the most recent occurrences of each length are sampled. About MAX_SEGMENT_SAMPLES samples come from
    segments, evenly spaced. The weight of a sample is the number of occurrences that it stands for.
    """
    samples.num_levels, longest = 0, pattern_length(context, max_length)
    if longest < min_length:
        return
    num_segments = snapshot.num_segments
    segments = segments_at(snapshot.segments, num_segments)
    searches = searches_at(scratch.searches, num_segments)
    expanders = expanders_at(scratch.expanders, 2 * num_segments)
    start_searches(segments, context, longest, scratch.patterns, searches, expanders)
    binary_search_all(searches, num_segments)
    in_segments = longest_match_of_all(searches, num_segments)
    num_possible = _scan_texts(snapshot, context, longest, in_segments, min_length, scratch, samples)
    size, num_sampled, support = 0, 0, 0.0
    for level in range(num_possible):
        if support >= ENOUGH_SUPPORT:
            break
        for segment in range(num_segments):
            request_range(searches[segment], samples.lengths[level])
        expand_ranges(searches, expanders, num_segments, MAX_SEGMENT_SAMPLES)
        begin = size
        size = _add_hits(scratch.context_samples, level, IN_CONTEXT, _CONTEXT_RECENCY, samples, size)
        size = _add_hits(scratch.memtable_samples, level, IN_MEMTABLE, _MEMTABLE_RECENCY, samples, size)
        scanned = size
        size = _add_segment_matches(searches, expanders, num_segments, num_sampled, samples, size)
        num_sampled += size - scanned
        for sample in range(begin, size):
            support += samples.matches[sample].weight
        samples.ends[level] = size
        samples.num_levels = level + 1
        _locate_segment_matches(searches, snapshot.num_prebuilt, scanned, size, samples)


_COMPARED: Final = 8  # the number of last tokens that identify a context
_WEIGHT_ONE: Final = 65536.0


@inlined
def _end_of(context: TokenIds, length: int) -> int:
    number = np.int64(length)
    for i in range(max(0, length - _COMPARED), length):
        number = (number * 1_000_003) ^ np.int64(context[i])
    return int(number)


@inlined
def _copy_match(match: MatchSample, copy: MatchSample) -> None:
    copy.kind, copy.at, copy.width = match.kind, match.at, match.width
    copy.recency, copy.weight = match.recency, match.weight


@kernel
def resume_matches(
    cursor: MatchCursor, table: int, texts: SearchedTexts, max_length: int, samples: MatchSamples
) -> None:
    """Continue with the text matches that the last step saved, so that this step needs no search.

    The saved matches that continue with the new tokens are written to ``samples``, all with the same match length,
    ``max_length``. If none is written, ``samples.num_levels`` is 0, and the caller must search. This happens if the
    saved matches are shorter, if the segments or the context were replaced, or if no saved match continues with the new
    tokens.
    """
    samples.num_levels = 0
    size, first = 0, cursor.length
    grown = len(texts.context) - first
    if cursor.table != table or grown < 0 or cursor.match_length + grown < max_length:
        return
    if _end_of(texts.context, first) != cursor.ends_with:
        return
    for i in range(cursor.count):
        match = samples.matches[size]
        _copy_match(cursor.matches[i], match)
        if match.kind == IN_MEMTABLE and match.at < texts.memtable_start:
            continue  # its text has been overwritten in the ring buffer or moved to a segment
        depth = 0
        while depth < grown:
            token = next_token(match, depth, texts)
            if token < 0 or token != texts.context[first + depth]:
                break
            depth += 1
        if depth == grown:
            match.at += grown * (match.width if match.kind == IN_SEGMENT else 1)
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
        saved = cursor.matches[i]
        _copy_match(samples.matches[i], saved)
        saved.weight = int(saved.weight * _WEIGHT_ONE) / _WEIGHT_ONE
    length = len(texts.context)
    cursor.table, cursor.length, cursor.ends_with = table, length, _end_of(texts.context, length)
    cursor.match_length, cursor.count = samples.lengths[0], count
