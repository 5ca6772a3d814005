"""The memory of compiled grammars: all that are kept or used share a budget, and tenants share what is kept."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from weakref import WeakSet

from ssd.config import StructuredOutput

MOST_GRAMMAR_BYTES: Final = 512 << 20
_MOST_KEPT: Final = 256
_SMALL_PARTS: Final = 128
"""A grammar of at most such a part of the budget waits for nobody."""
_COPY_PARTS: Final = 8
"""A request's own part of a grammar is such a part of it, or less: 1.5 to 4 MB of 43."""
_TRIM_AFTER_S: Final = 0.1
"""Time after which freed memory is given back to the system, for all that went meanwhile: 2 to 12 ms of work."""
_LARGE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Weight:
    """What a compiled grammar takes of memory, and of a processor's time to be made."""

    num_bytes: int
    seconds: float


class Compiled:
    """A matcher at the beginning, which is to be left there: its copies share what was compiled, and add to it."""

    def __init__(self, start: Any, weight: Weight) -> None:
        self.start, self.weight = start, weight
        self.num_bytes = weight.num_bytes

    def __del__(self) -> None:
        if self.num_bytes > _LARGE_BYTES:
            trim_soon()


class Opened:
    """A place in the budget for one request, given back when nobody holds it any more."""

    def __init__(
        self,
        weight: Weight,
        compiled: Compiled | None,
        compile_it: Callable[[], Compiled],
        grow: Callable[[Compiled, int], None],
    ) -> None:
        self._compile = compile_it
        self._grow = grow
        self.weight = weight
        self.compiled = compiled

    @property
    def costs_s(self) -> float:
        """What it takes to begin, of a processor's time."""
        return self.weight.seconds if self.compiled is None else 0.0

    def start(self) -> Any:
        """A matcher at the beginning; compiled anew where it is not kept."""
        if self.compiled is None:
            self.compiled = self._compile()
        return self.compiled.start.deep_copy()

    def grow(self, num_bytes: int) -> None:
        """See `GrammarMemory.grow`."""
        if self.compiled is not None:
            self._grow(self.compiled, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Beside what was compiled, which others may hold as well."""
        return self.weight.num_bytes // (1 if self.compiled is None else _COPY_PARTS)


class GrammarMemory:
    """Counts grammars as they are weighed. Safe to use from several threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._kept: dict[str | None, OrderedDict[StructuredOutput, Compiled]] = {}  # of each tenant the latest last
        self._compiled: WeakSet[Compiled] = WeakSet()
        self._opened: WeakSet[Opened] = WeakSet()

    @property
    def num_bytes(self) -> int:
        """Of all that are kept or used."""
        with self._lock:
            return self._used()

    def find(self, tenant: str | None, output: StructuredOutput) -> Compiled | None:
        """One that is kept."""
        with self._lock:
            kept = self._kept.get(tenant, OrderedDict())
            if output in kept:
                kept.move_to_end(output)
            return kept.get(output)

    def keep(self, tenant: str | None, output: StructuredOutput, compiled: Compiled) -> None:
        """Keep it for whoever asks next, as long as there is room: half of the budget for all that nobody uses."""
        with self._lock:
            self._compiled.add(compiled)
            self._kept.setdefault(tenant, OrderedDict())[output] = compiled
            while sum(self._weights().values()) > self._most // 2 or sum(map(len, self._kept.values())) > _MOST_KEPT:
                self._forget_one()
            while self._used() > self._most and self._kept:
                self._forget_one()

    def open(
        self, weight: Weight, compiled: Compiled | None, compile_it: Callable[[], Compiled], *, may_refuse: bool
    ) -> Opened | None:
        """A place for one that weighs so much, of which ``compiled`` may be kept; what is only kept leaves for it.

        None where those in use leave no room, but never for a small one, or where none is in use.
        """
        opened = Opened(weight, compiled, compile_it, self.grow)
        with self._lock:
            while self._used() + opened.num_bytes > self._most and self._kept:
                self._forget_one()
            is_large = opened.num_bytes > self._most // _SMALL_PARTS
            if may_refuse and is_large and self._opened and self._used() + opened.num_bytes > self._most:
                return None
            self._opened.add(opened)
            return opened

    def grow(self, compiled: Compiled, num_bytes: int) -> None:
        """Count what masks have added to a grammar, as measured; what is only kept leaves for it."""
        with self._lock:
            compiled.num_bytes = max(compiled.weight.num_bytes, compiled.num_bytes + num_bytes)
            while self._used() > self._most and self._kept:
                self._forget_one()

    def _used(self) -> int:
        opened = list(self._opened)
        return sum(each.num_bytes for each in list(self._compiled)) + sum(each.num_bytes for each in opened)

    def _weights(self) -> Counter[str | None]:
        """Bytes that each tenant has kept."""
        kept = {tenant: sum(each.num_bytes for each in of.values()) for tenant, of in self._kept.items()}
        return Counter(kept)

    def _forget_one(self) -> None:
        """Of who keeps most, what was used longest ago: so nobody loses what is within an equal share."""
        tenant = self._weights().most_common(1)[0][0]
        self._kept[tenant].popitem(last=False)
        if not self._kept[tenant]:
            del self._kept[tenant]


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ord", "sm", "h", "hblkhd", "usm", "fsm", "uordblks", "ford", "keepcost")
    ]


@cache
def _mallinfo() -> Any:
    """glibc's; None with another C library, which does not say what is given out."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if found is not None:
        found.restype = _Mallinfo2
    return found


def allocated_bytes() -> int:
    """What the allocator has given out to all threads; 0 where it does not say."""
    if (mallinfo := _mallinfo()) is None:
        return 0
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


_trim: threading.Timer | None = None


def trim_soon() -> None:
    """Give the system back what is free by then: glibc's allocator keeps it otherwise. Takes no lock, never raises."""
    global _trim
    if _trim is None and _mallinfo() is not None:
        timer = threading.Timer(_TRIM_AFTER_S, _trim_now)
        timer.daemon = True
        with suppress(RuntimeError):  # the process ends, or can have no further thread
            timer.start()
            _trim = timer


def _trim_now() -> None:
    global _trim
    _trim = None
    ctypes.CDLL(None).malloc_trim(0)
