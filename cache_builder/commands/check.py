"""``ssd-cache check``: everything about a cache directory that can be wrong, each fault with what to do about it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache_builder.commands.options import CACHE_DIRECTORY, codec_of, progress_bar
from cache_builder.held import learned_of, manifest_of, plain
from ssd.compiled.addresses import TokenIds, address, int32_array, kernel, load_uint32
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.errors import CacheError, ConfigError
from ssd.retrieval.directory import LEARNED_NAME, is_segment_file, load_segments
from ssd.retrieval.files import (
    LOCK_NAME,
    MANIFEST_NAME,
    check_fingerprint,
    check_namespace,
    is_temporary,
)
from ssd.retrieval.ring import blocks_of
from ssd.retrieval.segment import GUARD_BYTES, Segment
from ssd.retrieval.suffix_array import build_fence
from ssd.text.codec import TextCodec

RIGHT: Final = -1
"""No rank is wrong."""


@kernel
def _first_wrong(text: int, width: int, order_address: int, n: int, ranks: TokenIds) -> int:
    order, mask = int32_array(order_address, n), (1 << (8 * width)) - 1
    ranks[:] = -1
    for rank in range(n):
        position = np.int64(order[rank])
        if position < 1 or position > n or ranks[position] >= 0:
            return rank
        ranks[position] = rank
    for rank in range(1, n):
        before, here = np.int64(order[rank - 1]), np.int64(order[rank])
        code_before = load_uint32(text + width * int(before - 1)) & mask
        code_here = load_uint32(text + width * int(here - 1)) & mask
        if code_before > code_here:
            return rank
        # ranks[0] is -1: a text that ends precedes those it is the beginning of.
        if code_before == code_here and ranks[before - 1] >= ranks[here - 1]:
            return rank
    return RIGHT


def first_wrong(segment: Segment) -> int:
    """The first rank at which a segment's order is not that of its text, RIGHT where there is none, without sorting it.

    An order is right if it names every position once and each neighbour's text goes on as the order itself says: of two
    positions the one whose last token is smaller comes first, and of equal ones that whose text before that token does
    (Burkhardt and Kaerkkaeinen 2003, "Fast lightweight suffix array construction and checking", section 3.3).
    O(n), about 0.1 us a token; 4 bytes a token while it lasts. The guards of the text must be whole, as
    ``open_segment`` checks.
    """
    n = len(segment)
    return int(
        _first_wrong(
            address(segment.text) + GUARD_BYTES,
            segment.width,
            address(segment.order),
            n,
            np.empty(n + 1, np.int32),
        )
    )


_REBUILD = "build the directory again, or restore it from a copy"


@dataclass(slots=True)
class CheckReport:
    """``faults`` : what is wrong, and what to do; ``notes`` : what may stay as it is. Counts are of all segments that
    could be read. ``candidates_learned_from`` : what learned.bin rests on, None where there is none.
    """

    path: Path
    namespace: str
    fingerprint: str
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_segments: int = 0
    num_tokens: int = 0
    num_sequences: int = 0
    largest_id: int = -1
    candidates_learned_from: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "path": str(self.path), "is_sound": not self.faults}

    def as_text(self) -> str:
        """For people."""
        lines = [
            f"{self.path}",
            f"  {self.num_tokens:,} tokens in {self.num_sequences:,} sequences and {self.num_segments} segments, "
            f"namespace {plain(self.namespace)}, tokenizer {plain(self.fingerprint)}",
        ]
        if self.candidates_learned_from is not None:
            lines.append(f"  {LEARNED_NAME}: learned from {self.candidates_learned_from:,} candidates")
        lines += [f"  note: {plain(note)}" for note in self.notes]
        lines += [f"  FAULT: {plain(fault)}" for fault in self.faults]
        lines.append(f"  faults: {len(self.faults)}" if self.faults else "  sound")
        return "\n".join(lines)


def check(
    path: Path,
    *,
    codec: TextCodec | None = None,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> CheckReport:
    """Check all of ``path``; changes nothing. ``codec`` : what it should have been made with, None does not look.

    ``progress`` is told of tokens. Beyond what ``inspect`` reads: that every order is sorted, fences and manifest
    agree with it, ids are the tokenizer's, learned.bin can be used, and what else lies there.
    O(tokens), 4 bytes a token of the largest segment. Raises CacheError where there is no cache that could be checked.
    """
    manifest = manifest_of(path)
    result = CheckReport(path, manifest.namespace, manifest.fingerprint)
    try:
        check_namespace(manifest.namespace)
        check_fingerprint(manifest.fingerprint)
    except ConfigError as error:
        result.faults.append(f"{MANIFEST_NAME} has names that no writer writes ({error}): {_REBUILD}")
    if codec is not None and codec.fingerprint != manifest.fingerprint:
        result.faults.append(
            f"it was made with tokenizer {manifest.fingerprint}, this one is {codec.fingerprint}: use the tokenizer it "
            "was made with, or build it again"
        )
        codec = None
    segments, failures = load_segments(path, manifest, namespace=manifest.namespace)
    for failure in failures:
        is_missing = isinstance(failure, FileNotFoundError)
        result.faults.append(f"{failure.filename} is missing" if is_missing else str(failure))  # type: ignore[union-attr]
    entries = {entry["id"]: (entry.get("num_tokens"), entry.get("start")) for entry in manifest.segments}
    for segment in segments:
        file, said = path / f"{segment.segment_id}.seg", entries[segment.segment_id]
        if said != (len(segment), segment.start):
            result.faults.append(
                f"{MANIFEST_NAME} says of {file.name} that it has {said[0]!r:.20} tokens from position {said[1]!r:.20} "
                f"on, the file has {len(segment)} from {segment.start}: restore one of the two"
            )
        _check_segment(segment, file, codec, result)
        progress(len(segment))
    _check_learned(path, result)
    _name_others(path, set(entries), result)
    return result


def _check_segment(segment: Segment, file: Path, codec: TextCodec | None, result: CheckReport) -> None:
    largest = -1
    for block in blocks_of(segment):
        largest = max(largest, int(block.max()))
        num_ends = int(np.count_nonzero(block < 0))
        result.num_sequences, result.num_tokens = (
            result.num_sequences + num_ends,
            result.num_tokens + len(block) - num_ends,
        )
    result.num_segments += 1
    result.largest_id = max(result.largest_id, largest)
    if codec is not None and largest >= codec.vocab_size:
        result.faults.append(
            f"{file} holds token id {largest}, the tokenizer's are below {codec.vocab_size}: {_REBUILD}"
        )
    wrong = first_wrong(segment)
    if wrong != RIGHT:
        result.faults.append(
            f"the order of {file} is not that of its text, first at rank {wrong}: lookups miss what it holds, outputs "
            f"stay right; {_REBUILD}"
        )
    elif not np.array_equal(build_fence(segment.text, segment.order, segment.width), segment.fence):
        result.faults.append(f"the fence of {file} is not that of its order: lookups miss what it holds; {_REBUILD}")


def _check_learned(path: Path, result: CheckReport) -> None:
    try:
        stored = learned_of(path)
        if stored is not None:
            result.candidates_learned_from = AcceptanceModel.from_bytes(stored).num_learned
    except (CacheError, ValueError) as error:
        result.faults.append(f"{path / LEARNED_NAME} is not used ({error}): remove it, what it held is learned anew")


def _name_others(path: Path, segment_ids: set[str], result: CheckReport) -> None:
    for file in sorted(path.iterdir()):
        name = file.name
        if name in (MANIFEST_NAME, LEARNED_NAME, LOCK_NAME) or name.removesuffix(".seg") in segment_ids:
            continue
        if is_temporary(file) or is_segment_file(name):
            result.notes.append(
                f"{name} is no part of it: the next server that writes the directory removes what is ours"
            )
        else:
            result.notes.append(f"{name} is not ours: it is left alone")


_DESCRIPTION = """\
Everything `inspect` reads, and what takes longer: that every segment is sorted right, that all token ids are the
tokenizer's, that manifest and files agree, that what was learned can be used, and what else lies in the directory.
Changes nothing. Ends with status 1 where there is a fault.
"""


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="whose ids it should hold")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    codec = codec_of(options)
    with progress_bar(0, " tokens") as progress:
        report = check(options.directory, codec=codec, progress=progress)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    return 1 if report.faults else 0
