"""Directories of static segments: built offline, searched by every server, evicted by none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.directory import SegmentDirectory, load_whole
from ssd.retrieval.files import Manifest, check_fingerprint, check_namespace, new_segment_id, read_manifest
from ssd.retrieval.prefixes import as_sequence, split_sequence
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens
from ssd.retrieval.suffix_array import build_segment

DEFAULT_SEGMENT_TOKENS = 16 << 20
"""Sorting this many takes about 3 s and 16 bytes a token while it lasts."""

_LEAD_IN_TOKENS = 32


def load_static_directory(path: Path, *, fingerprint: str) -> list[Segment]:
    """All segments of a directory, of any namespace, as static ones. A server's own directory may be given too, and
    the server go on writing it.

    Raises CacheError: SegmentCorrupt, FormatVersion, TokenizerMismatch, or StoreUnavailable when it cannot be read.
    """
    try:
        manifest = read_manifest(path, fingerprint=fingerprint)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be read: {error}. Check the path and its permissions") from error
    if manifest is None:
        raise StoreUnavailable(f"{path} holds no cache (no manifest.json). Make one with `ssd-cache build`")
    _require_memory(path, manifest)
    return [replace(segment, start=None) for segment in load_whole(path, manifest)]


def _require_memory(path: Path, manifest: Manifest) -> None:
    """All is read into memory: better a sentence now than a process that the system kills."""
    wanted = 0
    for segment_id in manifest.segment_ids:
        with suppress(OSError):  # said when it is read
            wanted += (path / f"{segment_id}.seg").stat().st_size
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # a system that does not say
        return
    if wanted > free:
        raise StoreUnavailable(
            f"{path} takes {wanted / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: give it more, or make it "
            "smaller with `ssd-cache prune`"
        )


class StaticWriter:
    """Writes sequences into a directory as static segments; adds to what is there already, a server's own too.

    A context manager: leaving it normally makes everything appended count, leaving it by an exception none of it.
    """

    def __init__(
        self,
        path: Path,
        *,
        fingerprint: str,
        namespace: str = "default",
        segment_tokens: int = DEFAULT_SEGMENT_TOKENS,
    ) -> None:
        """``segment_tokens`` : size of a segment, >= 2. Raises CacheError, ConfigError, OSError."""
        if not 2 <= segment_tokens < 1 << 31:
            raise CacheError(f"segment_tokens must be within 2..2147483647, got {segment_tokens}")
        self.num_tokens = 0
        """Tokens appended so far, separators included."""
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
        """Add one sequence of ids >= 0. Writes a segment when enough have come. Raises CacheError, OSError."""
        for piece in split_sequence(as_sequence(token_ids), self._segment_tokens - 1, _LEAD_IN_TOKENS):
            if self._num_pending + len(piece) + 1 > self._segment_tokens:
                self._write()
            self._pending += [piece, np.array([SEPARATOR], np.int32)]
            self._num_pending += len(piece) + 1
            self.num_tokens += len(piece) + 1

    def close(self) -> None:
        """Write the rest and the manifest."""
        try:
            self._write()
            self._commit(self._segments)
        finally:
            self._directory.close()

    def discard(self) -> None:
        """Remove what was written since this writer was made."""
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
        """Static ones first; what a server noted of its ring stays, or it would find no room for its own."""
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
