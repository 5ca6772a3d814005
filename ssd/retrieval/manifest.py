"""``manifest.json``: which segments make up one generation of a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ssd.errors import FormatVersion, NamespaceMismatch, SegmentCorrupt, TokenizerMismatch
from ssd.retrieval.atomic_file import NotAFileError, open_file, sync_directory, write_file
from ssd.retrieval.names import is_segment_id

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
_MAX_MANIFEST_BYTES = 64 << 20
MAX_POSITION = 1 << 61
"""Far more than a ring will ever see; what is stored later still has room for its positions."""


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


def read_manifest(path: Path, *, fingerprint: str | None = None, namespace: str | None = None) -> Manifest | None:
    """The manifest of directory ``path``, None when there is none.

    ``fingerprint``, ``namespace`` : whose it must be, None for anyone's. Raises SegmentCorrupt, FormatVersion,
    TokenizerMismatch, NamespaceMismatch, and OSError when it cannot be read.
    """
    manifest_path = path / MANIFEST_NAME
    try:
        with open_file(manifest_path) as file:
            text = file.read(_MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except NotAFileError:
        raise SegmentCorrupt(
            f"{manifest_path} is no regular file. Remove it: then it is made anew from the segment files"
        ) from None
    try:
        outer = json.loads(text)
        content = outer["manifest"]
        if outer["format"] != MANIFEST_FORMAT:
            raise FormatVersion(
                f"{manifest_path} has format {outer['format']!r:.40}, this version reads {MANIFEST_FORMAT}. "
                "Delete the directory and build it again, or use the version of ssd that wrote it"
            )
        if outer["xxh3"] != _digest(content):
            raise ValueError("its checksum does not match")
        manifest = _from_json(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SegmentCorrupt(
            f"{manifest_path} is damaged ({error}). Restore it from a copy, or delete it: then it is made anew from "
            f"the segment files; or delete the directory {path} to start empty"
        ) from None
    if fingerprint is not None and manifest.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {manifest.fingerprint:.40}, this one is {fingerprint}: its token ids "
            "mean other text. Use another directory, or the tokenizer it was made with"
        )
    if namespace is not None and manifest.namespace != namespace:
        raise NamespaceMismatch(
            f"{path} is the cache of namespace {manifest.namespace[:80]!r}, not of {namespace!r}, and what is learned "
            f"in one is not used in another. To use it here on purpose, move it elsewhere and give it to "
            "`ssd-serve --warm`; else give this cache a directory of its own"
        )
    return manifest


def _from_json(content: Any) -> Manifest:
    """Raises ValueError, KeyError, TypeError for what ``write_manifest`` does not write."""
    segments = content["segments"]
    manifest = Manifest(
        fingerprint=content["fingerprint"],
        namespace=content["namespace"],
        generation=content["generation"],
        next_position=content["next_position"],
        segment_ids=tuple(segment["id"] for segment in segments),
        segments=tuple(segments),
        shared=content.get("shared"),  # whatever it is: ``Checkpoint`` looks
    )
    if not all(map(is_segment_id, manifest.segment_ids)):
        raise ValueError("it names a segment that no file can have")
    if len(set(manifest.segment_ids)) < len(segments):
        raise ValueError("it names a segment twice")
    if not (isinstance(manifest.fingerprint, str) and isinstance(manifest.namespace, str)):
        raise ValueError("it does not say whose it is")
    for number in (manifest.generation, manifest.next_position):
        if type(number) is not int or not 0 <= number <= MAX_POSITION:
            raise ValueError("it has numbers that no writer writes")
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Put it into directory ``path``, in the place of the one that is there, and on disk. Raises OSError."""
    content: dict[str, Any] = {
        "fingerprint": manifest.fingerprint,
        "namespace": manifest.namespace,
        "generation": manifest.generation,
        "next_position": manifest.next_position,
        "segments": list(manifest.segments),
    }
    if manifest.shared is not None:
        content["shared"] = manifest.shared
    outer = {"format": MANIFEST_FORMAT, "manifest": content, "xxh3": _digest(content)}
    write_file(path / MANIFEST_NAME, [json.dumps(outer, indent=1).encode()], durable=True)
    sync_directory(path)


def _digest(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
