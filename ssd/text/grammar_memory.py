"""Memory budget of compiled grammars, shared by cached grammars and those in use. Tenants get equal cache shares."""

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

MAX_GRAMMAR_BYTES: Final = 512 << 20
_MAX_KEPT: Final = 256
_SMALL_PARTS: Final = 128  # a grammar of at most 1/128 of the budget never waits for memory
_COPY_PARTS: Final = 8  # a request's copy adds at most 1/8 of a grammar's memory: 1.5 to 4 MB of 43 MB were measured
_TRIM_AFTER_S: Final = 0.1  # seconds; returning freed memory to the system takes 2 to 12 ms
_LARGE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class GrammarCost:
    """The memory of a compiled grammar, and the processor seconds of its compilation."""

    num_bytes: int
    seconds: float


class Compiled:
    """A compiled grammar: an llguidance matcher in its initial state, of which each request uses a copy."""

    def __init__(self, start: Any, weight: GrammarCost) -> None:
        self.start, self.weight = start, weight
        self.num_bytes = weight.num_bytes

    def __del__(self) -> None:
        if self.num_bytes > _LARGE_BYTES:
            trim_soon()


class GrammarReservation:
    """The memory reserved for one request's grammar. It is released when this object is garbage collected."""

    def __init__(
        self,
        weight: GrammarCost,
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
        """The processor seconds that `start` will take: the compilation time, or 0 if the grammar is cached."""
        return self.weight.seconds if self.compiled is None else 0.0

    def start(self) -> Any:
        """Return a copy of the grammar's llguidance matcher in its initial state; compile the grammar if needed."""
        if self.compiled is None:
            self.compiled = self._compile()
        return self.compiled.start.deep_copy()

    def grow(self, num_bytes: int) -> None:
        if self.compiled is not None:
            self._grow(self.compiled, num_bytes)

    @property
    def num_bytes(self) -> int:
        """The memory in bytes that this request needs, which is less if the grammar is cached and only copied."""
        return self.weight.num_bytes // (1 if self.compiled is None else _COPY_PARTS)


class GrammarMemory:
    """A cache of compiled grammars. Cached grammars and grammars in use stay within one memory budget. Thread-safe.

    If memory is short, the tenant whose cached grammars use the most memory loses one.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._kept: dict[str | None, OrderedDict[StructuredOutput, Compiled]] = {}  # of each tenant the latest last
        self._compiled: WeakSet[Compiled] = WeakSet()
        self._opened: WeakSet[GrammarReservation] = WeakSet()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._used()

    def find(self, tenant: str | None, output: StructuredOutput) -> Compiled | None:
        with self._lock:
            kept = self._kept.get(tenant, OrderedDict())
            if output in kept:
                kept.move_to_end(output)
            return kept.get(output)

    def store(self, tenant: str | None, output: StructuredOutput, compiled: Compiled) -> None:
        """Cache a compiled grammar. All cached grammars together use at most half of the memory budget."""
        with self._lock:
            self._compiled.add(compiled)
            self._kept.setdefault(tenant, OrderedDict())[output] = compiled
            self._evict_excess()

    def open(
        self, weight: GrammarCost, compiled: Compiled | None, compile_it: Callable[[], Compiled], *, may_refuse: bool
    ) -> GrammarReservation | None:
        """Reserve memory for a request's grammar, and evict cached grammars if memory is short; return the reservation.

        If ``may_refuse`` is True, a large grammar that does not fit next to the grammars in use gets no reservation:
        the result is None, and the request waits. Otherwise the budget may be exceeded.

        Args:
            weight: The memory of the grammar and its compilation time.
            compiled: The grammar if it is cached, else None.
            compile_it: A function that compiles the grammar.
            may_refuse: Whether None may be returned.
        """
        opened = GrammarReservation(weight, compiled, compile_it, self.grow)
        with self._lock:
            while self._used() + opened.num_bytes > self._most and self._kept:
                self._evict_one()
            is_large = opened.num_bytes > self._most // _SMALL_PARTS
            if may_refuse and is_large and self._opened and self._used() + opened.num_bytes > self._most:
                return None
            self._opened.add(opened)
            return opened

    def grow(self, compiled: Compiled, num_bytes: int) -> None:
        """Count memory that a compiled grammar allocated for token masks; evict cached grammars if memory is short."""
        with self._lock:
            compiled.num_bytes = max(compiled.weight.num_bytes, compiled.num_bytes + num_bytes)
            self._evict_excess()

    def _used(self) -> int:
        opened = list(self._opened)
        return sum(each.num_bytes for each in list(self._compiled)) + sum(each.num_bytes for each in opened)

    def _weights(self) -> Counter[str | None]:
        kept = {tenant: sum(each.num_bytes for each in of.values()) for tenant, of in self._kept.items()}
        return Counter(kept)

    def _evict_excess(self) -> None:
        while sum(self._weights().values()) > self._most // 2 or sum(map(len, self._kept.values())) > _MAX_KEPT:
            self._evict_one()
        while self._used() > self._most and self._kept:
            self._evict_one()

    def _evict_one(self) -> None:
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
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if found is not None:
        found.restype = _Mallinfo2
    return found


def allocated_bytes() -> int:
    """Return the number of bytes that this process has allocated from the C library; 0 unless that is glibc."""
    if (mallinfo := _mallinfo()) is None:
        return 0
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


_trim: threading.Timer | None = None


def trim_soon() -> None:
    """Let the C library return freed memory to the system in 0.1 s, if it is glibc.

    The function may be called from a finalizer: it acquires no lock and raises no exception.
    """
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
