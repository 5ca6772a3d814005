"""How often each tenant's cache was deleted: part of its name, so that what was deleted is never found again."""

from __future__ import annotations

import fcntl
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ssd.retrieval.files import make_directory, open_file, open_lock, write_file

if TYPE_CHECKING:
    from ssd.sharing.redis_log import RedisCounters

log = logging.getLogger(__name__)

_MOST: Final = 1 << 53
_MOST_BYTES: Final = 1 << 22


class Generations:
    """A number for each name, which only grows, in a file before anybody is told. Safe from any thread; may wait."""

    def __init__(self, path: Path | None, shared: RedisCounters | None) -> None:
        self._path = path
        self._shared = shared
        self._lock = threading.Lock()
        self._counting = threading.Lock()  # held while replicas are asked
        self._numbers = {} if path is None else _read(path)
        self._is_reached = True

    def of(self, name: str) -> int:
        return self._numbers.get(name, 0)

    def advance(self, name: str) -> tuple[int, bool]:
        """Count one more. Returns the new number, and whether replicas have been told; raises OSError of the file."""
        with self._counting:
            number, is_told = self.of(name) + 1, self._shared is None
            if self._shared is not None:
                try:
                    number = max(number, self._told(name, self._shared.add(name, 1), number))
                    is_told = True
                except Exception as error:  # they are told by `absorb`
                    self._complain(error)
            self._set({name: number})
            return number, is_told

    def absorb(self, names: Iterable[str]) -> dict[str, int]:
        """Take over what replicas have counted, and tell them what they missed; returns former numbers of changed."""
        with self._counting:
            asked = list(names)
            if self._shared is None or not asked:
                return {}
            try:
                found = dict(zip(asked, self._shared.read(asked), strict=True))
                for name, number in found.items():
                    if number < self.of(name):
                        self._told(name, number, self.of(name))
                newer = {name: number for name, number in found.items() if self.of(name) < number < _MOST}
                if newer:  # asked once more: an answer that was garbled on its way deletes no cache
                    again = zip(newer, self._shared.read(list(newer)), strict=True)
                    newer = {name: newer[name] for name, number in again if number >= newer[name]}
            except Exception as error:
                self._complain(error)
                return {}
            self._is_reached = True
            former = {name: self.of(name) for name in newer}
            if newer:
                self._set(newer)
            return former

    def _told(self, name: str, counted: int, number: int) -> int:
        assert self._shared is not None
        return self._shared.raise_to(name, number) if counted < number else counted

    def _set(self, numbers: Mapping[str, int]) -> None:
        with self._lock:
            newer = {**self._numbers, **numbers}
            if self._path is not None:
                _write(self._path, newer)
            self._numbers = newer

    def _complain(self, error: Exception) -> None:
        if self._is_reached:
            log.warning("replicas are not told which caches were deleted, it is tried again: %s", type(error).__name__)
        self._is_reached = False


def _write(path: Path, numbers: Mapping[str, int]) -> None:
    """Add to what the file holds: servers of other namespaces may keep theirs in one directory. Raises OSError."""
    make_directory(path.parent)
    with open_lock(path.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = _read(path)
        greatest = {name: max(number, there.get(name, 0)) for name, number in numbers.items()}
        write_file(path, [json.dumps({**there, **greatest}, sort_keys=True).encode()], durable=True)


def _read(path: Path) -> dict[str, int]:
    """What a file holds; nothing where there is none, or one that somebody else wrote."""
    try:
        with open_file(path) as file:
            content: Any = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.error("%s cannot be read: caches that were deleted elsewhere may be found again: %s", path, error)
        return {}
    numbers = content.items() if isinstance(content, dict) else ()
    return {str(name): number for name, number in numbers if type(number) is int and 0 <= number < _MOST}
