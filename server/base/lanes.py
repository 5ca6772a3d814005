"""Threads beside the event loop, each kind of work with its own: nobody waits behind work of another kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ssd.errors import QueueFull

P = ParamSpec("P")
T = TypeVar("T")

LONG_CHARACTERS = 1 << 14
"""Text beyond this is tokenised among the long ones: about 10 ms of work."""

LARGE_BODY_BYTES = 1 << 20
"""A body beyond this is parsed among the large ones: up to 0.2 s of work."""


class Lane:
    """A few threads, and a line of limited length before them. To be used from one event loop."""

    def __init__(self, name: str, *, num_threads: int, max_waiting: int) -> None:
        self._name = name
        self._most = num_threads + max_waiting
        self._under_way = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``call`` returns or raises; raises QueueFull, without calling it, where the line is full.

        A call that was begun goes on when the caller is cancelled, and keeps its place until it ends.
        """
        if self._under_way >= self._most:
            raise QueueFull(f"too many requests wait for {self._name}: try again later")
        self._under_way += 1
        try:
            future = self._threads.submit(call, *args, **kwargs)
        except BaseException:
            self._under_way -= 1
            raise
        loop = asyncio.get_running_loop()
        waiting = asyncio.wrap_future(future)
        future.add_done_callback(lambda _: _tell(loop, self._leave))
        return await waiting

    def _leave(self) -> None:
        self._under_way -= 1

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class Lanes:
    """The lanes of a server.

    Tokenizers written in Rust work on several texts at once. Texts of usual length have two threads, so that one can be
    at the edge of what is short; long ones have one.
    """

    def __init__(self) -> None:
        self._bodies = Lane("reading bodies", num_threads=1, max_waiting=256)
        self._large_bodies = Lane("reading large bodies", num_threads=1, max_waiting=64)
        self._short_texts = Lane("tokenising", num_threads=2, max_waiting=1024)
        self._long_texts = Lane("tokenising long texts", num_threads=1, max_waiting=64)
        self.grammars = Lane("compiling grammars", num_threads=1, max_waiting=16)
        self.tools = Lane("/tokenize and /detokenize", num_threads=1, max_waiting=16)
        """What belongs to no generation."""
        self.management = Lane("managing tenants", num_threads=1, max_waiting=16)
        """What waits for files and for Redis: deletions."""
        self.answers = Lane("writing answers", num_threads=2, max_waiting=4096)
        """Submits many choices, counts predictions, writes whole answers and metrics."""

    def text(self, num_characters: int) -> Lane:
        """Where text of this length is tokenised."""
        return self._short_texts if num_characters <= LONG_CHARACTERS else self._long_texts

    def body(self, num_bytes: int) -> Lane:
        """Where a body of this length is parsed and checked."""
        return self._bodies if num_bytes <= LARGE_BODY_BYTES else self._large_bodies

    def close(self) -> None:
        """End all threads once they are idle."""
        for lane in vars(self).values():
            lane.close()
