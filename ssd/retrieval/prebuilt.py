"""Directories of prebuilt segments: built offline by ``ssd-cache build``, searched by servers, and never evicted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.dedup import as_sequence, split_sequence
from ssd.retrieval.directory import SegmentDirectory, load_all_segments
from ssd.retrieval.files import Manifest, check_fingerprint, check_namespace, new_segment_id, read_manifest
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens
from ssd.retrieval.suffix_array import build_segment

DEFAULT_SEGMENT_TOKENS = 16 << 20
"""The default number of tokens per prebuilt segment. Sorting a segment takes about 3 s, and 16 bytes per token."""

_LEAD_IN_TOKENS = 32


def load_prebuilt_directory(path: Path, *, fingerprint: str) -> list[Segment]:
    """Load all segments of a cache directory, of any namespace, as prebuilt segments.

    It may be the directory of a server that is running. Raises CacheError: SegmentCorrupt, FormatVersion,
    TokenizerMismatch, or StoreUnavailable if it cannot be read.
    """
    try:
        manifest = read_manifest(path, fingerprint=fingerprint)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be read: {error}. Check the path and its permissions") from error
    if manifest is None:
        raise StoreUnavailable(f"{path} contains no cache (no manifest.json). Create one with `ssd-cache build`")
    _require_memory(path, manifest)
    return [replace(segment, start=None) for segment in load_all_segments(path, manifest)]


def _require_memory(path: Path, manifest: Manifest) -> None:
    """Raise StoreUnavailable if a directory's segments are larger than the free memory, before they are loaded."""
    wanted = 0
    for segment_id in manifest.segment_ids:
        with suppress(OSError):  # an error is raised when it is read
            wanted += (path / f"{segment_id}.seg").stat().st_size
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # a system without this file
        return
    if wanted > free:
        raise StoreUnavailable(
            f"{path} requires {wanted / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are free: free "
            "memory, or shrink the cache with `ssd-cache prune`"
        )


class PrebuiltWriter:
    """Writes sequences into a cache directory as prebuilt segments, and keeps the segments that are already there.

    The directory may be that of a server, which must be stopped meanwhile. As a context manager, the writer commits
    everything when the block ends normally, and nothing after an exception.
    """

    def __init__(
        self,
        path: Path,
        *,
        fingerprint: str,
        namespace: str = "default",
        segment_tokens: int = DEFAULT_SEGMENT_TOKENS,
    ) -> None:
        """Open a cache directory, to add segments of at most ``segment_tokens`` (>= 2) tokens each.

        Raises ConfigError for an invalid fingerprint or namespace, and CacheError or OSError if the directory cannot be
        used.
        """
        if not 2 <= segment_tokens < 1 << 31:
            raise CacheError(f"segment_tokens must be within 2..2147483647, got {segment_tokens}")
        self.num_tokens = 0
        """The number of tokens appended so far, separators included."""
        self._segment_tokens = segment_tokens
        self._pending: list[Tokens] = []
        self._num_pending = 0
        self._directory = SegmentDirectory(
            path, fingerprint=check_fingerprint(fingerprint), namespace=check_namespace(namespace)
        )
        existing, failures = self._directory.load()
        if failures:
            self._directory.close()
            raise failures[0]
        self._existing = existing
        self._segments = list(existing)

    def append(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Add one sequence of token ids, and write a segment if it is full.

        Raises CacheError unless all ids are integers in 0..2147483647, and CacheError or OSError if the segment cannot
        be written.
        """
        for piece in split_sequence(as_sequence(token_ids), self._segment_tokens - 1, _LEAD_IN_TOKENS):
            if self._num_pending + len(piece) + 1 > self._segment_tokens:
                self._write()
            self._pending += [piece, np.array([SEPARATOR], np.int32)]
            self._num_pending += len(piece) + 1
            self.num_tokens += len(piece) + 1

    def close(self) -> None:
        """Write the last segment and the manifest."""
        try:
            self._write()
            self._commit(self._segments)
        finally:
            self._directory.close()

    def discard(self) -> None:
        """Remove the files of all segments that this writer has written."""
        try:
            self._commit(self._existing)
        finally:
            self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _commit(self, segments: Sequence[Segment]) -> None:
        """Write a manifest with prebuilt segments first; its ring-buffer position and checkpoint stay unchanged."""
        manifest = self._directory.manifest
        self._directory.commit(
            sorted(segments, key=lambda segment: segment.start is not None),
            next_position=manifest.next_position,
            shared=manifest.shared,
        )

    def _write(self) -> None:
        if self._pending:
            tokens = np.concatenate(self._pending)
            self._pending, self._num_pending = [], 0
            segment = build_segment(tokens, start=None, segment_id=new_segment_id(None))
            self._segments.append(self._directory.write(segment))
