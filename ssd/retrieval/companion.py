"""Something that is learned about a namespace beside its text, and lives as long as that does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)


class Kept(Protocol):
    """What a companion can keep."""

    def to_bytes(self) -> bytes:
        """All of it, at any time and from any thread."""
        ...


T = TypeVar("T", bound=Kept)


class Companion:
    """Holds one object for whoever reads the namespace's snapshots; the cache saves its bytes with the text.

    The retrieval layer knows nothing of what it is.
    """

    def __init__(self, stored: bytes | None = None) -> None:
        """``stored`` : what ``to_bytes`` gave before, None when there is nothing."""
        self._stored = stored
        self._value: Any = None

    def get(self, make: Callable[[], T], restore: Callable[[bytes], T]) -> T:
        """The object; the first call restores or makes it. What ``restore`` refuses with ValueError is made anew."""
        if self._value is None:
            self._value = self._made(make, restore)
        value: T = self._value
        return value

    def _made(self, make: Callable[[], T], restore: Callable[[bytes], T]) -> T:
        if self._stored is None:
            return make()
        try:
            return restore(self._stored)
        except ValueError as error:
            log.warning("what was learned beside the text is not used, it begins anew: %s", error)
            return make()

    def to_bytes(self) -> bytes | None:
        """What is to be saved; None when nothing was ever learned."""
        value: Kept | None = self._value
        return self._stored if value is None else value.to_bytes()
