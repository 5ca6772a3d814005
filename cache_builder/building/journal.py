"""What is finished of a block: a line for every segment, so that who begins it again goes on behind them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cache_builder.building.counts import BuildResult
from ssd.errors import CacheError
from ssd.retrieval.names import is_segment_id
from ssd.retrieval.segment_file import open_segment

_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Finished:
    """A segment, and how far the block was read when it was written.

    ``segment_id`` : None at the end of a block that had nothing left. ``num_tokens`` : with separators. ``num_read`` :
    records of the block read for it and those before it; -1 where one record goes on in the next segment. ``counts`` :
    of this segment alone.
    """

    segment_id: str | None
    num_tokens: int
    num_read: int
    is_last: bool
    counts: BuildResult

    def to_line(self) -> bytes:
        """Closed by its own checksum: a line that was cut is none."""
        content = json.dumps(
            [self.segment_id, self.num_tokens, self.num_read, self.is_last, self.counts.to_json()]
        ).encode()
        return b"%016x " % xxhash.xxh3_64_intdigest(content) + content + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Finished | None:
        """Undo ``to_line``; None for anything else."""
        digest, _, content = line.rstrip(b"\n").partition(b" ")
        if digest != b"%016x" % xxhash.xxh3_64_intdigest(content):
            return None
        try:
            segment_id, num_tokens, num_read, is_last, counts = json.loads(content)
            entry = cls(segment_id, int(num_tokens), int(num_read), bool(is_last), BuildResult.from_json(counts))
        except (ValueError, TypeError):
            return None
        return entry if segment_id is None or is_segment_id(segment_id) else None


class Journal:
    """The file of one block. Whoever builds the block is its only writer, or one of several that write the same.

    That happens where a worker is given up that still runs: the same segments have the same names, and count once.
    """

    def __init__(self, directory: Path, key: str) -> None:
        """``directory`` : of all journals; there already."""
        self._path = directory / key

    def read(self) -> list[Finished]:
        """What was written, up to the first line that is damaged."""
        try:
            with self._path.open("rb") as file:
                lines = file.read(_MOST_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found: dict[str | None, Finished] = {}
        for line in lines:
            entry = Finished.from_line(line)
            if entry is None:
                break
            found.setdefault(entry.segment_id, entry)
        return list(found.values())

    def begin(self, entries: list[Finished]) -> None:
        """Keep ``entries`` alone. Raises OSError."""
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(b"".join(entry.to_line() for entry in entries))
        temporary.replace(self._path)

    def append(self, entry: Finished) -> None:
        """Write one more, whose segment is on disk. Raises OSError."""
        with self._path.open("ab") as file:
            file.write(entry.to_line())
            file.flush()
            os.fsync(file.fileno())


def usable(entries: list[Finished], segments: Path, *, fingerprint: str, namespace: str) -> list[Finished]:
    """The first of ``entries`` whose segment files are whole, up to one behind which a record begins. O(tokens)."""
    found: list[Finished] = []
    for entry in _intact(entries, segments, fingerprint, namespace):
        found.append(entry)
    while found and found[-1].num_read < 0:
        found.pop()
    return found


def _intact(entries: list[Finished], segments: Path, fingerprint: str, namespace: str) -> Iterator[Finished]:
    for entry in entries:
        if entry.segment_id is not None:
            path = segments / f"{entry.segment_id}.seg"
            try:
                segment = open_segment(path, fingerprint=fingerprint, namespace=namespace)
            except (CacheError, OSError):
                return
            if len(segment) != entry.num_tokens:
                return
        yield entry
