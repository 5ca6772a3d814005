"""Thread pools that run blocking work for the event loop, in round-robin order of the tenants.

Each kind of work has its own pool, so that slow work of one kind does not delay other kinds.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from server.base.request_record import current_record
from ssd.errors import QueueFull

P = ParamSpec("P")
T = TypeVar("T")

LONG_CHARACTERS = 1 << 14
"""Texts with more characters than this are tokenized by the thread pool for long texts. Tokenizing so many characters
takes about 10 ms.
"""

LONG_GRAMMAR = 1 << 12
"""Grammars with a higher estimated cost than this are compiled by the thread pool for slow grammars. Compiling a
grammar of this cost takes about 10 ms.
"""

LARGE_BODY_BYTES = 1 << 20
"""Request bodies with more bytes than this are parsed by the thread pool for large bodies, because parsing one can take
0.2 s.
"""


class FairExecutor:
    """A thread pool that serves tenants in round-robin order, so that a tenant with many calls delays only itself.

    Each call has a cost of at least ``unit``. A call raises QueueFull if the tenant has other calls that wait or run,
    and their total cost including this call would exceed ``(num_threads + max_waiting) * unit``. If the server has no
    tenants, all requests share this limit and are served in round-robin order. All methods must be called from one
    event loop. ``name`` says in error messages what kind of work the pool does.
    """

    def __init__(self, name: str, *, num_threads: int, max_waiting: int, unit: int = 1) -> None:
        self._name, self._unit, self._num_idle = name, unit, num_threads
        self._most = (num_threads + max_waiting) * unit
        self._costs: Counter[str | None] = Counter()  # the cost of each tenant's waiting and running calls
        self._lines: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant comes first
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``call`` on a thread of the pool and return its result.

        Raises QueueFull if too many calls of the tenant are waiting or running.
        """
        return await self.run_with_cost(self._unit, partial(call, *args, **kwargs))

    async def run_with_cost(self, cost: int, call: Callable[[], T]) -> T:
        """Run ``call`` on a thread of the pool, counting ``cost`` against the tenant's queue limit."""
        record, cost = current_record(), max(self._unit, cost)
        if self._costs[record.tenant] and self._costs[record.tenant] + cost > self._most:
            raise QueueFull(f"too many requests wait for {self._name}: try again later")
        self._costs[record.tenant] += cost
        has_turn = False
        try:
            await self._wait_for_thread(record.tenant or record.request_id)
            has_turn = True
            future = self._threads.submit(call)
        except BaseException:
            self._release(record.tenant, cost, has_turn)
            raise
        loop = asyncio.get_running_loop()
        waiting = asyncio.wrap_future(future)
        future.add_done_callback(lambda _: _call_in_loop(loop, partial(self._release, record.tenant, cost, True)))
        return await waiting

    async def _wait_for_thread(self, whose: str | None) -> None:
        if self._num_idle:  # then no call is waiting
            self._num_idle -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(whose, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake_next()
            raise

    def _wake_next(self) -> None:
        while self._lines:
            whose, line = next(iter(self._lines.items()))
            turn = line.popleft()
            if line:
                self._lines.move_to_end(whose)
            else:
                del self._lines[whose]
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self._num_idle += 1

    def _release(self, tenant: str | None, cost: int, had_turn: bool) -> None:
        self._costs[tenant] -= cost
        if not self._costs[tenant]:
            del self._costs[tenant]
        if had_turn:
            self._wake_next()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for line in self._lines.values():
            for turn in line:
                turn.cancel()


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class FairExecutors:
    """All thread pools of a server, one for each kind and size of work."""

    def __init__(self) -> None:
        self._bodies = FairExecutor("reading bodies", num_threads=1, max_waiting=256)
        self._large_bodies = FairExecutor("reading large bodies", num_threads=1, max_waiting=64)
        self._short_texts = FairExecutor("tokenising", num_threads=2, max_waiting=1024)
        self._long_texts = FairExecutor("tokenising long texts", num_threads=1, max_waiting=64, unit=1 << 17)
        self._short_grammars = FairExecutor("compiling grammars", num_threads=1, max_waiting=64)
        self._long_grammars = FairExecutor("compiling long grammars", num_threads=1, max_waiting=16)
        self.tools = FairExecutor("/tokenize and /detokenize", num_threads=1, max_waiting=16)
        self.management = FairExecutor("managing tenants", num_threads=1, max_waiting=16)
        """The thread pool for the deletion of tenants' caches, because a deletion waits for files and for Redis."""
        self.metrics = FairExecutor("reading metrics", num_threads=1, max_waiting=16)
        """The thread pool for /metrics, which needs no API key and must not delay clients with a key."""
        self.answers = FairExecutor("writing answers", num_threads=2, max_waiting=4096)
        """The thread pool for submitting requests with many choices, for counting accepted prediction tokens, and for
        serializing long responses.
        """

    async def run_on_text(self, num_characters: int, call: Callable[[], T]) -> T:
        if num_characters <= LONG_CHARACTERS:
            return await self._short_texts.run(call)
        return await self._long_texts.run_with_cost(num_characters, call)

    def grammar(self, cost: int) -> FairExecutor:
        return self._short_grammars if cost <= LONG_GRAMMAR else self._long_grammars

    def body(self, num_bytes: int) -> FairExecutor:
        return self._bodies if num_bytes <= LARGE_BODY_BYTES else self._large_bodies

    def close(self) -> None:
        for lane in vars(self).values():
            lane.close()
