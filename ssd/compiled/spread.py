"""One kernel call shared by several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

_WORTH_A_THREAD = 1 << 21
"""Multiplications and additions; waking a thread takes as long as a tenth of these."""


def spread(
    kernel: Callable[..., None], arguments: tuple[Any, ...], tasks: int, work: int, threads: Callable[[], int]
) -> None:
    """Call ``kernel(*arguments, first, step)`` for all ``tasks``, of which a call does every step-th from first on.

    work : multiplications and additions of all; little is done by the calling thread alone. threads : says how many
    there may be.
    """
    if work < _WORTH_A_THREAD or (num_threads := min(threads(), tasks, 1 + work // _WORTH_A_THREAD)) <= 1:
        kernel(*arguments, 0, 1)
        return
    others = [_pool(threads()).submit(kernel, *arguments, first, num_threads) for first in range(1, num_threads)]
    try:
        kernel(*arguments, 0, num_threads)
    finally:  # what they write to is the caller's
        for other in others:
            other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="ssd-layers")
