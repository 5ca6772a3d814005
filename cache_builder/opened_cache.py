"""Opening of cache directories for reading, with a check that all of them have the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ssd.errors import StoreUnavailable, TokenizerMismatch
from ssd.retrieval.directory import LEARNED_NAME, is_segment_file, load_all_segments, read_learned
from ssd.retrieval.files import MANIFEST_NAME, Manifest, read_manifest
from ssd.retrieval.segment import Segment

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCache:
    """An open cache directory: its prebuilt segments, followed by segments that a server wrote, the oldest first."""

    path: Path
    fingerprint: str
    namespace: str
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.segments))


def open_caches(paths: Sequence[Path]) -> list[OpenedCache]:
    """Open cache directories read-only and check their files. A server may continue to write to them. O(tokens).

    Raises TokenizerMismatch if the caches have different tokenizers, and CacheError if a cache cannot be read.
    """
    found: list[OpenedCache] = []
    for path in paths:
        manifest = read_cache_manifest(path)
        fingerprint = manifest.fingerprint
        if found and fingerprint != found[0].fingerprint:
            raise TokenizerMismatch(
                f"{path} was made with tokenizer {fingerprint:.40}, {found[0].path} with {found[0].fingerprint}: their "
                "token ids mean different text. Give caches of one tokenizer, or rebuild one of them"
            )
        segments = tuple(load_all_segments(path, manifest))
        found.append(OpenedCache(path=path, fingerprint=fingerprint, namespace=manifest.namespace, segments=segments))
    return found


def open_cache(path: Path, codec: TextCodec | None) -> OpenedCache:
    """Open a cache directory and check its files. Raises CacheError if the cache cannot be read.

    If ``codec`` is given and the cache was built with another tokenizer, TokenizerMismatch is raised.
    """
    (cache,) = open_caches([path])
    if codec is not None and codec.fingerprint != cache.fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {cache.fingerprint}, but the given tokenizer is {codec.fingerprint}. "
            "Give the tokenizer with which the cache was made"
        )
    return cache


def read_learned_state(path: Path) -> bytes | None:
    """Return the bytes of a cache's acceptance model (learned.bin); None if the file is missing.

    Raises StoreUnavailable if the file cannot be read.
    """
    try:
        return read_learned(path)
    except OSError as error:
        raise StoreUnavailable(
            f"{path / LEARNED_NAME} cannot be read: {error}. Remove it, or check its permissions"
        ) from None


def read_cache_manifest(path: Path) -> Manifest:
    """Read the manifest file of a cache directory.

    Raises SegmentCorrupt if the file is damaged, FormatVersion if a newer version wrote it, and StoreUnavailable if the
    directory or the file cannot be read or does not exist.
    """
    try:
        manifest = read_manifest(path)
        if manifest is not None:
            return manifest
        if path.is_dir() and any(is_segment_file(file.name) for file in path.iterdir()):
            raise StoreUnavailable(
                f"{path} has segment files, but no {MANIFEST_NAME}: restore it from a copy, or build the cache again"
            )
        inside = sorted(child.parent.name for child in path.glob(f"*/{MANIFEST_NAME}")) if path.is_dir() else []
    except NotADirectoryError:
        raise StoreUnavailable(f"{path} is not a directory: give one that `ssd-cache build` created") from None
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be read: {error}. Check its permissions") from None
    hint = f"It has caches in {', '.join(inside[:5])}" if inside else "Make one with `ssd-cache build`"
    raise StoreUnavailable(f"{path} contains no cache (no {MANIFEST_NAME}). {hint}")


Decode: TypeAlias = Callable[[Sequence[int]], str] | None
"""A function that decodes token ids to text; None if there is no tokenizer, so that token ids are shown instead."""


def format_tokens(ids: Sequence[int], decode: Decode) -> str:
    """Return tokens for display: their text in quotes on one line; if ``decode`` is None, their ids."""
    if decode is None:
        return f"[{' '.join(map(str, ids))}]"
    return escape_control_characters(json.dumps(decode(ids), ensure_ascii=False))


def escape_control_characters(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_probability(chance: float) -> str:
    return f"{100 * chance:.0f} %" if chance >= 0.1 else f"{100 * chance:.1f} %"
