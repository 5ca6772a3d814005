"""``ssd-cache build``: write a cache directory of prebuilt segments, which appears complete or not at all.

The inputs are divided into blocks. Any process that can reach the directory can read, tokenize, sort and write a block.
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

from cache_builder.building.resumable import check_output, replace_directory, working_directory
from cache_builder.inputs.input_streams import is_regular
from cache_builder.inputs.record import DEFAULT_FIELD_NAMES, STANDARD_INPUT, FieldNames, Format, InputError, InputRecord
from cache_builder.inputs.records import EncodedRecord, encode_usable_record, read_part
from cache_builder.inputs.sources import Source, estimate_text_bytes, find_sources, split_source
from cache_builder.workers import Progress, map_items
from ssd import __version__
from ssd.config import IndexConfig
from ssd.errors import CacheError, ConfigError
from ssd.retrieval.dedup import PromptDeduplicator, split_sequence
from ssd.retrieval.files import Manifest, is_segment_id, sync_directory, write_file, write_manifest
from ssd.retrieval.prebuilt import DEFAULT_SEGMENT_TOKENS
from ssd.retrieval.segment import SEPARATOR, Tokens, concatenate, open_segment, write_segment
from ssd.retrieval.suffix_array import build_segment
from ssd.text.codec import TextCodec

MAX_BLOCK_BYTES: Final = 48 << 20
"""The maximum size of a block of the inputs in bytes of text, about 12 million tokens.

One process tokenizes a block and writes it to one or more segments, the immutable files of a cache. If a build is
killed, the next build repeats only unfinished blocks.
"""

LEAST_BLOCK_BYTES: Final = 1 << 20
BLOCKS: Final = 16
"""The number of blocks into which a small corpus is divided, so that all processor cores have work."""


@dataclass(frozen=True, slots=True)
class Block:
    """A sequence of input files, or parts of files, that one process tokenizes and writes to segments.

    Attributes:
        key: A hash of the inputs, their modification times and the build options. If it is unchanged, a resumed build
            reuses the finished block.
        place: A hash of the names and byte ranges of the inputs, which makes the ids of the block's segments unique.
        weight: The approximate number of bytes of text.
    """

    number: int
    parts: tuple[Source, ...]
    key: str
    place: str
    weight: int


def plan_blocks(sources: Sequence[Source], how: str, block_bytes: int | None = None) -> list[Block]:
    """Divide the inputs of a build into blocks of about ``block_bytes`` bytes of text, in order.

    Several small files form one block, and a large file is split if its format allows it. ``how`` is a text with all
    build options that influence the result; it is hashed into each block's key. Raises InputError if an input cannot be
    read.
    """
    if block_bytes is None:
        total = sum(map(estimate_text_bytes, sources))
        block_bytes = min(MAX_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, total // BLOCKS))
    blocks: list[Block] = []
    held: list[Source] = []
    weight = 0
    for source in sources:
        for part, part_weight in split_source(source, block_bytes):
            if held and weight + part_weight > block_bytes * 5 // 4:
                blocks.append(_make_block(len(blocks), held, how, weight))
                held, weight = [], 0
            held.append(part)
            weight += part_weight
    if held:
        blocks.append(_make_block(len(blocks), held, how, weight))
    return blocks


def _make_block(number: int, parts: list[Source], how: str, weight: int) -> Block:
    places = json.dumps([(part.name, part.format, part.start, part.stop, part.requests) for part in parts])
    stamps = [f"{part.size} {part.stamp}" for part in parts]
    key = xxhash.xxh3_128_hexdigest(json.dumps([how, places, stamps]).encode())
    return Block(number, tuple(parts), key, xxhash.xxh3_64_hexdigest(places.encode()), weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of ``ssd-cache build``, in a form that can be sent to worker processes.

    Attributes:
        jobs: The number of processes. None: one for each processor core.
        block_bytes: The size of a block in bytes of text. None: `plan_blocks` chooses the size.
        directory: The working directory of the build, which `build` sets.
        fingerprint: The hash that identifies the tokenizer, which `build` sets.
    """

    namespace: str
    tokenizer: str
    chat_template: str | None = None
    format: Format = "auto"
    force: bool = False
    skip_invalid: bool = False
    fields: FieldNames = DEFAULT_FIELD_NAMES
    jobs: int | None = None
    segment_tokens: int = DEFAULT_SEGMENT_TOKENS
    block_bytes: int | None = None
    directory: Path = Path()
    fingerprint: str = ""

    @property
    def segments(self) -> Path:
        return self.directory / "new"

    @property
    def journal(self) -> Path:
        """The directory with one file for each finished block; an interrupted build resumes from these files."""
        return self.directory / "journal"


@dataclass(slots=True)
class BuildResult:
    """Counts of records, sequences and tokens of a build. Separator tokens are not counted."""

    num_records: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_skipped_prompt_tokens: int = 0
    """The number of prompt tokens that were not stored again, because an earlier prompt began with the same tokens."""
    num_invalid: int = 0
    """The number of invalid lines that were skipped because of ``--skip-invalid``."""
    num_without_prompt: int = 0
    """The number of records that contain only an answer and no prompt."""
    num_without_answer: int = 0
    """The number of records with a request but no answer, which are not stored."""
    num_segments: int = 0
    num_reused_tokens: int = 0
    """The number of tokens in blocks that an earlier, interrupted build had already finished."""

    def add(self, other: BuildResult) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The segments built from one block of the inputs, in order, as pairs of segment id and number of tokens."""

    number: int
    segments: tuple[tuple[str, int], ...]
    counts: BuildResult


@lru_cache(maxsize=2)
def load_codec(tokenizer: str, chat_template: str | None) -> TextCodec:
    return TextCodec.load(tokenizer, chat_template=chat_template)


def build_block(
    block: Block, options: BuildOptions, progress: Progress = lambda num_bytes, num_tokens: None
) -> BlockResult:
    """Tokenize a block of the inputs and write its segments; if an earlier build did so, only read the result.

    The same block and options always give the same files. Building needs 4 bytes of memory per token of a segment, and
    14 more while the segment's suffix array is sorted. Raises InputError for an invalid input, ModelError if the
    tokenizer cannot be loaded, and CacheError or OSError if a segment cannot be written.
    """
    journal = options.journal / block.key
    known = _read_journal(journal, block, options)
    if known is not None:
        known.counts.num_reused_tokens = known.counts.num_tokens
        progress(0, known.counts.num_tokens)
        return known
    result = _Builder(block, options, progress).run()
    write_file(journal, [json.dumps([result.segments, asdict(result.counts)]).encode()], durable=True)
    return result


def _read_journal(journal: Path, block: Block, options: BuildOptions) -> BlockResult | None:
    """Return the stored result of a finished block after checking its files; None if one is missing or damaged."""
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
    """Tokenizes one block of the inputs and writes it to segments.

    If several prompts in a segment begin with the same text, the segment contains this text once.
    """

    def __init__(self, block: Block, options: BuildOptions, progress: Progress) -> None:
        self._block = block
        self._options = options
        self._progress = progress
        self._codec = load_codec(options.tokenizer, options.chat_template)
        self._held = np.empty(options.segment_tokens, np.int32)
        self._segments: list[tuple[str, int]] = []
        self._start_batch()

    def run(self) -> BlockResult:
        counts, options = BuildResult(), self._options
        for record in self._records():
            found = encode_usable_record(record, self._codec, options.fields, skip_invalid=options.skip_invalid)
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

    def _records(self) -> Iterator[InputRecord]:
        for part in self._block.parts:
            yield from read_part(part, lambda num_bytes: self._progress(num_bytes, 0), self._options.fields)

    def _pieces(self, found: EncodedRecord | None) -> tuple[list[Tokens], BuildResult]:
        """Return the tokens of a record that must be stored, and the record's counts.

        The beginning of a prompt is left out if the current segment already contains it.
        """
        if found is None:
            return [], BuildResult(num_invalid=1)
        counts = BuildResult(
            num_records=1, num_without_prompt=not found.has_prompt, num_without_answer=not found.has_answer
        )
        kept: list[Tokens] = []
        for example in found.examples:
            tokens = np.array(example.token_ids, np.int32)
            pieces = self._known.new_pieces(tokens, example.prompt_length, 0)
            num_stored = sum(map(len, pieces))
            counts.num_sequences += len(pieces)
            counts.num_tokens += num_stored
            counts.num_skipped_prompt_tokens += len(tokens) - num_stored
            for piece in pieces:
                kept += split_sequence(piece, len(self._held) - 1, self._lead_in)
        return kept, counts

    def _start_batch(self) -> None:
        index = IndexConfig()
        self._lead_in = index.lead_in_tokens
        self._known = PromptDeduplicator(index.dedup_block_tokens, index.lead_in_tokens)
        self._num_held = 0

    def _write(self) -> None:
        if self._num_held:
            tokens = self._held[: self._num_held]
            segment_id = content_id(tokens, f"{self._block.place}-{len(self._segments)}")
            write_new_segment(tokens, segment_id, self._options)
            self._segments.append((segment_id, len(tokens)))
        self._start_batch()


def content_id(tokens: Tokens, place: str) -> str:
    """Return a hash of a segment's tokens and of its place in the inputs, so that equal segments have different ids."""
    digest = xxhash.xxh3_128(tokens.data)
    digest.update(place.encode())
    return f"static-{digest.hexdigest()}"


def write_new_segment(tokens: Tokens, segment_id: str, options: BuildOptions) -> None:
    segment = build_segment(tokens, start=None, segment_id=segment_id)
    write_segment(
        options.segments / f"{segment_id}.seg",
        segment,
        fingerprint=options.fingerprint,
        namespace=options.namespace,
    )


SMALL_SHARE = 4
"""A segment of less than 1/SMALL_SHARE of the maximum size is merged with a neighbour if both fit into one segment."""


SegmentGroup: TypeAlias = tuple[tuple[str, int], ...]
"""Consecutive segments to be merged into one, as pairs of segment id and number of tokens."""


def merged_id(neighbours: SegmentGroup) -> str:
    if len(neighbours) == 1:
        return neighbours[0][0]
    return f"static-{xxhash.xxh3_128_hexdigest(' '.join(name for name, _ in neighbours).encode())}"


def group_small_segments(segments: Sequence[tuple[str, int]], most: int) -> Iterator[SegmentGroup]:
    """Yield groups of neighbouring segments to merge into one, because lookups are faster with fewer segments.

    A group has at most ``most`` tokens. A segment that needs no merge is yielded as a group of its own.
    """
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


def merge_group(neighbours: SegmentGroup, options: BuildOptions, progress: Progress) -> None:
    files = [options.segments / f"{segment_id}.seg" for segment_id, _ in neighbours]
    segments = [open_segment(file, fingerprint=options.fingerprint, namespace=options.namespace) for file in files]
    write_new_segment(concatenate(segments), merged_id(neighbours), options)


_ALONE_WEIGHT = 8 << 20
"""One process builds inputs with less text than this (in bytes), because starting more processes would take longer."""

Executor: TypeAlias = Callable[[Sequence[Block], BuildOptions, Progress], Iterator[BlockResult]]
"""A function that distributes blocks over processes, each of which runs `build_block`, and yields the results.

The results may arrive in any order. All processes must be able to write to ``options.directory``.
"""


def build(
    inputs: Sequence[str],
    out: Path,
    options: BuildOptions,
    *,
    begin: Callable[[int], None] = lambda num_bytes: None,
    progress: Progress = lambda num_bytes, num_tokens: None,
    executor: Executor | None = None,
) -> BuildResult:
    """Tokenize all inputs and write them to a new cache directory.

    Args:
        inputs: Files, patterns, directories and URLs, see `find_sources`.
        out: The cache directory. After an error it is unchanged, and finished blocks are stored next to it, so that the
            next build resumes.
        options: The options of the build.
        begin: Called once with the total number of bytes of the inputs, as far as it is known.
        progress: Called with the numbers of bytes read and of tokens produced since its last call.
        executor: Distributes the blocks, for instance over a cluster. None: processes on this machine.

    Raises:
        InputError: An input cannot be read, or a record is invalid and ``skip_invalid`` is not set.
        ConfigError: ``out`` cannot be used.
        CacheError: A segment cannot be written.
        OSError: The file system failed.
    """
    out = check_output(out, force=options.force)
    sources = find_sources(inputs, options.format)
    codec = load_codec(options.tokenizer, options.chat_template)
    with working_directory(out, fresh=False) as working:
        options = replace(options, directory=working.absolute(), fingerprint=codec.fingerprint)
        blocks = plan_blocks(sources, _describe_options(options, codec), options.block_bytes)
        jobs = _num_processes(options.jobs, sources, blocks)
        begin(sum(source.size or 0 for source in sources))
        if executor is not None and jobs == 0:
            raise ConfigError(
                "a build on other machines cannot read standard input, pipes or memory://: give files or URLs"
            )
        if executor is None:
            results = map_items(build_block, blocks, options, progress, jobs=jobs)
        else:
            results = executor(blocks, options, progress)
        result = BuildResult()
        segments: dict[int, SegmentGroup] = {}
        for block in results:
            result.add(block.counts)
            segments[block.number] = block.segments
        if result.num_tokens == 0:
            skipped = f", and {result.num_invalid} invalid lines were skipped" if result.num_invalid else ""
            if result.num_without_answer:
                skipped += f", and {result.num_without_answer} of {result.num_records} records have no answer"
            raise InputError(f"the inputs contain no text{skipped}: nothing was built")
        in_order = [segment for number in sorted(segments) for segment in segments[number]]
        final = list(group_small_segments(in_order, options.segment_tokens))
        together = [neighbours for neighbours in final if len(neighbours) > 1]
        for _ in map_items(merge_group, together, options, lambda num_bytes, num_tokens: None, jobs=jobs):
            pass
        result.num_segments = len(final)
        _publish(out, working, final, options)
    return result


def _describe_options(options: BuildOptions, codec: TextCodec) -> str:
    try:
        tokenizer = xxhash.xxh3_128_hexdigest(codec.to_json().encode())
    except ValueError:
        tokenizer = options.tokenizer
    return json.dumps(
        [
            __version__,
            codec.fingerprint,
            tokenizer,
            codec.eos_token_ids,
            codec.chat_template(options.chat_template),
            options.namespace,
            sorted(options.fields.names.items()),
            options.skip_invalid,
            options.segment_tokens,
        ]
    )


def _num_processes(wanted: int | None, sources: Sequence[Source], blocks: Sequence[Block]) -> int:
    """Return the number of worker processes; 0 means that the calling process builds all blocks itself.

    The result is 0 if other processes cannot read the inputs (standard input, pipes), and 1 for a small corpus.
    """
    if any(source.name == STANDARD_INPUT or not is_regular(source.name) for source in sources):
        return 0
    if wanted is None and sum(block.weight for block in blocks) < _ALONE_WEIGHT:
        return 1
    return min(len(blocks), wanted or len(os.sched_getaffinity(0)))


def _publish(out: Path, working: Path, final: Sequence[SegmentGroup], options: BuildOptions) -> None:
    """Write the manifest of the finished cache and move the cache from the working directory to ``out``."""
    sizes = {merged_id(neighbours): sum(size for _, size in neighbours) for neighbours in final}
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
