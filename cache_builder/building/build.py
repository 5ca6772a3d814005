"""``ssd-cache build``: inputs to a directory of static segments, which appears whole or not at all.

It is made in blocks: each is read, tokenised, sorted and written in any process that reaches the directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import xxhash

from cache_builder.building.unfinished import check_new, replace_directory, working_directory
from cache_builder.inputs.record import AS_WE_CALL_THEM, STANDARD_INPUT, FieldNames, Format, InputError, Record
from cache_builder.inputs.records import Found, read_part, usable_in
from cache_builder.inputs.sources import Source, find_sources, parts_of, weight_of
from cache_builder.inputs.streams import is_regular
from cache_builder.workers import Progress, run
from ssd import __version__
from ssd.config import IndexConfig
from ssd.errors import CacheError, ConfigError
from ssd.retrieval.files import Manifest, is_segment_id, sync_directory, write_file, write_manifest
from ssd.retrieval.prefixes import PrefixFilter, split_sequence
from ssd.retrieval.segment import SEPARATOR, Tokens, concatenate, open_segment, write_segment
from ssd.retrieval.static import DEFAULT_SEGMENT_TOKENS
from ssd.retrieval.suffix_array import build_segment
from ssd.text.codec import TextCodec

MOST_BLOCK_BYTES: Final = 48 << 20
"""Of text, some 12 million tokens: a block is one segment, and what is lost where a build is killed."""

LEAST_BLOCK_BYTES: Final = 1 << 20
BLOCKS: Final = 16
"""A small corpus is cut into so many, so that there is work for several cores; small segments are merged at the end."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some inputs or parts of inputs, in order.

    ``key`` : of what is read, when it was last changed, and how it is stored; a block with the same key gives the same
    segments. ``place`` : of what is read alone. ``weight`` : bytes of text, roughly.
    """

    number: int
    parts: tuple[Source, ...]
    key: str
    place: str
    weight: int


def plan_of(sources: Sequence[Source], how: str, block_bytes: int | None = None) -> list[Block]:
    """All of ``sources`` as blocks, in order. ``how`` : whatever else decides what becomes of them. Raises InputError.

    Small inputs share a block; a large one that can be cut is several.
    """
    if block_bytes is None:
        total = sum(map(weight_of, sources))
        block_bytes = min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, total // BLOCKS))
    blocks: list[Block] = []
    held: list[Source] = []
    weight = 0
    for source in sources:
        for part, part_weight in parts_of(source, block_bytes):
            if held and weight + part_weight > block_bytes * 5 // 4:
                blocks.append(_block(len(blocks), held, how, weight))
                held, weight = [], 0
            held.append(part)
            weight += part_weight
    if held:
        blocks.append(_block(len(blocks), held, how, weight))
    return blocks


def _block(number: int, parts: list[Source], how: str, weight: int) -> Block:
    places = json.dumps([(part.name, part.format, part.start, part.stop, part.requests) for part in parts])
    stamps = [f"{part.size} {part.stamp}" for part in parts]
    key = xxhash.xxh3_128_hexdigest(json.dumps([how, places, stamps]).encode())
    return Block(number, tuple(parts), key, xxhash.xxh3_64_hexdigest(places.encode()), weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a build is done; pickles to a few hundred bytes.

    ``force`` : in place of a cache that is there. ``fields`` : how records call theirs. ``jobs`` : processes, None for
    one a core. ``block_bytes`` : of text in a block, None as ``plan_of`` chooses. Said by ``build`` itself:
    ``directory``, where ``segments`` and ``journal`` lie, both there already; ``fingerprint``, the tokenizer's.
    """

    namespace: str
    tokenizer: str
    chat_template: str | None = None
    format: Format = "auto"
    force: bool = False
    skip_invalid: bool = False
    fields: FieldNames = AS_WE_CALL_THEM
    jobs: int | None = None
    segment_tokens: int = DEFAULT_SEGMENT_TOKENS
    block_bytes: int | None = None
    directory: Path = Path()
    fingerprint: str = ""

    @property
    def segments(self) -> Path:
        """Where segment files are written."""
        return self.directory / "new"

    @property
    def journal(self) -> Path:
        """Where journals are written."""
        return self.directory / "journal"


@dataclass(slots=True)
class BuildResult:
    """What went into the directory. Tokens are without separators."""

    num_records: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_skipped_prompt_tokens: int = 0
    """Prompt tokens not stored, because an earlier sequence of the segment begins with the same blocks."""
    num_invalid: int = 0
    """Lines left out by ``skip_invalid``."""
    num_without_prompt: int = 0
    """Records of which only the answer is known."""
    num_without_answer: int = 0
    """Records of calls that say no answer: nothing of them is stored."""
    num_segments: int = 0
    num_reused_tokens: int = 0
    """Of blocks that an earlier build which did not end had finished."""

    def add(self, other: BuildResult) -> None:
        """Count what ``other`` counted as well."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The segments of a block, in order: (id, tokens with separators)."""

    number: int
    segments: tuple[tuple[str, int], ...]
    counts: BuildResult


@lru_cache(maxsize=2)
def codec_of(tokenizer: str, chat_template: str | None) -> TextCodec:
    """The codec of a build, loaded once a process. Raises ModelError."""
    return TextCodec.load(tokenizer, chat_template=chat_template)


def build_block(
    block: Block, options: BuildOptions, progress: Progress = lambda num_bytes, num_tokens: None
) -> BlockResult:
    """Write the segments of ``block`` into ``options.segments``, unless its journal says they are there.

    The same block and options give the same files, named by what they hold, in whatever process and however often it
    is begun. Memory: 4 bytes a token of a segment, and 14 more while it is sorted. Raises InputError, CacheError,
    ModelError, OSError.
    """
    journal = options.journal / block.key
    known = _finished(journal, block, options)
    if known is not None:
        known.counts.num_reused_tokens = known.counts.num_tokens
        progress(0, known.counts.num_tokens)
        return known
    result = _Builder(block, options, progress).run()
    write_file(journal, [json.dumps([result.segments, asdict(result.counts)]).encode()], durable=True)
    return result


def _finished(journal: Path, block: Block, options: BuildOptions) -> BlockResult | None:
    """What an earlier build made of a block; None where it did not, or where a file is not whole. O(tokens)."""
    try:
        segments, counts = json.loads(journal.read_bytes())
        for segment_id, num_tokens in segments:
            if not is_segment_id(segment_id):
                return None
            file = options.segments / f"{segment_id}.seg"
            segment = open_segment(file, fingerprint=options.fingerprint, namespace=options.namespace)
            if (segment.segment_id, len(segment)) != (segment_id, num_tokens):
                return None
        return BlockResult(block.number, tuple(map(tuple, segments)), BuildResult(**counts))
    except (CacheError, OSError, ValueError, TypeError):
        return None


class _Builder:
    """A block at work. What repeats is looked for within a segment, so that each is a function of its own records."""

    def __init__(self, block: Block, options: BuildOptions, progress: Progress) -> None:
        self._block = block
        self._options = options
        self._progress = progress
        self._codec = codec_of(options.tokenizer, options.chat_template)
        self._held = np.empty(options.segment_tokens, np.int32)
        self._segments: list[tuple[str, int]] = []
        self._begin()

    def run(self) -> BlockResult:
        """Raises as ``build_block``."""
        counts, options = BuildResult(), self._options
        for record in self._records():
            found = usable_in(record, self._codec, options.fields, skip_invalid=options.skip_invalid)
            kept, of_record = self._pieces(found)
            if self._num_held and self._num_held + sum(map(len, kept)) + len(kept) > len(self._held):
                self._write()
                kept, of_record = self._pieces(found)
            for piece in kept:
                if self._num_held + len(piece) + 1 > len(self._held):
                    self._write()
                self._held[self._num_held : self._num_held + len(piece)] = piece
                self._num_held += len(piece) + 1
                self._held[self._num_held - 1] = SEPARATOR
            counts.add(of_record)
            self._progress(0, of_record.num_tokens)
        self._write()
        counts.num_segments = len(self._segments)
        return BlockResult(self._block.number, tuple(self._segments), counts)

    def _records(self) -> Iterator[Record]:
        for part in self._block.parts:
            yield from read_part(part, lambda num_bytes: self._progress(num_bytes, 0), self._options.fields)

    def _pieces(self, found: Found | None) -> tuple[list[Tokens], BuildResult]:
        """What of a record is to be stored in the segment that is held."""
        if found is None:
            return [], BuildResult(num_invalid=1)
        counts = BuildResult(
            num_records=1, num_without_prompt=not found.has_prompt, num_without_answer=not found.has_answer
        )
        kept: list[Tokens] = []
        for example in found.examples:
            tokens = np.array(example.token_ids, np.int32)
            pieces = self._known.pieces(tokens, example.prompt_length, 0)
            num_stored = sum(map(len, pieces))
            counts.num_sequences += len(pieces)
            counts.num_tokens += num_stored
            counts.num_skipped_prompt_tokens += len(tokens) - num_stored
            for piece in pieces:
                kept += split_sequence(piece, len(self._held) - 1, self._lead_in)
        return kept, counts

    def _begin(self) -> None:
        """A new segment, of which nothing is known."""
        index = IndexConfig()
        self._lead_in = index.lead_in_tokens
        self._known = PrefixFilter(index.dedup_block_tokens, index.lead_in_tokens)
        self._num_held = 0

    def _write(self) -> None:
        if self._num_held:
            tokens = self._held[: self._num_held]
            segment_id = content_id(tokens, f"{self._block.place}-{len(self._segments)}")
            write_new_segment(tokens, segment_id, self._options)
            self._segments.append((segment_id, len(tokens)))
        self._begin()


def content_id(tokens: Tokens, place: str) -> str:
    """A segment's name: of what it holds, and of where that stood, for a directory may hold the same text twice."""
    digest = xxhash.xxh3_128(tokens.data)
    digest.update(place.encode())
    return f"static-{digest.hexdigest()}"


def write_new_segment(tokens: Tokens, segment_id: str, options: BuildOptions) -> None:
    """Sort ``tokens`` and put them on disk. Raises CacheError, OSError."""
    segment = build_segment(tokens, start=None, segment_id=segment_id)
    write_segment(
        options.segments / f"{segment_id}.seg",
        segment,
        fingerprint=options.fingerprint,
        namespace=options.namespace,
    )


SMALL_SHARE = 4
"""A segment is small that holds less than a fourth of what one may."""


Neighbours: TypeAlias = tuple[tuple[str, int], ...]
"""Segments in order, (id, tokens with separators), that become one; one alone stays as it is."""


def joined_id(neighbours: Neighbours) -> str:
    """The name of what they become."""
    if len(neighbours) == 1:
        return neighbours[0][0]
    return f"static-{xxhash.xxh3_128_hexdigest(' '.join(name for name, _ in neighbours).encode())}"


def neighbours_of(segments: Sequence[tuple[str, int]], most: int) -> Iterator[Neighbours]:
    """All ``segments`` in order, together where they are small and have no more than ``most`` tokens in all."""
    held: list[tuple[str, int]] = []
    size = 0
    for segment in segments:
        is_small = min(size, segment[1]) * SMALL_SHARE < most
        if held and (size + segment[1] > most or not is_small):
            yield tuple(held)
            held, size = [], 0
        held.append(segment)
        size += segment[1]
    if held:
        yield tuple(held)


def merge(neighbours: Neighbours, options: BuildOptions, progress: Progress) -> None:
    """Write the segment that ``neighbours`` become; their files stay. Memory as for a block."""
    files = [options.segments / f"{segment_id}.seg" for segment_id, _ in neighbours]
    segments = [open_segment(file, fingerprint=options.fingerprint, namespace=options.namespace) for file in files]
    write_new_segment(concatenate(segments), joined_id(neighbours), options)


_ALONE_WEIGHT = 8 << 20
"""Bytes of text that one process has done before others have started."""

Executor: TypeAlias = Callable[[Sequence[Block], BuildOptions, Progress], Iterator[BlockResult]]
"""Maps ``build_block`` over the blocks, in any order, in processes that reach ``options.directory``."""


def build(
    inputs: Sequence[str],
    out: Path,
    options: BuildOptions,
    *,
    begin: Callable[[int], None] = lambda num_bytes: None,
    progress: Progress = lambda num_bytes, num_tokens: None,
    executor: Executor | None = None,
) -> BuildResult:
    """Encode all inputs and write them to ``out``.

    ``begin`` : told the bytes of all inputs before the first is read, as far as they are known. ``executor`` : what
    maps the blocks, None for processes here. Raises InputError (unless ``skip_invalid`` and it is only a line),
    ConfigError, CacheError, OSError; then ``out`` is as it was before, and what was finished is kept beside it for the
    next build.
    """
    out = check_new(out, force=options.force)
    sources = find_sources(inputs, options.format)
    codec = codec_of(options.tokenizer, options.chat_template)
    with working_directory(out, fresh=False) as working:
        options = replace(options, directory=working.absolute(), fingerprint=codec.fingerprint)
        blocks = plan_of(sources, _how(options, codec), options.block_bytes)
        jobs = _jobs(options.jobs, sources, blocks)
        begin(sum(source.size or 0 for source in sources))
        if executor is not None and jobs == 0:
            raise ConfigError("other machines cannot read standard input, pipes or memory://: give files or URLs")
        if executor is None:
            results = run(build_block, blocks, options, progress, jobs=jobs)
        else:
            results = executor(blocks, options, progress)
        result = BuildResult()
        segments: dict[int, Neighbours] = {}
        for block in results:
            result.add(block.counts)
            segments[block.number] = block.segments
        if result.num_tokens == 0:
            skipped = f", and {result.num_invalid} lines were left out as invalid" if result.num_invalid else ""
            if result.num_without_answer:
                skipped += f", and {result.num_without_answer} of {result.num_records} records say no answer"
            raise InputError(f"the inputs hold no text{skipped}: nothing was built")
        in_order = [segment for number in sorted(segments) for segment in segments[number]]
        final = list(neighbours_of(in_order, options.segment_tokens))
        together = [neighbours for neighbours in final if len(neighbours) > 1]
        for _ in run(merge, together, options, lambda num_bytes, num_tokens: None, jobs=jobs):
            pass
        result.num_segments = len(final)
        _publish(out, working, final, options)
    return result


def _how(options: BuildOptions, codec: TextCodec) -> str:
    """All that decides what becomes of a text: what was made another way is not used."""
    try:
        tokenizer = xxhash.xxh3_128_hexdigest(codec.to_json().encode())
    except ValueError:
        tokenizer = options.tokenizer
    return json.dumps(
        [
            __version__, codec.fingerprint, tokenizer, codec.eos_token_ids, codec.chat_template(options.chat_template),
            options.namespace, sorted(options.fields.names.items()), options.skip_invalid, options.segment_tokens,
        ]
    )  # fmt: skip


def _jobs(wanted: int | None, sources: Sequence[Source], blocks: Sequence[Block]) -> int:
    """0 where no other process can read the inputs, 1 where it is not worth another."""
    if any(source.name == STANDARD_INPUT or not is_regular(source.name) for source in sources):
        return 0
    if wanted is None and sum(block.weight for block in blocks) < _ALONE_WEIGHT:
        return 1
    return min(len(blocks), wanted or len(os.sched_getaffinity(0)))


def _publish(out: Path, working: Path, final: Sequence[Neighbours], options: BuildOptions) -> None:
    """``new`` becomes a cache of these segments alone, and takes the place of ``out``."""
    sizes = {joined_id(neighbours): sum(size for _, size in neighbours) for neighbours in final}
    for file in options.segments.iterdir():
        if file.stem not in sizes:
            file.unlink()
    sync_directory(options.segments)
    manifest = Manifest(
        fingerprint=options.fingerprint,
        namespace=options.namespace,
        generation=1,
        segments=tuple({"id": name, "num_tokens": size, "start": None} for name, size in sizes.items()),
    )
    write_manifest(options.segments, manifest)
    replace_directory(out, working)
    sync_directory(out.parent)
