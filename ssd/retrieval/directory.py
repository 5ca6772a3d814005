"""A directory of segment files: one writer, a manifest that says which files count.

::

    manifest.json        the segments of one generation; replaced atomically, after the files it names exist
    learned.bin          what drafting learned beside the text (``Companion``); replaced atomically, may be removed
    <segment id>.seg     segment files, never changed
    writer.lock          held by the writing process (flock), freed by the kernel however the process ends
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ssd.errors import CacheError, CacheLocked, FormatVersion, SegmentCorrupt, TokenizerMismatch
from ssd.retrieval.names import is_segment_id
from ssd.retrieval.segment_file import open_segment, sync_directory, write_file, write_segment
from ssd.retrieval.snapshot import Segment

MANIFEST_NAME = "manifest.json"
LEARNED_NAME = "learned.bin"
LOCK_NAME = "writer.lock"
MANIFEST_FORMAT = 1
_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Which segments make up one generation of a directory.

    ``next_position`` : the first ring position nothing was ever stored at.
    ``segment_ids`` : static ones first, then those of the ring, oldest first.
    """

    fingerprint: str
    namespace: str
    generation: int = 0
    next_position: int = 0
    segment_ids: tuple[str, ...] = ()
    segments: tuple[dict[str, Any], ...] = field(default=(), compare=False)
    """For people and tools: id, num_tokens, start (None when static) of each segment."""
    shared: Mapping[str, Any] | None = field(default=None, compare=False)
    """JSON that ``SuffixCache`` keeps here about where the text came from; true of exactly these segments."""


_MOST_LEARNED_BYTES = 1 << 26


def read_manifest(path: Path, *, fingerprint: str) -> Manifest | None:
    """The manifest of directory ``path``, None when there is none.

    Raises SegmentCorrupt, FormatVersion, TokenizerMismatch, and OSError when it cannot be read.
    """
    manifest_path = path / MANIFEST_NAME
    try:
        with manifest_path.open("rb") as file:
            text = file.read(_MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    try:
        outer = json.loads(text)
        content = outer["manifest"]
        if outer["format"] != MANIFEST_FORMAT:
            raise FormatVersion(
                f"{manifest_path} has format {outer['format']!r}, this version reads {MANIFEST_FORMAT}. "
                "Delete the directory and build it again, or use the version of ssd that wrote it"
            )
        if outer["xxh3"] != _digest(content):
            raise ValueError("its checksum does not match")
        segments = tuple(content["segments"])
        manifest = Manifest(
            fingerprint=content["fingerprint"],
            namespace=content["namespace"],
            generation=content["generation"],
            next_position=content["next_position"],
            segment_ids=tuple(segment["id"] for segment in segments),
            segments=segments,
            shared=content.get("shared"),
        )
        if not all(map(is_segment_id, manifest.segment_ids)):
            raise ValueError("it names a segment that no file can have")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SegmentCorrupt(
            f"{manifest_path} is damaged ({error}). Restore it from a copy, "
            f"or delete the directory {path} to start empty"
        ) from None
    if manifest.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {manifest.fingerprint}, this one is {fingerprint}: its token ids "
            "mean other text. Use another directory, or the tokenizer it was made with"
        )
    return manifest


def _digest(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


class DirectoryLock:
    """The right to write a directory, held by one process; the kernel takes it back however that ends."""

    def __init__(self, path: Path) -> None:
        """Raises CacheLocked at once when another holds it, and OSError."""
        self._path = path
        self._descriptor: int | None = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CacheLocked(
                f"{path} is being written by another process. Stop that one, or give this one a directory of its own "
                "(several servers share what they learn through Redis, not through a directory)"
            ) from None
        except OSError:
            self.close()
            raise

    def check(self) -> None:
        """Raises OSError when the directory was removed or replaced: whoever made it anew may be its writer now."""
        with contextlib.suppress(FileNotFoundError):
            there = (self._path / LOCK_NAME).stat()
            if self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), there):
                return
        raise OSError(
            errno.ESTALE,
            "the directory was removed or replaced while in use and belongs to whoever made it anew. "
            "Start again to write it; a server goes on from memory until then",
            str(self._path),
        )

    def close(self) -> None:
        """Give it back; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SegmentDirectory:
    """The writer's side of a directory. Not thread-safe; ``write`` may run beside other calls."""

    def __init__(self, path: Path, *, fingerprint: str, namespace: str, durable: bool = True) -> None:
        """Open or create ``path`` as its writer and remove files no manifest names.

        ``durable`` : files are synced and a manifest is kept; without, the directory is scratch space of this process.
        Raises CacheLocked, SegmentCorrupt, FormatVersion, TokenizerMismatch, or OSError.
        """
        self.path = path
        self.durable = durable
        self._fingerprint = fingerprint
        self._namespace = namespace
        path.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(path)
        try:
            manifest = read_manifest(path, fingerprint=fingerprint)
            if manifest is None and durable:
                self._sync_parents()
            self.manifest = manifest or Manifest(fingerprint=fingerprint, namespace=namespace)
            self._files = set(self.manifest.segment_ids)  # segments that have a file of ours
            self._has_unsynced_names = False
            self._remove_orphans()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop being the writer. Mapped segments stay valid."""
        self._lock.close()

    def path_of(self, segment_id: str) -> Path:
        """Where the segment's file lies."""
        assert is_segment_id(segment_id)
        return self.path / f"{segment_id}.seg"

    def has_file(self, segment_id: str) -> bool:
        """Whether the segment was written here."""
        return segment_id in self._files

    def load(self) -> tuple[list[Segment], list[CacheError | OSError]]:
        """The manifest's segments, in order, and why those left out could not be used: damaged, foreign or missing.

        What may be whole but cannot be read now or by this version must not be left out, for the next ``commit``
        removes the files of what is: then this is closed, and raises FormatVersion or OSError.
        """
        segments, failures = load_segments(self.path, self.manifest)
        for failure in failures:
            if isinstance(failure, FormatVersion | OSError) and not isinstance(failure, FileNotFoundError):
                self.close()
                raise failure
        return segments, failures

    def write(self, segment: Segment) -> Segment:
        """Write a segment's file; returns the segment mapped from it. It counts after ``commit``.

        Raises CacheError, OSError; then there is no file.
        """
        self._lock.check()
        path = self.path_of(segment.segment_id)
        # Its bytes are synced here, its name by ``commit``, once for all new names: until a manifest names the file it
        # may be lost or torn.
        write_segment(path, segment, fingerprint=self._fingerprint, namespace=self._namespace, durable=self.durable)
        return self.adopt(segment.segment_id)

    def adopt(self, segment_id: str) -> Segment:
        """Map a segment that was written into the directory. It counts after ``commit``.

        Raises CacheError, OSError; then the file is removed.
        """
        path = self.path_of(segment_id)
        try:
            segment = open_segment(path, fingerprint=self._fingerprint)
        except (CacheError, OSError):
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self._files.add(segment_id)
        self._has_unsynced_names = True
        return segment

    def commit(
        self, segments: Sequence[Segment], *, next_position: int, shared: Mapping[str, Any] | None = None
    ) -> None:
        """Make ``segments`` the content of the directory and remove the files of all others. Raises OSError.

        Segments that have no file (they could not be written) are left out. O(number of segments).

        The order is what a power failure cannot break: the files' bytes, their names, the manifest's bytes, its name,
        each on disk before the next; then the other files go.
        """
        self._lock.check()
        kept = [segment for segment in segments if segment.segment_id in self._files]
        entries = tuple({"id": s.segment_id, "num_tokens": len(s), "start": s.start} for s in kept)
        self.manifest = Manifest(
            fingerprint=self._fingerprint,
            namespace=self._namespace,
            generation=self.manifest.generation + 1,
            next_position=next_position,
            segment_ids=tuple(segment.segment_id for segment in kept),
            segments=entries,
            shared=shared,
        )
        if self.durable:
            if self._has_unsynced_names:
                sync_directory(self.path)
                self._has_unsynced_names = False
            self._write_manifest()
        for segment_id in self._files - set(self.manifest.segment_ids):
            self.path_of(segment_id).unlink(missing_ok=True)
            self._files.discard(segment_id)

    def read_learned(self) -> bytes | None:
        """What ``write_learned`` kept; None when nothing was. Raises OSError."""
        try:
            path = self.path / LEARNED_NAME
            return path.read_bytes() if path.stat().st_size <= _MOST_LEARNED_BYTES else None
        except FileNotFoundError:
            return None

    def write_learned(self, learned: bytes) -> None:
        """Replace it. Raises OSError; then the old one stays."""
        self._lock.check()
        write_file(self.path / LEARNED_NAME, [learned], durable=True)

    def _write_manifest(self) -> None:
        content: dict[str, Any] = {
            "fingerprint": self.manifest.fingerprint,
            "namespace": self.manifest.namespace,
            "generation": self.manifest.generation,
            "next_position": self.manifest.next_position,
            "segments": list(self.manifest.segments),
        }
        if self.manifest.shared is not None:
            content["shared"] = self.manifest.shared
        outer = {"format": MANIFEST_FORMAT, "manifest": content, "xxh3": _digest(content)}
        write_file(self.path / MANIFEST_NAME, [json.dumps(outer, indent=1).encode()], durable=True)
        sync_directory(self.path)

    def _sync_parents(self) -> None:
        """A new directory must not be lost with all that will be synced in it. Once in its life, while it is empty."""
        for parent in self.path.resolve().parents:
            with contextlib.suppress(OSError):  # not ours to read
                sync_directory(parent)

    def _remove_orphans(self) -> None:
        """Only while opening: later, a merge that is still being written has a file no manifest names."""
        kept = {f"{segment_id}.seg" for segment_id in self._files}
        for path in list(self.path.iterdir()):
            if (path.suffix == ".seg" and path.name not in kept) or path.suffix == ".tmp":
                path.unlink(missing_ok=True)


def load_segments(path: Path, manifest: Manifest) -> tuple[list[Segment], list[CacheError | OSError]]:
    """Map the segments ``manifest`` names in directory ``path``, in order; and why those left out could not be used."""
    segments: list[Segment] = []
    failures: list[CacheError | OSError] = []
    for segment_id in manifest.segment_ids:
        try:
            segment = open_segment(path / f"{segment_id}.seg", fingerprint=manifest.fingerprint)
            if segment.segment_id != segment_id:
                raise SegmentCorrupt(
                    f"{path / segment_id}.seg holds segment {segment.segment_id}: restore it from a copy"
                )
            segments.append(segment)
        except (CacheError, OSError) as error:
            failures.append(error)
    return segments, failures
