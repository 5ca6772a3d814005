"""A directory of segment files: one writer, a manifest that says which files count.

::

    manifest.json        the segments of one generation; replaced atomically, after the files it names exist
    learned.bin          what drafting learned beside the text (``LearnedState``); replaced atomically, may be removed
    <segment id>.seg     segment files, never changed
    writer.lock          held by the writing process (flock), freed by the kernel however the process ends

Nothing else in it is touched, and of files with such names only those that are ours: no links, and segments whose
header has this tokenizer and namespace.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd.errors import CacheError, FormatVersion, SegmentCorrupt
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.files import (
    LOCK_NAME,
    MANIFEST_NAME,
    MAX_POSITION,
    DirectoryLock,
    Manifest,
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
from ssd.retrieval.segment import Segment, SegmentHeader, open_segment, read_header, write_segment

log = logging.getLogger(__name__)

LEFT_OUT = ".left-out"
"""What follows the name of a segment file that is ours, but not part of what was made of a directory."""


def header_of_ours(path: Path, *, fingerprint: str, namespace: str) -> SegmentHeader | None:
    """The header of a file that we wrote for this tokenizer and namespace; None for anything else. Raises OSError.

    What is not ours, or only a link, is never moved or removed. Raises FormatVersion for one of another version.
    """
    if path.suffix != ".seg" or not is_segment_id(path.stem) or not is_regular(path):
        return None
    try:
        header = read_header(path)
    except SegmentCorrupt:
        return None
    return header if (header.fingerprint, header.namespace) == (fingerprint, namespace) else None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A manifest of the files chosen, and those of ours that were not: covered by others, or damaged."""

    manifest: Manifest
    left_out: tuple[Path, ...]

    def __str__(self) -> str:
        tokens = sum(segment["num_tokens"] for segment in self.manifest.segments)
        num_static = sum(segment["start"] is None for segment in self.manifest.segments)
        return (
            f"of {len(self.manifest.segments) + len(self.left_out)} segment files {num_static} static and "
            f"{len(self.manifest.segments) - num_static} of the ring are kept, {tokens} tokens; {len(self.left_out)} "
            "are left out, covered by others or damaged"
        )


def whose_segments(path: Path) -> tuple[str, str] | None:
    """Tokenizer fingerprint and namespace of the first segment file in ``path`` that has a sound header; None without.

    Raises OSError.
    """
    for file in sorted(path.glob("*.seg")):
        with contextlib.suppress(CacheError):
            header = read_header(file)
            return header.fingerprint, header.namespace
    return None


def recover(path: Path, *, fingerprint: str, namespace: str) -> Recovered | None:
    """What the segment files in ``path`` hold, None when none of them is ours. Reads all of them. Nothing is changed.

    All static segments are kept. Those of the ring may overlap: a merged one and what it was merged from. The largest
    are kept first, of equal ones the newest file, and then whatever overlaps none of those.

    Raises FormatVersion when one was written by another version, and OSError.
    """
    found: list[tuple[SegmentHeader, Path]] = []
    for file in sorted(path.glob("*.seg")):
        header = header_of_ours(file, fingerprint=fingerprint, namespace=namespace)
        if header is not None:
            found.append((header, file))
    if not found:
        return None
    found.sort(key=lambda each: (each[0].num_tokens, each[1].stat().st_mtime_ns), reverse=True)
    static: list[SegmentHeader] = []
    ring: list[SegmentHeader] = []
    left_out: list[Path] = []
    for header, file in found:
        if (header.stop or 0) > MAX_POSITION or _overlaps(header, ring) or not _is_whole(file, header, fingerprint):
            left_out.append(file)
        else:
            (static if header.start is None else ring).append(header)
    static.sort(key=lambda header: header.segment_id)
    ring.sort(key=lambda header: header.start or 0)
    kept = [*static, *ring]
    manifest = Manifest(
        fingerprint=fingerprint,
        namespace=namespace,
        next_position=max([header.stop or 0 for header in kept], default=0),
        segments=tuple({"id": h.segment_id, "num_tokens": h.num_tokens, "start": h.start} for h in kept),
    )
    return Recovered(manifest, tuple(left_out))


def _overlaps(header: SegmentHeader, ring: list[SegmentHeader]) -> bool:
    if header.start is None or header.stop is None:
        return False
    return any((o.start or 0) < header.stop and header.start < (o.stop or 0) for o in ring)


def _is_whole(file: Path, header: SegmentHeader, fingerprint: str) -> bool:
    try:
        return open_segment(file, fingerprint=fingerprint).segment_id == header.segment_id == file.stem
    except FormatVersion:
        raise
    except CacheError as error:
        log.warning("%s", error)
        return False


LEARNED_NAME = "learned.bin"
_MOST_LEARNED_BYTES = 1 << 26


def read_learned(path: Path) -> bytes | None:
    """What drafting learned, kept in directory ``path``; None where nothing is. Raises OSError."""
    try:
        with open_file(path / LEARNED_NAME) as file:
            return file.read(_MOST_LEARNED_BYTES)
    except FileNotFoundError:
        return None


class DirectoryReader:
    """What a directory holds, without a right to write it: for one that cannot be written.

    A process that writes it meanwhile may remove files before they are read; they are left out then.
    """

    def __init__(self, path: Path, *, fingerprint: str, namespace: str, budget: CopyBudget | None = None) -> None:
        """``budget`` : what private copies of segments may take, None maps their files.

        Raises SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch, or OSError.
        """
        self.path = path
        self._fingerprint = fingerprint
        self._namespace = namespace
        self._budget = budget
        next(path.iterdir(), None)  # can it be read at all?
        manifest = read_manifest(path, fingerprint=fingerprint, namespace=namespace)
        if manifest is None:
            recovered = recover(path, fingerprint=fingerprint, namespace=namespace)
            if recovered is not None:
                log.warning("%s has no manifest: it is made up from the files: %s", path, recovered)
                manifest = recovered.manifest
        self.manifest = manifest or Manifest(fingerprint=fingerprint, namespace=namespace)

    def load(self) -> tuple[list[Segment], list[CacheError | OSError]]:
        """The manifest's segments, in order, and why those left out could not be used: damaged, foreign or missing.

        Raises FormatVersion or OSError for what may be whole but cannot be read now or by this version.
        """
        segments, failures = load_segments(self.path, self.manifest, namespace=self._namespace, budget=self._budget)
        for failure in failures:
            if isinstance(failure, FormatVersion | OSError) and not isinstance(failure, FileNotFoundError):
                raise failure
        return segments, failures


class SegmentDirectory(DirectoryReader):
    """The writer's side of a directory. Not thread-safe; ``write`` may run beside other calls."""

    def __init__(
        self,
        path: Path,
        *,
        fingerprint: str,
        namespace: str,
        budget: CopyBudget | None = None,
    ) -> None:
        """Open or create ``path`` as its writer and remove files of ours that no manifest names.

        A missing manifest is made anew from the segments; then nothing is removed. ``budget`` : what private copies of
        segments may take, None maps their files.

        Raises CacheLocked, SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch, or OSError.
        """
        self.path = path
        self._fingerprint = fingerprint
        self._namespace = namespace
        self._budget = budget
        make_directory(path)
        self._lock = DirectoryLock(path)
        try:
            self._has_unsynced_names = False
            manifest = read_manifest(path, fingerprint=fingerprint, namespace=namespace)
            self.manifest = manifest or Manifest(fingerprint=fingerprint, namespace=namespace)
            if manifest is None:
                self._begin()
            else:
                self._remove_orphans()
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
        """As of any reader; what raises also closes this, for the next ``commit`` removes files that are left out."""
        try:
            return super().load()
        except (FormatVersion, OSError):
            self.close()
            raise

    def write(self, segment: Segment) -> Segment:
        """Write a segment's file; returns the segment read from it. It counts after ``commit``.

        Raises CacheError, OSError; then there is no file.
        """
        self._lock.check()
        path = self.path_of(segment.segment_id)
        # Its bytes are synced here, its name by ``commit``, once for all new names: until a manifest names the file it
        # may be lost or torn.
        write_segment(path, segment, fingerprint=self._fingerprint, namespace=self._namespace)
        return self.adopt(segment.segment_id)

    def adopt(self, segment_id: str) -> Segment:
        """Read a segment that was written into the directory. It counts after ``commit``.

        Raises CacheError, OSError; then the file is removed.
        """
        path = self.path_of(segment_id)
        try:
            segment = open_segment(path, fingerprint=self._fingerprint, namespace=self._namespace, budget=self._budget)
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
        self.manifest = Manifest(
            fingerprint=self._fingerprint,
            namespace=self._namespace,
            generation=self.manifest.generation + 1,
            next_position=next_position,
            segments=tuple({"id": s.segment_id, "num_tokens": len(s), "start": s.start} for s in kept),
            shared=shared,
        )
        if self._has_unsynced_names:
            sync_directory(self.path)
            self._has_unsynced_names = False
        write_manifest(self.path, self.manifest)
        for segment_id in self._files - set(self.manifest.segment_ids):
            self._remove(self.path_of(segment_id))
            self._files.discard(segment_id)

    def write_learned(self, learned: bytes) -> None:
        """Replace it. Raises OSError; then the old one stays."""
        self._lock.check()
        write_file(self.path / LEARNED_NAME, [learned], durable=True)

    def _begin(self) -> None:
        """There is no manifest: write one. From then on its absence means that it was lost."""
        recovered = recover(self.path, fingerprint=self._fingerprint, namespace=self._namespace)
        if recovered is None:
            # A new directory must not be lost with all that will be synced in it. Once in its life, while it is empty.
            for parent in self.path.resolve().parents:
                with contextlib.suppress(OSError):  # not ours to read
                    sync_directory(parent)
        else:
            log.warning("%s has no manifest: it is made anew: %s", self.path, recovered)
            self.manifest = recovered.manifest
            for path in recovered.left_out:
                path.replace(path.with_name(path.name + LEFT_OUT))
        write_manifest(self.path, self.manifest)

    def _remove_orphans(self) -> None:
        """Only while opening: later, a merge that is still being written has a file no manifest names."""
        kept = {f"{segment_id}.seg" for segment_id in self.manifest.segment_ids}
        for path in list(self.path.iterdir()):
            if path.name in kept:
                continue
            if is_temporary(path):
                path.unlink(missing_ok=True)
            else:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a segment file if it is ours."""
        with contextlib.suppress(FormatVersion, FileNotFoundError):
            if header_of_ours(path, fingerprint=self._fingerprint, namespace=self._namespace) is not None:
                path.unlink()


def remove_directory(path: Path) -> None:
    """Remove what a namespace kept in its directory, and the directory where nothing else is in it.

    By their names: a damaged file holds text as well. Raises CacheLocked while another writes it, and OSError.
    """
    if not path.is_dir() or path.is_symlink():
        return
    lock = DirectoryLock(path)
    try:
        for file in sorted(path.iterdir(), key=lambda file: file.name != MANIFEST_NAME):
            name = file.name.removesuffix(LEFT_OUT)
            is_segment = name.endswith(".seg") and is_segment_id(name.removesuffix(".seg"))
            if is_segment or name in (MANIFEST_NAME, LEARNED_NAME, LOCK_NAME) or is_temporary(file):
                file.unlink(missing_ok=True)
    finally:
        lock.close()
    with contextlib.suppress(OSError):  # there is something that is not ours
        path.rmdir()
    sync_directory(path.parent)


def load_segments(
    path: Path,
    manifest: Manifest,
    *,
    namespace: str | None = None,
    budget: CopyBudget | None = None,
    leaving: int = 0,
) -> tuple[list[Segment], list[CacheError | OSError]]:
    """The segments ``manifest`` names in directory ``path``, in order; and why those left out could not be used.

    ``namespace``, ``budget``, ``leaving`` : as for ``open_segment``.
    """
    segments: list[Segment] = []
    failures: list[CacheError | OSError] = []
    ring_stop = 0
    for segment_id in manifest.segment_ids:
        file = path / f"{segment_id}.seg"
        try:
            segment = open_segment(
                file, fingerprint=manifest.fingerprint, namespace=namespace, budget=budget, leaving=leaving
            )
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
