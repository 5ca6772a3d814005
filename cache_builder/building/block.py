"""One block of a build: read, tokenised, sorted and written, in any process that reaches the directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash

from cache_builder.building.counts import BuildResult
from cache_builder.building.journal import Finished, Journal, usable
from cache_builder.building.plan import Block
from cache_builder.building.stored import Stored
from cache_builder.inputs.examples import examples_of
from cache_builder.inputs.fields import AS_WE_CALL_THEM, FieldNames
from cache_builder.inputs.record import InputError, Record
from cache_builder.inputs.records import read_part
from ssd.config import IndexConfig
from ssd.retrieval.packed import Tokens
from ssd.retrieval.prefixes import PrefixFilter, split_sequence
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.segment_file import write_segment
from ssd.retrieval.static import DEFAULT_SEGMENT_TOKENS
from ssd.retrieval.suffix_array import build_segment
from ssd.text.codec import TextCodec

Progress: TypeAlias = Callable[[int, int], None]
"""Is told how many bytes more were read, and how many tokens more were made of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """What is the same for all blocks of a build; pickles to a few hundred bytes.

    ``directory`` : where ``segments`` and ``journal`` lie, both there already. ``stored`` : a file of ``Stored``, what
    need not be stored.
    """

    directory: Path
    tokenizer: str
    chat_template: str | None = None
    fingerprint: str
    namespace: str
    fields: FieldNames = AS_WE_CALL_THEM
    skip_invalid: bool = False
    segment_tokens: int = DEFAULT_SEGMENT_TOKENS
    stored: Path | None = None

    @property
    def segments(self) -> Path:
        """Where segment files are written."""
        return self.directory / "new"

    @property
    def journal(self) -> Path:
        """Where journals are written."""
        return self.directory / "journal"


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
    block: Block, options: BlockOptions, progress: Progress = lambda num_bytes, num_tokens: None
) -> BlockResult:
    """Write the segments of ``block`` into ``options.segments``, but those its journal says are there.

    The same block and options give the same files, named by what they hold, in whatever process and however often it
    is begun. Memory: 4 bytes a token of a segment, and 14 more while it is sorted. Raises InputError, CacheError,
    ModelError, OSError; what was finished then stays.
    """
    journal = Journal(options.journal, block.key)
    known = usable(journal.read(), options.segments, fingerprint=options.fingerprint, namespace=options.namespace)
    journal.begin(known)
    if known and known[-1].is_last:
        progress(0, sum(entry.counts.num_tokens for entry in known))
    else:
        _Builder(block, options, journal, known, progress).run()
    counts = BuildResult()
    finished = journal.read()
    for entry in finished:
        counts.add(entry.counts)
    counts.num_reused_tokens = sum(entry.counts.num_tokens for entry in known)
    segments = tuple((entry.segment_id, entry.num_tokens) for entry in finished if entry.segment_id is not None)
    return BlockResult(block.number, segments, counts)


class _Builder:
    """A block at work. What repeats is looked for within a segment, so that each is a function of its own records."""

    def __init__(
        self, block: Block, options: BlockOptions, journal: Journal, known: list[Finished], progress: Progress
    ):
        """``known`` : what is finished of it, which ends where a record does."""
        self._block = block
        self._options = options
        self._journal = journal
        self._progress = progress
        self._codec = codec_of(options.tokenizer, options.chat_template)
        self._stored = None if options.stored is None else Stored.open(options.stored)
        self._held = np.empty(options.segment_tokens, np.int32)
        self._num_segments = len(known)
        self._num_read = known[-1].num_read if known else 0
        self._begin()

    def run(self) -> None:
        """Read on from there to the end. Raises as ``build_block``."""
        for record in islice(self._records(), self._num_read, None):
            examples = self._examples(record)
            found = self._pieces(examples)
            if self._num_held and self._num_held + found.num_tokens > len(self._held):
                self._write(self._num_read)
                found = self._pieces(examples)
            for piece in found.pieces:
                if self._num_held + len(piece) + 1 > len(self._held):
                    self._write(-1)
                self._held[self._num_held : self._num_held + len(piece)] = piece
                self._num_held += len(piece) + 1
                self._held[self._num_held - 1] = SEPARATOR
            self._counts.add(found.counts)
            self._num_read += 1
            self._progress(0, found.counts.num_tokens)
        self._write(self._num_read, is_last=True)

    def _records(self) -> Iterator[Record]:
        for part in self._block.parts:
            yield from read_part(part, lambda num_bytes: self._progress(num_bytes, 0), self._options.fields)

    def _examples(self, record: Record) -> list[tuple[Tokens, int]] | None:
        """(tokens, length of the prompt) of each; None for an invalid line that is left out."""
        try:
            examples = examples_of(record, self._codec, self._options.fields)
        except InputError:
            if not (self._options.skip_invalid and record.is_json):
                raise
            return None
        return [(np.array(example.token_ids, np.int32), example.prompt_length) for example in examples]

    def _pieces(self, examples: list[tuple[Tokens, int]] | None) -> _Pieces:
        """What of a record is to be stored in the segment that is held."""
        if examples is None:
            return _Pieces([], 0, BuildResult(num_invalid=1))
        counts = BuildResult(num_records=1)
        kept: list[Tokens] = []
        for tokens, prompt_length in examples:
            if self._taken is not None and self._taken.take(tokens):
                counts.num_stored_sequences += 1
                continue
            pieces = self._known.pieces(tokens, prompt_length, 0)
            num_stored = sum(map(len, pieces))
            counts.num_sequences += len(pieces)
            counts.num_tokens += num_stored
            counts.num_skipped_prompt_tokens += len(tokens) - num_stored
            for piece in pieces:
                kept += split_sequence(piece, len(self._held) - 1, self._lead_in)
        return _Pieces(kept, sum(map(len, kept)) + len(kept), counts)

    def _begin(self) -> None:
        """A new segment, of which nothing is known."""
        index = IndexConfig()
        self._lead_in = index.lead_in_tokens
        self._known = PrefixFilter(index.dedup_block_tokens, index.lead_in_tokens)
        self._taken = None if self._stored is None else self._stored.taken()
        self._num_held = 0
        self._counts = BuildResult()

    def _write(self, num_read: int, *, is_last: bool = False) -> None:
        segment_id = None
        num_tokens = self._num_held
        if num_tokens:
            tokens = self._held[:num_tokens]
            segment_id = content_id(tokens, f"{self._block.place}-{self._num_segments}")
            write_new_segment(tokens, segment_id, self._options)
            self._num_segments += 1
            self._counts.num_segments = 1
        self._journal.append(Finished(segment_id, num_tokens, num_read, is_last, self._counts))
        self._begin()


class _Pieces(NamedTuple):
    """``num_tokens`` : with separators."""

    pieces: list[Tokens]
    num_tokens: int
    counts: BuildResult


def content_id(tokens: Tokens, place: str) -> str:
    """A segment's name: of what it holds, and of where that stood, for a directory may hold the same text twice."""
    digest = xxhash.xxh3_128(tokens.data)
    digest.update(place.encode())
    return f"static-{digest.hexdigest()}"


def write_new_segment(tokens: Tokens, segment_id: str, options: BlockOptions) -> None:
    """Sort ``tokens`` and put them on disk. Raises CacheError, OSError."""
    segment = build_segment(tokens, start=None, segment_id=segment_id)
    write_segment(
        options.segments / f"{segment_id}.seg",
        segment,
        fingerprint=options.fingerprint,
        namespace=options.namespace,
    )
