"""Running a step again and again: eagerly, or as a CUDA graph.

A **step** is a function without arguments that reads and writes tensors which stay where they are. The same step runs
either way, so that what runs as a graph is tested where there is no GPU.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

Step = Callable[[], None]
Recorder = Callable[[Step], Step]
"""Makes of a step one that does the same. The step has run before, so that it allocates no lasting memory."""

_WARM_UPS = 2

_GIVEN_UP: list[torch.cuda.CUDAGraph] = []
_RECORDING = threading.Lock()
"""Engines of one process that are opened at once take turns on the stream that they share."""


def eagerly(step: Step) -> Step:
    """The step as it is: every kernel is launched from Python."""
    return step


class CudaGraphs:
    """Records steps as CUDA graphs of one memory pool: they never run at the same time, so they share intermediates.

    All of a process are tried and recorded on one stream: libraries keep a workspace for every stream they ever ran on,
    tens of megabytes each. Raises whatever a step does that cannot be recorded: RuntimeError where it waits for the
    device (a mixture of experts that asks which ones were chosen), torch.AcceleratorError, torch.OutOfMemoryError.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """One launch in place of hundreds. What the step allocates belongs to the graph and must not be kept."""
        with _RECORDING, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream), _refusing_to_wait():
                for _ in range(_WARM_UPS):  # libraries set themselves up in their first calls on a stream
                    step()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads of the process may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    step()
            except BaseException:
                torch.cuda.set_stream(current)  # torch may leave its recording stream in place
                self._leave(graph)
                torch.cuda.synchronize()
                self._record_nothing()
                raise
        return graph.replay

    def _leave(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that the driver gave up, which torch takes to be still under way.

        While it is, memory is never given back to the device, and nothing can be recorded. The graph lives on, as torch
        may still ask it which memory is its own.
        """
        _GIVEN_UP.append(graph)
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # torch has ended it
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()

    def _record_nothing(self) -> None:
        """Record what ends well: torch's generator takes the one given up to be under way, and draws no numbers."""
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=self._device)


@cache
def _stream_of(device: torch.device) -> Any:
    """What steps are recorded on, of a device with its index."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """A step that waits for the device raises here: a failure while recording would cost more than the recording."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see every wait; the recording itself sees the others
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
