"""A directory of segment files: one writer, a manifest that says which files count.

::

    manifest.json        the segments of one generation; replaced atomically, after the files it names exist
    manifest-previous.json   the one before; a damaged or lost one is made anew from it and the segments' headers,
    manifest-damaged.json    and kept under this name
    learned.bin          what drafting learned beside the text (``LearnedState``); replaced atomically, may be removed
    <segment id>.seg     segment files, never changed; damaged ones stay, and are named, until somebody removes them
    writer.lock          held by the writing process (flock), as is the directory, freed however the process ends

Nothing else in it is touched, and of files with such names only those that are ours: no links, and segments whose
header has this tokenizer and namespace.
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
from ssd.retrieval.cache_state import Checkpoint, Copy
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
"""Names of what is there beside segments."""
LEFT_OUT: Final = ".left-out"
"""What former versions added to the name of a segment file that a manifest did not name."""

_MOST_LEARNED_BYTES: Final = 1 << 26

RETRY_S: Final = 30.0
"""What could not be written is tried again this often, beside what is sealed meanwhile."""
SAVE_LEARNED_S: Final = 60.0

MOST_READS: Final = 5
"""Of a directory whose server removes files while they are read."""


def read_learned(path: Path) -> bytes | None:
    """What drafting learned, kept in directory ``path``; None where nothing is. Raises OSError."""
    try:
        with open_file(path / LEARNED_NAME) as file:
            return file.read(_MOST_LEARNED_BYTES)
    except FileNotFoundError:
        return None


def is_segment_file(name: str) -> bool:
    """Whether a file of this name is a segment's."""
    return name.endswith(".seg") and is_segment_id(name.removesuffix(".seg"))


class SegmentDirectory:
    """A directory and the right to write it. Not thread-safe; ``write`` may run beside other calls."""

    def __init__(self, path: Path, *, fingerprint: str, namespace: str, owner: Owner | None = None) -> None:
        """Open or create ``path`` as its writer and remove segment files that the manifest does not name.

        ``owner`` : for the manifest. Raises CacheLocked, FormatVersion, TokenizerMismatch, NamespaceMismatch, or
        OSError.
        """
        self.path = path
        self.damage: CacheError | None = None
        """Why the manifest was made anew, where it was."""
        self.left_out: tuple[dict[str, Any], ...] = ()
        """The manifest's entries of files that are there and cannot be used: they stay until somebody removes them."""
        self._whose: dict[str, str] = {"fingerprint": fingerprint, "namespace": namespace}
        make_directory(path)
        self._lock = DirectoryLock(path)
        try:
            self._has_unsynced_names = False
            try:
                self._written = read_manifest(path, **self._whose)
                if self._written is None and any(map(self._is_ours, path.iterdir())):
                    raise SegmentCorrupt(f"{path} has segment files, but no {MANIFEST_NAME}")
            except SegmentCorrupt as damage:
                self._written, self.damage = None, damage
            self._stamp = self._look()
            self.manifest = self._written or Manifest(fingerprint=fingerprint, namespace=namespace)
            if self.damage is not None:
                self._recover()
            elif self._written is None:
                self._begin()
            else:
                self._remove_orphans()
            self.manifest = replace(self.manifest, owner=owner or self.manifest.owner)
            self._files = set(self.manifest.segment_ids)  # segments that have a file of ours
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop being the writer. Segments that were loaded stay valid."""
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

        Raises FormatVersion or OSError for what may be whole but cannot be read now or by this version, and closes
        this.
        """
        segments, failures = load_segments(self.path, self.manifest, namespace=self._whose["namespace"])
        used = {segment.segment_id for segment in segments}
        self.left_out = tuple(
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
        """Write a segment's file; returns the segment read from it. It counts after ``commit``.

        Raises CacheError, OSError; then there is no file.
        """
        # Its bytes are synced here, its name by ``commit``, once for all new names: until a manifest names the file it
        # may be lost or torn.
        path = self.path_of(segment.segment_id)
        write_segment(path, segment, **self._whose)
        try:
            written = open_segment(path, **self._whose)
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
        """Make ``segments`` the content of the directory, with those left out by ``load``; remove the files of others.

        Segments that have no file (they could not be written) are left out. O(number of segments). Raises CacheLocked
        where another process writes the directory, CacheError where its manifest is one of another version or
        namespace, and OSError.

        The order is what a power failure cannot break: the files' bytes, their names, the manifest's bytes, its name,
        each on disk before the next; then the other files go.
        """
        self._lock.renew()
        self._require_ours()
        kept = [segment for segment in segments if segment.segment_id in self._files]
        entries = [{"id": s.segment_id, "num_tokens": len(s), "start": s.start} for s in kept]
        self.manifest = replace(
            self.manifest,
            generation=self.manifest.generation + 1,
            next_position=next_position,
            segments=tuple(sorted([*entries, *self.left_out], key=_place)),
            shared=shared,
        )
        if self._has_unsynced_names:
            sync_directory(self.path)
            self._has_unsynced_names = False
        self._keep_previous()
        write_manifest(self.path, self.manifest)
        self._written, self._stamp = self.manifest, self._look()
        for segment_id in self._files - set(self.manifest.segment_ids):
            self._remove(self.path_of(segment_id))
            self._files.discard(segment_id)

    def write_learned(self, learned: bytes) -> None:
        """Replace it. Raises OSError; then the old one stays."""
        write_file(self.path / LEARNED_NAME, [learned], durable=True)

    def _begin(self) -> None:
        """There is no manifest: write one. From then on its absence means that it was lost."""
        # A new directory must not be lost with all that will be synced in it. Once in its life, while it is empty.
        for parent in self.path.resolve().parents:
            with contextlib.suppress(OSError):  # not ours to read
                sync_directory(parent)
        write_manifest(self.path, self.manifest)
        self._written, self._stamp = self.manifest, self._look()

    def _recover(self) -> None:
        """Make the manifest anew, of the segments' headers and what the one before says of their source.

        Nothing is removed and nothing written but by the next ``commit``. Where a merge was under way its result or its
        inputs count, which are the same text.
        """
        previous = self.manifest
        with contextlib.suppress(CacheError, OSError):
            previous = read_manifest(self.path, name=PREVIOUS_NAME, **self._whose) or previous
        named = {entry["id"]: entry for entry in previous.segments}
        entries = []
        for file in self.path.iterdir():
            if is_segment_file(file.name) and is_regular(file):
                segment_id = file.name.removesuffix(".seg")
                try:
                    header = self._header_of(file)
                except CacheError:  # it is counted all the same, where it is one of ours
                    entries += [named[segment_id]] if segment_id in named else []
                    continue
                if header is not None and header.segment_id == segment_id:
                    entries.append({"id": segment_id, "num_tokens": header.num_tokens, "start": header.start})
        found, stop = list[dict[str, Any]](), 0
        for entry in sorted(entries, key=_place):
            start, shortest = _place(entry)
            if start < 0 or start >= stop:
                found.append(entry)
                stop = max(stop, start - shortest)
        self.manifest = replace(previous, next_position=max(previous.next_position, stop), segments=tuple(found))
        with contextlib.suppress(OSError):  # it is replaced, or an outage is reported
            (self.path / MANIFEST_NAME).replace(self.path / DAMAGED_NAME)

    def _require_ours(self) -> None:
        """Raise CacheError where the manifest is not the one that was written last, nor an older or damaged one."""
        if self._look() == self._stamp:
            return
        try:
            there = read_manifest(self.path, **self._whose)
        except SegmentCorrupt:
            return
        if there is None or there == self._written:
            return
        if self._written is None or there.generation >= self._written.generation:
            raise CacheLocked(f"{self.path / MANIFEST_NAME} was written by another process, and stays as that wrote it")

    def _look(self) -> tuple[int, int] | None:
        """What tells that the manifest was replaced; None where there is none."""
        with contextlib.suppress(OSError):
            status = (self.path / MANIFEST_NAME).stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _keep_previous(self) -> None:
        """Link the manifest that is about to be replaced, where the file system has links."""
        if self._written is not None:
            link = self.path / f"{PREVIOUS_NAME}.{os.getpid()}.tmp"
            with contextlib.suppress(OSError):
                link.unlink(missing_ok=True)
                os.link(self.path / MANIFEST_NAME, link)
                link.replace(self.path / PREVIOUS_NAME)

    def _remove_orphans(self) -> None:
        """Only while opening: later, a merge that is still being written has a file no manifest names."""
        kept = {f"{segment_id}.seg" for segment_id in self.manifest.segment_ids}
        for file in list(self.path.iterdir()):
            if is_temporary(file):
                file.unlink(missing_ok=True)
            elif file.name not in kept:
                self._remove(file)

    def _remove(self, file: Path) -> None:
        if self._is_ours(file):
            file.unlink(missing_ok=True)

    def _is_ours(self, file: Path) -> bool:
        """Whether it is a segment that was written for this tokenizer and namespace, in this format."""
        if not is_segment_file(file.name) or not is_regular(file):
            return False
        try:
            return self._header_of(file) is not None
        except CacheError:
            return False

    def _header_of(self, file: Path) -> SegmentHeader | None:
        """None for a file of another tokenizer or namespace, and one that was just removed. Raises CacheError."""
        try:
            with open_file(file) as content:
                header = SegmentHeader.from_bytes(file, content.read(HEADER_LENGTH))
        except FileNotFoundError:
            return None
        return header if {"fingerprint": header.fingerprint, "namespace": header.namespace} == self._whose else None


def _place(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Sorts entries of a manifest, which may hold anything: static ones first, then by position, the longest first."""
    start, num_tokens = entry.get("start"), entry.get("num_tokens")
    return (start, -num_tokens) if type(start) is type(num_tokens) is int else (-1, 0)


def is_of_a_cache(path: Path) -> bool:
    """Whether a cache's directory has files of this name."""
    is_segment = is_segment_file(path.name.removesuffix(LEFT_OUT))
    return is_segment or path.name in PART_NAMES or is_temporary(path)


def remove_directory(path: Path) -> None:
    """Remove what a namespace kept in its directory, and the directory where nothing else is in it.

    By their names: a damaged file holds text as well. Raises CacheLocked while another writes it, and OSError.
    """
    if not path.is_dir() or path.is_symlink():
        return
    lock = DirectoryLock(path)
    try:
        for file in sorted(path.iterdir(), key=lambda file: file.name != MANIFEST_NAME):
            if is_of_a_cache(file) and (file.is_symlink() or not file.is_dir()):
                file.unlink(missing_ok=True)
    finally:
        lock.close()
    with contextlib.suppress(OSError):  # there is something that is not ours
        path.rmdir()
    sync_directory(path.parent)


def load_segments(
    path: Path, manifest: Manifest, *, namespace: str | None = None
) -> tuple[list[Segment], list[CacheError | OSError]]:
    """The segments ``manifest`` names in directory ``path``, in order; and why those left out could not be used.

    ``namespace`` : whose text they must be, None for anyone's.
    """
    segments: list[Segment] = []
    failures: list[CacheError | OSError] = []
    ring_stop = 0
    for segment_id in manifest.segment_ids:
        file = path / f"{segment_id}.seg"
        try:
            segment = open_segment(file, fingerprint=manifest.fingerprint, namespace=namespace)
            if segment.segment_id != segment_id:
                raise SegmentCorrupt(f"{file} holds segment {segment.segment_id}: restore it from a copy")
            if segment.start is not None:
                stop = segment.start + len(segment)
                if segment.start < ring_stop or stop > manifest.next_position:
                    raise SegmentCorrupt(f"{file} is not where the manifest has room for it: restore one of the two")
                ring_stop = stop
            segments.append(segment)
        except (CacheError, OSError) as error:
            failures.append(error)
    return segments, failures


def load_whole(path: Path, manifest: Manifest) -> list[Segment]:
    """All segments of directory ``path``, as ``manifest`` says or one that a server put in its place meanwhile.

    Raises CacheError: StoreUnavailable where one cannot be read.
    """
    for _ in range(MOST_READS):
        segments, failures = load_segments(path, manifest)
        if not failures:
            return segments
        newer = None
        with contextlib.suppress(OSError):
            newer = read_manifest(path, fingerprint=manifest.fingerprint, namespace=manifest.namespace)
        if newer is None or newer == manifest:
            break
        del segments  # there may be memory for one reading only
        manifest = newer
    if isinstance(failures[0], CacheError):
        raise failures[0]
    raise StoreUnavailable(f"{path} is incomplete: {failures[0]}. Copy or build it again") from failures[0]


class DurableSegments:
    """The files of one namespace. Not thread-safe.

    What cannot be written is searched all the same and tried again. Such an outage begins with the first failure and
    ends when everything is in files again, not with the first write that works: a disk that is nearly full takes small
    files all the time.
    """

    def __init__(
        self, name: str, directory: SegmentDirectory, report_failure: Callable[[str, BaseException], None]
    ) -> None:
        """What the directory holds but its segments is read here, they by ``load``."""
        self._name = name
        self._directory = directory
        self._report_failure = report_failure
        self.next_position = directory.manifest.next_position
        self.kept = Checkpoint.from_json(directory.manifest.shared)
        self.learned: bytes | None = None
        """What drafting learned before."""
        try:
            self.learned = read_learned(directory.path)
        except OSError as error:
            report_failure("what was learned beside the text was not read", error)
        self.num_failures = 0
        """Of writing."""
        self._committed: tuple[tuple[Segment, ...], Checkpoint | None] = (), self.kept
        self._is_outage = False
        self.gaps: Sequence[int] = ()
        """Positions of files that ``load`` left out: while nothing is merged across, one that is put back has room."""
        if directory.damage is not None:
            report_failure("its manifest was made anew from its segments", directory.damage)
        self._saved_copy: Copy | None = None
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S

    def load(self) -> list[Segment]:
        """The segments that are there, not kept here: merged ones are to leave the memory.

        Raises FormatVersion and OSError for what cannot be read for now.
        """
        segments, failures = self._directory.load()
        for failure in failures:
            self._report_failure("a segment was left out, its file stays", failure)
        left_out, named = self._directory.left_out, self._directory.manifest.segments
        if self._directory.damage is None and len(segments) + len(left_out) == len(named):
            self._committed = tuple(segments), self.kept
        self.gaps = sorted(_place(entry)[0] for entry in left_out)
        return segments

    def has(self, segment: Segment) -> bool:
        """Whether it is in a file."""
        return self._directory.has_file(segment.segment_id)

    def write(self, segment: Segment) -> Segment:
        """The segment as it was read from its new file; itself where it could not be written."""
        try:
            return self._directory.write(segment)
        except (OSError, CacheError) as error:
            self._report_outage("a segment stays in memory", error)
            return segment

    def commit(
        self, segments: tuple[Segment, ...], next_position: int, kept: Checkpoint | None, *, is_whole: bool
    ) -> None:
        """Bring the manifest up to date: it names those of ``segments`` that are in files. O(number of segments).

        ``is_whole`` : no merge waits for room.
        """
        files = tuple(filter(self.has, segments))
        if (files, kept) != self._committed:
            try:
                shared = None if kept is None else kept.to_json()
                self._directory.commit(files, next_position=next_position, shared=shared)
                self._committed = files, kept
            except (OSError, CacheError) as error:
                self._report_outage("the manifest was not written", error)
                return
        if is_whole and files == segments and self._is_outage:
            self._is_outage = False
            log.warning("cache namespace=%s: its directory can be written again, nothing is missing", self._name)

    def save_learned(self, newest: Copy | None, *, now: bool = False) -> None:
        """Write the newest copy of what drafting learned, every SAVE_LEARNED_S or ``now``; only where it is new."""
        if not now and time.monotonic() < self._save_learned_at:
            return
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S
        if newest is None or newest is self._saved_copy:
            return
        try:
            self._directory.write_learned(newest.to_bytes())
            self._saved_copy = newest
        except OSError as error:
            self._report_failure("what was learned beside the text was not written", error)

    def close(self) -> None:
        """Let go of the directory."""
        self._directory.close()

    def _report_outage(self, what: str, error: Exception) -> None:
        self.num_failures += 1
        if not self._is_outage:
            self._is_outage = True
            log.error(
                "cache namespace=%s: %s: %s. Requests are served as before; what is learned from now on is kept in "
                "memory and written once the directory can be written again, which is tried every %.0f s. Until then a "
                "restart loses it. Make room, or mount it writable",
                self._name, what, error, RETRY_S,
            )  # fmt: skip
