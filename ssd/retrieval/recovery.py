"""A directory that lost its manifest: which of its segment files make up a cache, by what their headers say."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from ssd.errors import CacheError, FormatVersion, SegmentCorrupt
from ssd.retrieval.atomic_file import is_regular
from ssd.retrieval.manifest import MAX_POSITION, Manifest
from ssd.retrieval.names import is_segment_id
from ssd.retrieval.segment_file import open_segment
from ssd.retrieval.segment_header import SegmentHeader, read_header

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
        segment_ids=tuple(header.segment_id for header in kept),
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
