"""What is finished of a cache that is being made: a build that was killed goes on from there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import xxhash

from ssd.errors import CacheError, CacheLocked, ConfigError
from ssd.retrieval.files import LOCK_NAME, MANIFEST_NAME, DirectoryLock, is_segment_id, make_directory
from ssd.retrieval.segment import open_segment
from ssd.retrieval.static import DEFAULT_SEGMENT_TOKENS, StaticWriter

_SUFFIX = ".unfinished"
_OLD = "old"


def unfinished_directory(out: Path) -> Path:
    """Where a build of ``out`` works: beside it."""
    return out.parent / f".{out.name}{_SUFFIX}"


@contextmanager
def working_directory(out: Path, *, fresh: bool, goes_on: bool = True) -> Iterator[Path]:
    """The directory, with ``new`` and ``journal`` in it; removed at the end, unless an error comes after a segment.

    ``fresh`` : nothing of an earlier build is kept. ``goes_on`` : whether another could go on with what an error
    leaves; else nothing is left. Raises CacheLocked where another process is at work, OSError.
    """
    path = unfinished_directory(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    make_directory(path)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheLocked(f"another process builds {out} now: wait for it, or give another --out") from None
        if (path / _OLD).exists() and not out.exists():  # it ended between two renames
            (path / _OLD).rename(out)
        for child in path.iterdir():
            if fresh or child.name not in ("new", "journal"):
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        for name in ("new", "journal"):
            make_directory(path / name)
        try:
            yield path
        except BaseException:
            if not goes_on or not _has_finished(path):
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def replace_directory(out: Path, working: Path) -> None:
    """Put ``new`` of ``working`` in the place of ``out``; raises CacheLocked where a server writes that."""
    with closing(DirectoryLock(out)) if out.exists() else nullcontext():
        if out.exists():
            out.rename(working / _OLD)
        (working / "new").rename(out)


def _has_finished(path: Path) -> bool:
    """Whether any segment was written."""
    return next((path / "new").glob("*.seg"), None) is not None


@contextmanager
def new_cache(
    out: Path, *, fingerprint: str, namespace: str, force: bool, segment_tokens: int = DEFAULT_SEGMENT_TOKENS
) -> Iterator[StaticWriter]:
    """A writer of what becomes the cache ``out`` when the block ends without an exception.

    ``force`` : a cache that is there already is replaced; it may be read meanwhile, but no server may write it.
    ``segment_tokens`` : size of a segment. Raises ConfigError, CacheError, OSError; then ``out`` is as it was before.
    """
    check_new(out, force=force)
    with working_directory(out, fresh=True, goes_on=False) as working:
        with StaticWriter(
            working / "new", fingerprint=fingerprint, namespace=namespace, segment_tokens=segment_tokens
        ) as writer:
            yield writer
        replace_directory(out, working)


def check_new(out: Path, *, force: bool) -> None:
    """Raises ConfigError, or CacheLocked, where ``out`` is not to be written. ``force`` : a cache there is replaced."""
    if check_out(out, force=force, hint="--force replaces it, or give another directory with --out"):
        DirectoryLock(out).close()


def check_out(out: Path, *, force: bool, hint: str) -> bool:
    """Whether a cache is there. Raises ConfigError where ``out`` is something else, or without ``force`` a cache.

    ``hint`` : what to do about a cache.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: give a directory with --out")
    if (out / MANIFEST_NAME).exists():
        if not force:
            raise ConfigError(f"{out} holds a cache already: {hint}")
        return True
    if out.exists() and any(path.name != LOCK_NAME for path in out.iterdir()):
        raise ConfigError(f"{out} is not empty and holds no cache: give another directory with --out")
    return False


@dataclass(slots=True)
class BuildResult:
    """What went into the directory. Tokens are without separators."""

    num_records: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_skipped_prompt_tokens: int = 0
    """Prompt tokens not stored, because an earlier sequence of the segment begins with the same blocks."""
    num_stored_sequences: int = 0
    """Sequences that were in the cache that is added to already, and not stored again."""
    num_invalid: int = 0
    """Lines left out by ``skip_invalid``."""
    num_without_prompt: int = 0
    """Records of which only the answer is known."""
    num_without_answer: int = 0
    """Records of calls that say no answer: nothing of them is stored."""
    num_segments: int = 0
    num_reused_tokens: int = 0
    """Of segments that an earlier build which did not end had finished."""

    def add(self, other: BuildResult) -> None:
        """Count what ``other`` counted as well."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def to_json(self) -> dict[str, int]:
        """For a journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Undo ``to_json``; raises ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        if (
            not isinstance(content, dict)
            or content.keys() != names
            or any(type(n) is not int for n in content.values())
        ):
            raise ValueError("these are no counts")
        return cls(**content)


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
