"""The caches that a command was given, opened: all with one tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from cache_builder.caches.inspect import fingerprint_of
from ssd.errors import StoreUnavailable, TokenizerMismatch
from ssd.retrieval.directory import LEARNED_NAME
from ssd.retrieval.files import open_file, read_manifest
from ssd.retrieval.packed import Tokens
from ssd.retrieval.segment import Segment
from ssd.retrieval.static import load_static_directory

_MOST_LEARNED_BYTES: Final = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A directory and its segments, mapped: static ones first, then a server's from the oldest to the newest."""

    path: Path
    fingerprint: str
    namespace: str
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Separators included."""
        return sum(map(len, self.segments))


def open_held(paths: Sequence[Path]) -> list[Held]:
    """Each of ``paths``, all of it checked. Nothing is changed; a server may go on writing it.

    Raises TokenizerMismatch where they have several tokenizers, and CacheError. O(their tokens).
    """
    found: list[Held] = []
    for path in paths:
        fingerprint = fingerprint_of(path)
        if found and fingerprint != found[0].fingerprint:
            raise TokenizerMismatch(
                f"{path} was made with tokenizer {fingerprint:.40}, {found[0].path} with {found[0].fingerprint}: their "
                "token ids mean other text. Give caches of one tokenizer, or build one of them again"
            )
        segments = tuple(load_static_directory(path, fingerprint=fingerprint))
        manifest = read_manifest(path, fingerprint=fingerprint)
        namespace = "" if manifest is None else manifest.namespace
        found.append(Held(path=path, fingerprint=fingerprint, namespace=namespace, segments=segments))
    return found


def digest_of(sequence: Tokens) -> int:
    """A number of a sequence that another one has not: 128 bits, of which no two are expected to be alike."""
    return xxhash.xxh3_128_intdigest(sequence.tobytes())


def read_learned(path: Path) -> bytes | None:
    """What drafting learned, kept beside the segments in ``path``; None where nothing is. Raises StoreUnavailable."""
    try:
        with open_file(path / LEARNED_NAME) as file:
            learned = file.read(_MOST_LEARNED_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnavailable(
            f"{path / LEARNED_NAME} cannot be read: {error}. Remove it, or check its permissions"
        ) from None
    return learned[:_MOST_LEARNED_BYTES]
