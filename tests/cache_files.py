"""Cache directories as ``ssd-cache build`` makes them, from token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ssd.retrieval.prebuilt import PrebuiltWriter, load_prebuilt_directory
from ssd.retrieval.ring import iter_sequences

FINGERPRINT = "0123456789abcdef" * 2


def write_cache(
    path: Path,
    texts: Iterable[Sequence[int]],
    *,
    namespace: str = "default",
    fingerprint: str = FINGERPRINT,
    segment_tokens: int = 1000,
) -> Path:
    """``path``, with ``texts`` in it."""
    with PrebuiltWriter(path, fingerprint=fingerprint, namespace=namespace, segment_tokens=segment_tokens) as writer:
        for text in texts:
            writer.append(text)
    return path


def read_cache(path: Path, fingerprint: str = FINGERPRINT) -> list[list[int]]:
    """The sequences in it, in their order."""
    return [found.tolist() for found in iter_sequences(load_prebuilt_directory(path, fingerprint=fingerprint))]
