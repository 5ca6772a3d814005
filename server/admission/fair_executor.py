"""Fair thread pools next to the event loop. Each kind of work has its own, so no kind waits for another."""

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
"""Longer texts are tokenized by the pool for long ones; this length takes about 10 ms."""

LONG_GRAMMAR = 1 << 12
"""Grammars with a higher expected cost are compiled by the pool for long ones, from 10 ms on."""

LARGE_BODY_BYTES = 1 << 20
"""Larger bodies are parsed by the pool for large ones, in up to 0.2 s."""


class FairExecutor:
    """A thread pool with a queue of limited length for each tenant. For use from one event loop.

    Tenants are served in round-robin order, one call at a time. So a tenant with many calls only waits for itself.
    Without tenants all calls share one queue, in which requests take turns.
    """

    def __init__(self, name: str, *, num_threads: int, max_waiting: int, unit: int = 1) -> None:
        """Start the threads.

        Args:
            name: The kind of work, for messages.
            num_threads: The number of threads.
            max_waiting: The number of calls of cost ``unit`` that a queue holds in addition to ``num_threads``.
            unit: The unit of the costs.
        """
        self._name = name
        self._most = (num_threads + max_waiting) * unit
        self._unit = unit
        self._num_idle = num_threads
        self._costs: Counter[str | None] = Counter()  # of what each tenant has here, waiting or under way
        self._lines: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn it is first
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return or raise what ``call`` does, or raise QueueFull. A call that has started is not cancelled."""
        return await self.run_with_cost(self._unit, partial(call, *args, **kwargs))

    async def run_with_cost(self, cost: int, call: Callable[[], T]) -> T:
        """Run a call of the given cost, at least one unit. A single call always fits."""
        record, cost = current_record(), max(self._unit, cost)
        if self._costs[record.tenant] and self._costs[record.tenant] + cost > self._most:
            raise QueueFull(f"too many requests wait for {self._name}: try again later")
        self._costs[record.tenant] += cost
        has_turn = False
        try:
            await self._turn(record.tenant or record.request_id)
            has_turn = True
            future = self._threads.submit(call)
        except BaseException:
            self._leave(record.tenant, cost, has_turn)
            raise
        loop = asyncio.get_running_loop()
        waiting = asyncio.wrap_future(future)
        future.add_done_callback(lambda _: _tell(loop, partial(self._leave, record.tenant, cost, True)))
        return await waiting

    async def _turn(self, whose: str | None) -> None:
        """Wait until a thread is free for a call of this tenant."""
        if self._num_idle:  # then nobody waits
            self._num_idle -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(whose, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the free thread to the next tenant in round-robin order."""
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

    def _leave(self, tenant: str | None, cost: int, had_turn: bool) -> None:
        self._costs[tenant] -= cost
        if not self._costs[tenant]:
            del self._costs[tenant]
        if had_turn:
            self._pass_on()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for line in self._lines.values():
            for turn in line:
                turn.cancel()


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class FairExecutors:
    """The thread pools of a server. Short texts have two threads, as some take nearly as long as long ones."""

    def __init__(self) -> None:
        self._bodies = FairExecutor("reading bodies", num_threads=1, max_waiting=256)
        self._large_bodies = FairExecutor("reading large bodies", num_threads=1, max_waiting=64)
        self._short_texts = FairExecutor("tokenising", num_threads=2, max_waiting=1024)
        self._long_texts = FairExecutor("tokenising long texts", num_threads=1, max_waiting=64, unit=1 << 17)
        self._short_grammars = FairExecutor("compiling grammars", num_threads=1, max_waiting=64)
        self._long_grammars = FairExecutor("compiling long grammars", num_threads=1, max_waiting=16)
        self.tools = FairExecutor("/tokenize and /detokenize", num_threads=1, max_waiting=16)
        """For /tokenize and /detokenize."""
        self.management = FairExecutor("managing tenants", num_threads=1, max_waiting=16)
        """For deletions, which wait for files and for Redis."""
        self.metrics = FairExecutor("reading metrics", num_threads=1, max_waiting=16)
        """For metrics, which need no key and must not delay clients with a key."""
        self.answers = FairExecutor("writing answers", num_threads=2, max_waiting=4096)
        """For submitting many choices, counting accepted predictions, and serializing long answers."""

    async def run_on_text(self, num_characters: int, call: Callable[[], T]) -> T:
        if num_characters <= LONG_CHARACTERS:
            return await self._short_texts.run(call)
        return await self._long_texts.run_with_cost(num_characters, call)

    def grammar(self, cost: int) -> FairExecutor:
        """Return the thread pool for the compilation of a grammar of this expected cost."""
        return self._short_grammars if cost <= LONG_GRAMMAR else self._long_grammars

    def body(self, num_bytes: int) -> FairExecutor:
        """Return the pool for a body of this length."""
        return self._bodies if num_bytes <= LARGE_BODY_BYTES else self._large_bodies

    def close(self) -> None:
        for lane in vars(self).values():
            lane.close()
