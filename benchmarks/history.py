"""What was acknowledged, and what is there afterwards.

A *note* is a text that is asked for once, with a number of its own. A history says which notes were sent to which
namespace, which were acknowledged (their answer came whole), which were promised (on disk at a moment before the
fault, or acknowledged in a life of the server that was closed in order), and which were found afterwards.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache_manager import CacheManager, NamespaceCache
from ssd.retrieval.files import MANIFEST_NAME
from ssd.retrieval.segment import SEPARATOR
from ssd.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class Verdict:
    """``lost`` : promised, and not there. ``twice`` : there more than once. ``elsewhere`` : where they do not belong,
    or never sent at all."""

    num_promised: int
    lost: tuple[int, ...]
    twice: tuple[int, ...]
    elsewhere: tuple[int, ...]


@dataclass(slots=True)
class History:
    """One store's. Several threads may tell it what they saw."""

    sent: dict[int, str] = field(default_factory=dict)
    """The namespace of each note; a note is sent before it can be anywhere. Stores that learn from each other have this
    in common: what is sent to one of them may be in each."""
    acknowledged: set[int] = field(default_factory=set)
    """In this life of the server."""
    promised: set[int] = field(default_factory=set)
    _newest_of_former_life: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, namespace: str) -> int:
        """The number of a new note, which is on its way."""
        with self._lock:
            number = len(self.sent) + 1
            self.sent[number] = namespace
        return number

    def acknowledge(self, number: int) -> None:
        """Its answer came whole."""
        with self._lock:
            if number > self._newest_of_former_life:
                self.acknowledged.add(number)

    def promise(self, numbers: Iterable[int]) -> None:
        """These were seen where they cannot be lost any more."""
        with self._lock:
            self.promised.update(numbers)

    def end_life(self, *, in_order: bool) -> None:
        """The server ended: in order, so all it acknowledged must be there from now on, or it was killed."""
        with self._lock:
            if in_order:
                self.promised |= self.acknowledged
            self.acknowledged.clear()
            self._newest_of_former_life = len(self.sent)

    def check(self, found: Iterable[tuple[str, int]]) -> Verdict:
        """``found`` : (namespace, number) for each time a note lies in the store."""
        counts = Counter(found)
        right = {number for namespace, number in counts if self.sent.get(number) == namespace}
        return Verdict(
            num_promised=len(self.promised),
            lost=tuple(sorted(self.promised - right)),
            twice=tuple(sorted(number for (_, number), count in counts.items() if count > 1)),
            elsewhere=tuple(sorted(number for namespace, number in counts if self.sent.get(number) != namespace)),
        )

    def settle(self, found: Iterable[tuple[str, int]]) -> Verdict:
        """The check before a closed store is damaged or thrown away: nothing is promised any more."""
        verdict = self.check(found)
        with self._lock:
            self.promised.clear()
        return verdict


def family(size: int) -> list[History]:
    """Histories of so many stores that learn from each other; no number is given twice."""
    sent, lock = dict[int, str](), threading.Lock()
    return [History(sent, _lock=lock) for _ in range(size)]


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


def sequences(cache: NamespaceCache) -> Iterator[npt.NDArray[np.int32]]:
    """The sequences a cache holds."""
    snapshot = cache.snapshot()
    tail = snapshot.ring[np.arange(snapshot.memtable_start, snapshot.memtable_stop) & (len(snapshot.ring) - 1)]
    text = np.concatenate([*(segment.tokens for segment in snapshot.segments), tail])
    return (part[part != SEPARATOR] for part in np.split(text, np.flatnonzero(text == SEPARATOR) + 1))


def notes_in(cache: NamespaceCache, codec: TextCodec) -> list[int]:
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
            with CacheManager(config, codec.fingerprint, inline=True) as caches:
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
