"""Notes, as they lie in a cache directory."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet, SuffixCache
from ssd.retrieval.files import MANIFEST_NAME
from ssd.retrieval.segment import SEPARATOR
from ssd.text.codec import TextCodec

_NOTE = "# note {} of this log\n"
_MARGIN = 24  # characters of a sequence that may hold a note's number


def note(number: int) -> str:
    """The prompt of a note; no other text begins like it."""
    return _NOTE.format(number)


def number_of(text: str) -> int | None:
    """The number of the note that ``text`` begins with; None for other text."""
    words = text[:_MARGIN].split(" ", 4)
    is_note = len(words) > 3 and words[:2] == ["#", "note"] and words[3].startswith("of") and words[2].isdecimal()
    return int(words[2]) if is_note else None


def sequences(cache: SuffixCache) -> Iterator[npt.NDArray[np.int32]]:
    """The sequences a cache holds."""
    snapshot = cache.snapshot()
    tail = snapshot.ring[np.arange(snapshot.tail_start, snapshot.tail_stop) & (len(snapshot.ring) - 1)]
    text = np.concatenate([*(segment.tokens for segment in snapshot.segments), tail])
    return (part[part != SEPARATOR] for part in np.split(text, np.flatnonzero(text == SEPARATOR) + 1))


def notes_in(cache: SuffixCache, codec: TextCodec) -> list[int]:
    """The number of each note that a cache holds, as often as it does."""
    texts = (
        codec.decode(sequence[:_MARGIN].tolist(), skip_special_tokens=True)
        for sequence in sequences(cache)
        if len(sequence)
    )
    return [number for text in texts if (number := number_of(text)) is not None]


def notes_on_disk(directory: Path, codec: TextCodec, num_tokens: int) -> list[tuple[str, int]]:
    """(namespace, number) of every note in the files of a cache directory, whether a server writes it or not.

    Reads a copy. ``num_tokens`` : the cache's capacity.
    """
    found: list[tuple[str, int]] = []
    with tempfile.TemporaryDirectory(prefix="faults-copy-") as copy:
        for namespace in _copy(directory, Path(copy)):
            config = CacheConfig(directory=Path(copy), index=IndexConfig(capacity_tokens=num_tokens))
            with CacheSet(config, codec.fingerprint, inline=True) as caches:
                found += ((namespace, number) for number in notes_in(caches.get(namespace), codec))
    return found


def _copy(directory: Path, copy: Path) -> Iterable[str]:
    """Copies each namespace as its manifest has it; files of a merge come and go meanwhile."""
    namespaces = [path.parent.name for path in directory.glob(f"*/{MANIFEST_NAME}")]
    for namespace in namespaces:
        for _ in range(50):
            target = copy / namespace
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            manifest = (directory / namespace / MANIFEST_NAME).read_bytes()
            names = [segment["id"] for segment in json.loads(manifest)["manifest"]["segments"]]
            try:
                for name in names:
                    shutil.copyfile(directory / namespace / f"{name}.seg", target / f"{name}.seg")
                (target / MANIFEST_NAME).write_bytes(manifest)
                break
            except FileNotFoundError:
                time.sleep(0.02)
        else:
            raise TimeoutError(f"{namespace} changed faster than it could be copied")
    return namespaces
