"""A directory of segment files with one writing process, and a manifest that lists the valid files.

::

    manifest.json            the segments of one generation; replaced atomically, after the files it names exist
    manifest-previous.json   the manifest before; with it and the segments' headers, a lost or damaged one is rebuilt
    manifest-damaged.json    a damaged manifest, which was renamed to this when it was rebuilt
    learned.bin              the learned state of drafters (``LearnedState``); replaced atomically, may be removed
    <segment id>.seg         segment files, never modified; damaged ones stay, and are logged, until someone removes
                             them
    writer.lock              locked by the writing process (flock), as is the directory; the lock ends with the process

Other files in the directory are not touched. A file with one of these names is used only if this program wrote it:
links are ignored, and so are segments whose header has another tokenizer or namespace.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ssd.errors import CacheError, CacheLocked, FormatVersion, SegmentCorrupt, StoreUnavailable
from ssd.retrieval.cache_state import Checkpoint, PublishedState
from ssd.retrieval.files import (
    DAMAGED_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PREVIOUS_NAME,
    DirectoryLock,
    Manifest,
    Owner,
    is_regular,
    is_segment_id,
    is_temporary,
    make_directory,
    open_file,
    read_manifest,
    sync_directory,
    write_file,
    write_manifest,
)
from ssd.retrieval.segment import HEADER_LENGTH, Segment, SegmentHeader, open_segment, write_segment

log = logging.getLogger(__name__)

LEARNED_NAME: Final = "learned.bin"
PART_NAMES: Final = frozenset((MANIFEST_NAME, PREVIOUS_NAME, DAMAGED_NAME, LEARNED_NAME, LOCK_NAME))
"""The names of a cache directory's files other than segments."""
LEFT_OUT_SUFFIX: Final = ".left-out"
"""The file name suffix with which former versions marked segment files that were not in the manifest."""

_MAX_LEARNED_BYTES: Final = 1 << 26

RETRY_S: Final = 30.0
"""The interval in seconds at which failed writes of a cache directory are retried. A flush of new text retries them
too.
"""
SAVE_LEARNED_S: Final = 60.0

MAX_READS: Final = 5
"""The maximum number of attempts to read a cache directory while the server that owns it replaces files."""


def read_learned(path: Path) -> bytes | None:
    """Return the serialized acceptance model stored in a cache directory; None if there is none. Raises OSError."""
    try:
        with open_file(path / LEARNED_NAME) as file:
            return file.read(_MAX_LEARNED_BYTES)
    except FileNotFoundError:
        return None


def is_segment_file(name: str) -> bool:
    return name.endswith(".seg") and is_segment_id(name.removesuffix(".seg"))


class SegmentDirectory:
    """A directory of segment files which this process has the exclusive right to write.

    Not thread-safe, except that ``write`` may run concurrently with other calls.
    """

    def __init__(self, path: Path, *, fingerprint: str, namespace: str, owner: Owner | None = None) -> None:
        """Open or create a cache directory for writing, and remove segment files that the manifest does not name.

        ``owner`` is written to the manifest.

        Raises:
            CacheLocked: Another process writes the directory.
            FormatVersion: A newer version wrote the manifest.
            TokenizerMismatch, NamespaceMismatch: The manifest belongs to another tokenizer or namespace.
            OSError: The directory cannot be read or written.
        """
        self.path = path
        self.damage: CacheError | None = None
        """The error that made it necessary to rebuild the manifest; None if the manifest was intact."""
        self.unusable: tuple[dict[str, Any], ...] = ()
        """The manifest's entries of segment files that cannot be used. The entries stay until someone removes the
        files.
        """
        self._identity: dict[str, str] = {"fingerprint": fingerprint, "namespace": namespace}
        make_directory(path)
        self._lock = DirectoryLock(path)
        try:
            self._has_unsynced_names = False
            try:
                self._written = read_manifest(path, **self._identity)
                if self._written is None and any(map(self._is_ours, path.iterdir())):
                    raise SegmentCorrupt(f"{path} has segment files, but no {MANIFEST_NAME}")
            except SegmentCorrupt as damage:
                self._written, self.damage = None, damage
            self._stamp = self._manifest_stamp()
            self.manifest = self._written or Manifest(fingerprint=fingerprint, namespace=namespace)
            if self.damage is not None:
                self._recover()
            elif self._written is None:
                self._initialize()
            else:
                self._remove_orphans()
            self.manifest = replace(self.manifest, owner=owner or self.manifest.owner)
            self._files = set(self.manifest.segment_ids)  # ids of the segments that have a file here
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the right to write the directory. Loaded segments stay valid."""
        self._lock.close()

    def path_of(self, segment_id: str) -> Path:
        assert is_segment_id(segment_id)
        return self.path / f"{segment_id}.seg"

    def has_file(self, segment_id: str) -> bool:
        return segment_id in self._files

    def load(self) -> tuple[list[Segment], list[CacheError | OSError]]:
        """Load the segments that the manifest names, and return them in order, with the errors of unreadable segments.

        If a segment file may be intact but cannot be read at the moment or by this version, the directory is closed and
        the error, OSError or FormatVersion, is raised.
        """
        segments, failures = load_segments(self.path, self.manifest, namespace=self._identity["namespace"])
        used = {segment.segment_id for segment in segments}
        self.unusable = tuple(
            entry
            for entry in self.manifest.segments
            if entry["id"] not in used and os.path.lexists(self.path_of(entry["id"]))
        )
        for failure in failures:
            if isinstance(failure, FormatVersion | OSError) and not isinstance(failure, FileNotFoundError):
                self.close()
                raise failure
        return segments, failures

    def write(self, segment: Segment) -> Segment:
        """Write a segment to a file, read it back, and return the segment that was read.

        The file belongs to the cache only after the next ``commit``. After CacheError or OSError, no file was written.
        """
        # The file's bytes are synced here. ``commit`` syncs all new names at once, because a file may be lost or torn
        # until a manifest names it.
        path = self.path_of(segment.segment_id)
        write_segment(path, segment, **self._identity)
        try:
            written = open_segment(path, **self._identity)
        except (CacheError, OSError, MemoryError):
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self._files.add(segment.segment_id)
        self._has_unsynced_names = True
        return written

    def commit(
        self, segments: Sequence[Segment], *, next_position: int, shared: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the directory's manifest by one that lists ``segments``, and remove the files of other segments.

        Segments that have no file, because writing it failed, are not listed. Files that cannot be used stay. A power
        failure at any time leaves a valid directory: the segments' bytes and file names reach the disk before the
        manifest, and other files are removed last.

        Raises:
            CacheLocked: Another process writes the directory.
            CacheError: The manifest is of another version or namespace.
            OSError: The files cannot be written.
        """
        self._lock.renew()
        self._check_manifest()
        durable = [segment for segment in segments if segment.segment_id in self._files]
        entries = [{"id": s.segment_id, "num_tokens": len(s), "start": s.start} for s in durable]
        self.manifest = replace(
            self.manifest,
            generation=self.manifest.generation + 1,
            next_position=next_position,
            segments=tuple(sorted([*entries, *self.unusable], key=_sort_key)),
            shared=shared,
        )
        if self._has_unsynced_names:
            sync_directory(self.path)
            self._has_unsynced_names = False
        self._link_previous()
        write_manifest(self.path, self.manifest)
        self._written, self._stamp = self.manifest, self._manifest_stamp()
        for segment_id in self._files - set(self.manifest.segment_ids):
            self._remove(self.path_of(segment_id))
            self._files.discard(segment_id)

    def write_learned(self, learned: bytes) -> None:
        """Replace the serialized acceptance model in the directory. If this raises OSError, the old model stays."""
        write_file(self.path / LEARNED_NAME, [learned], durable=True)

    def _initialize(self) -> None:
        """Write the first manifest of a new directory, so that a missing manifest always means that it was lost."""
        # Otherwise a power failure could lose the new directory with all files that are synced in it later.
        for parent in self.path.resolve().parents:
            with contextlib.suppress(OSError):  # a parent that cannot be read
                sync_directory(parent)
        write_manifest(self.path, self.manifest)
        self._written, self._stamp = self.manifest, self._manifest_stamp()

    def _recover(self) -> None:
        """Rebuild a lost manifest from the segments' headers and the replication position in the previous manifest.

        Nothing is removed or written before the next ``commit``. If a merge was interrupted, there may be files of both
        its inputs and its result, which contain the same text; the manifest then names only one of the two.
        """
        previous = self.manifest
        with contextlib.suppress(CacheError, OSError):
            previous = read_manifest(self.path, name=PREVIOUS_NAME, **self._identity) or previous
        named = {entry["id"]: entry for entry in previous.segments}
        entries = []
        for file in self.path.iterdir():
            if is_segment_file(file.name) and is_regular(file):
                segment_id = file.name.removesuffix(".seg")
                try:
                    header = self._header_of(file)
                except CacheError:  # a damaged file stays listed if the previous manifest named it
                    entries += [named[segment_id]] if segment_id in named else []
                    continue
                if header is not None and header.segment_id == segment_id:
                    entries.append({"id": segment_id, "num_tokens": header.num_tokens, "start": header.start})
        found, stop = list[dict[str, Any]](), 0
        for entry in sorted(entries, key=_sort_key):
            start, shortest = _sort_key(entry)
            if start < 0 or start >= stop:
                found.append(entry)
                stop = max(stop, start - shortest)
        self.manifest = replace(previous, next_position=max(previous.next_position, stop), segments=tuple(found))
        with contextlib.suppress(OSError):  # ``commit`` replaces it, or reports an outage
            (self.path / MANIFEST_NAME).replace(self.path / DAMAGED_NAME)

    def _check_manifest(self) -> None:
        """Raise CacheError if another process has replaced the manifest that this process wrote last.

        A missing, damaged or older manifest is accepted, because the next commit replaces it.
        """
        if self._manifest_stamp() == self._stamp:
            return
        try:
            there = read_manifest(self.path, **self._identity)
        except SegmentCorrupt:
            return
        if there is None or there == self._written:
            return
        if self._written is None or there.generation >= self._written.generation:
            raise CacheLocked(f"{self.path / MANIFEST_NAME} was written by another process and is not replaced")

    def _manifest_stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = (self.path / MANIFEST_NAME).stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _link_previous(self) -> None:
        if self._written is not None:
            link = self.path / f"{PREVIOUS_NAME}.{os.getpid()}.tmp"
            with contextlib.suppress(OSError):
                link.unlink(missing_ok=True)
                os.link(self.path / MANIFEST_NAME, link)
                link.replace(self.path / PREVIOUS_NAME)

    def _remove_orphans(self) -> None:
        """Remove segment files that the manifest does not name.

        Call it only while opening the directory: later, a merge may have written a file that the next manifest names.
        """
        named = {f"{segment_id}.seg" for segment_id in self.manifest.segment_ids}
        for file in list(self.path.iterdir()):
            if is_temporary(file):
                file.unlink(missing_ok=True)
            elif file.name not in named:
                self._remove(file)

    def _remove(self, file: Path) -> None:
        if self._is_ours(file):
            file.unlink(missing_ok=True)

    def _is_ours(self, file: Path) -> bool:
        if not is_segment_file(file.name) or not is_regular(file):
            return False
        try:
            return self._header_of(file) is not None
        except CacheError:
            return False

    def _header_of(self, file: Path) -> SegmentHeader | None:
        """Return a segment file's header; None if it has another tokenizer or namespace, or was just removed."""
        try:
            with open_file(file) as content:
                header = SegmentHeader.from_bytes(file, content.read(HEADER_LENGTH))
        except FileNotFoundError:
            return None
        return header if {"fingerprint": header.fingerprint, "namespace": header.namespace} == self._identity else None


def _sort_key(entry: Mapping[str, Any]) -> tuple[int, int]:
    start, num_tokens = entry.get("start"), entry.get("num_tokens")
    return (start, -num_tokens) if type(start) is type(num_tokens) is int else (-1, 0)


def is_cache_file(path: Path) -> bool:
    """Return whether a file name is one that a cache directory uses."""
    is_segment = is_segment_file(path.name.removesuffix(LEFT_OUT_SUFFIX))
    return is_segment or path.name in PART_NAMES or is_temporary(path)


def remove_directory(path: Path) -> None:
    """Remove the files of a namespace from its directory, and then the directory if it is empty.

    Files are selected by name, because damaged files contain text as well. Raises CacheLocked if another process writes
    the directory, and OSError.
    """
    if not path.is_dir() or path.is_symlink():
        return
    lock = DirectoryLock(path)
    try:
        for file in sorted(path.iterdir(), key=lambda file: file.name != MANIFEST_NAME):
            if is_cache_file(file) and (file.is_symlink() or not file.is_dir()):
                file.unlink(missing_ok=True)
    finally:
        lock.close()
    with contextlib.suppress(OSError):  # it has files that are not ours
        path.rmdir()
    sync_directory(path.parent)


def load_segments(
    path: Path, manifest: Manifest, *, namespace: str | None = None
) -> tuple[list[Segment], list[CacheError | OSError]]:
    """Load the segments that a manifest names from a cache directory.

    ``namespace`` is the namespace that the segments must have; None accepts any. Returns the usable segments in order,
    and the errors of the segments that cannot be used.
    """
    segments: list[Segment] = []
    failures: list[CacheError | OSError] = []
    ring_stop = 0
    for segment_id in manifest.segment_ids:
        file = path / f"{segment_id}.seg"
        try:
            segment = open_segment(file, fingerprint=manifest.fingerprint, namespace=namespace)
            if segment.segment_id != segment_id:
                raise SegmentCorrupt(f"{file} contains another segment, {segment.segment_id}: restore it from a copy")
            if segment.start is not None:
                stop = segment.start + len(segment)
                if segment.start < ring_stop or stop > manifest.next_position:
                    raise SegmentCorrupt(
                        f"{file} overlaps other segments or exceeds the manifest: restore the file or the manifest"
                    )
                ring_stop = stop
            segments.append(segment)
        except (CacheError, OSError) as error:
            failures.append(error)
    return segments, failures


def load_all_segments(path: Path, manifest: Manifest) -> list[Segment]:
    """Load all segments of a cache directory, even if its server replaces ``manifest`` by a newer one meanwhile.

    Raises StoreUnavailable, a CacheError, if a segment cannot be read.
    """
    for _ in range(MAX_READS):
        segments, failures = load_segments(path, manifest)
        if not failures:
            return segments
        newer = None
        with contextlib.suppress(OSError):
            newer = read_manifest(path, fingerprint=manifest.fingerprint, namespace=manifest.namespace)
        if newer is None or newer == manifest:
            break
        del segments  # there may not be enough memory for two copies
        manifest = newer
    if isinstance(failures[0], CacheError):
        raise failures[0]
    raise StoreUnavailable(f"{path} is incomplete: {failures[0]}. Copy or build it again") from failures[0]


class DurableSegments:
    """Writes the segments of one namespace to files, and retries failed writes. Not thread-safe.

    Segments that cannot be written are searched nevertheless, and writing them is retried. An outage, which is logged
    once, begins with the first failed write and ends when everything is in files again. It does not end with the first
    successful write, because small files can be written to a nearly full disk.
    """

    def __init__(
        self, name: str, directory: SegmentDirectory, report_failure: Callable[[str, BaseException], None]
    ) -> None:
        """Read the manifest and the learned model of a cache directory, but not its segments, which ``load`` reads."""
        self._name = name
        self._directory = directory
        self._report_failure = report_failure
        self.next_position = directory.manifest.next_position
        self.checkpoint = Checkpoint.from_json(directory.manifest.shared)
        self.learned: bytes | None = None
        """The serialized acceptance model that an earlier process saved; None if there is none."""
        try:
            self.learned = read_learned(directory.path)
        except OSError as error:
            report_failure("the learned state of drafters was not read, so drafters learn it again", error)
        self.num_failures = 0
        self._committed: tuple[tuple[Segment, ...], Checkpoint | None] = (), self.checkpoint
        self._is_outage = False
        self.gaps: Sequence[int] = ()
        """The ring-buffer positions of segment files that cannot be used. The segments before and after such a position
        are not merged into one, so that the file fits between them if it is restored.
        """
        if directory.damage is not None:
            report_failure("the manifest was rebuilt from the segments", directory.damage)
        self._saved_copy: PublishedState | None = None
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S

    def load(self) -> list[Segment]:
        """Read the usable segments. This object keeps no reference to them, so that merged segments can be freed.

        Raises FormatVersion and OSError for files that cannot be read at the moment.
        """
        segments, failures = self._directory.load()
        for failure in failures:
            self._report_failure("a segment was skipped, its file stays", failure)
        left_out, named = self._directory.unusable, self._directory.manifest.segments
        if self._directory.damage is None and len(segments) + len(left_out) == len(named):
            self._committed = tuple(segments), self.checkpoint
        self.gaps = sorted(_sort_key(entry)[0] for entry in left_out)
        return segments

    def has(self, segment: Segment) -> bool:
        return self._directory.has_file(segment.segment_id)

    def write(self, segment: Segment) -> Segment:
        """Write a segment's file and return the segment read from it; return ``segment`` itself if writing failed."""
        try:
            return self._directory.write(segment)
        except (OSError, CacheError) as error:
            self._report_outage("a segment stays in memory", error)
            return segment

    def commit(
        self, segments: tuple[Segment, ...], next_position: int, checkpoint: Checkpoint | None, *, is_whole: bool
    ) -> None:
        """Write a manifest that lists those of the ``segments`` that have files. A failure is logged and not raised.

        An outage, the time since the first failed write, ends with this call if all ``segments`` have files and
        ``is_whole`` is True. ``is_whole`` must be False while a failed merge has to be retried.
        """
        files = tuple(filter(self.has, segments))
        if (files, checkpoint) != self._committed:
            try:
                shared = None if checkpoint is None else checkpoint.to_json()
                self._directory.commit(files, next_position=next_position, shared=shared)
                self._committed = files, checkpoint
            except (OSError, CacheError) as error:
                self._report_outage("the manifest was not written", error)
                return
        if is_whole and files == segments and self._is_outage:
            self._is_outage = False
            log.warning(
                "cache namespace=%s: its directory can be written again, and all segments are in files", self._name
            )

    def save_learned(self, newest: PublishedState | None, *, now: bool = False) -> None:
        """Save the newest copy of the acceptance model, at most every SAVE_LEARNED_S seconds unless ``now`` is set."""
        if not now and time.monotonic() < self._save_learned_at:
            return
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S
        if newest is None or newest is self._saved_copy:
            return
        try:
            self._directory.write_learned(newest.to_bytes())
            self._saved_copy = newest
        except OSError as error:
            self._report_failure("the learned state of drafters was not written", error)

    def close(self) -> None:
        self._directory.close()

    def _report_outage(self, what: str, error: Exception) -> None:
        self.num_failures += 1
        if not self._is_outage:
            self._is_outage = True
            log.error(
                "cache namespace=%s: %s: %s. Requests are served as before. New text stays in memory, and a "
                "restart loses it. Writing is retried every %.0f s: free disk space, or mount the directory "
                "writable",
                self._name,
                what,
                error,
                RETRY_S,
            )
