"""``ssd-cache inspect``: what a cache directory holds, every byte of it checked."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache_builder.commands.options import CACHE_DIRECTORY, codec_of
from cache_builder.held import manifest_of, open_held, plain
from ssd.errors import CacheError, TokenizerMismatch
from ssd.retrieval.files import Manifest, is_segment_id
from ssd.retrieval.ring import blocks_of, sequences_of
from ssd.retrieval.segment import SEPARATOR, open_segment
from ssd.text.codec import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """One segment; ``error`` is None when its file is there and every checksum matches."""

    id: str
    num_tokens: int
    num_bytes: int
    is_static: bool
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryReport:
    """A directory; token counts are of text, without what ends sequences."""

    path: Path
    manifest: Manifest
    segments: tuple[SegmentReport, ...]

    @property
    def is_intact(self) -> bool:
        """True when no segment is damaged or missing."""
        return all(segment.error is None for segment in self.segments)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "path": str(self.path),
            "namespace": self.manifest.namespace,
            "fingerprint": self.manifest.fingerprint,
            "generation": self.manifest.generation,
            "num_tokens": sum(segment.num_tokens for segment in self.segments),
            "num_bytes": sum(segment.num_bytes for segment in self.segments),
            "is_intact": self.is_intact,
            "segments": [asdict(segment) for segment in self.segments],
        }

    def as_text(self) -> str:
        """For people."""
        totals = self.as_json()
        lines = [
            f"{self.path}",
            f"  namespace    {plain(self.manifest.namespace)}",
            f"  tokenizer    {plain(self.manifest.fingerprint)}",
            f"  generation   {self.manifest.generation}",
            f"  tokens       {totals['num_tokens']:,}",
            f"  bytes        {totals['num_bytes']:,}",
            f"  segments     {len(self.segments)}",
        ]
        for segment in self.segments:
            state = "checksums ok" if segment.error is None else f"DAMAGED: {segment.error}"
            lines.append(f"    {segment.id:40}{segment.num_tokens:>14,} tokens   {state}")
        return "\n".join(lines)


def inspect_directory(path: Path) -> DirectoryReport:
    """Read all of a directory and check it. Changes nothing. Raises SegmentCorrupt, FormatVersion, StoreUnavailable."""
    manifest = manifest_of(path)
    return DirectoryReport(
        path=path,
        manifest=manifest,
        segments=tuple(_inspect_segment(path, entry, manifest.fingerprint) for entry in manifest.segments),
    )


def _inspect_segment(path: Path, entry: dict[str, Any], fingerprint: str) -> SegmentReport:
    segment_id = str(entry["id"])
    assert is_segment_id(segment_id)  # read_manifest checked it
    file = path / f"{segment_id}.seg"
    num_tokens, num_bytes, error = 0, 0, None
    try:
        num_bytes = file.stat().st_size
        segment = open_segment(file, fingerprint=fingerprint)
        num_tokens = sum(int(np.count_nonzero(block != SEPARATOR)) for block in blocks_of(segment))
    except FileNotFoundError:
        error = f"{file} is missing"
    except (CacheError, OSError) as failure:
        error = str(failure)
    return SegmentReport(
        id=segment_id,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        is_static=entry.get("start") is None,
        error=error,
    )


def _print_sequences(path: Path, codec: TextCodec | None) -> None:
    """Every sequence in order as one JSON line: its ids, or with ``codec`` its text, which may give other ids again."""
    (cache,) = open_held([path])
    if codec is not None and codec.fingerprint != cache.fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {cache.fingerprint}, this one is {codec.fingerprint}: its token ids mean "
            "other text. Give the tokenizer it was made with"
        )
    for sequence in sequences_of(cache.segments):
        ids = sequence.tolist()
        record = {"token_ids": ids} if codec is None else {"text": codec.decode(ids)}
        sys.stdout.buffer.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    sys.stdout.buffer.flush()


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    one = command.add_mutually_exclusive_group()
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument(
        "--sequences", action="store_true", help="print what it holds, a JSON line a sequence, which build reads"
    )
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="with --sequences: print text, not ids")


def run(options: argparse.Namespace) -> int:
    if options.sequences:
        try:
            _print_sequences(options.directory, codec_of(options))
        except BrokenPipeError:  # who read it has read enough; what is left must not be written at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    report = inspect_directory(options.directory)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text())
    return 0 if report.is_intact else 1
