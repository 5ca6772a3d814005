"""Verify passes of few fixed shapes, so that each can be recorded once and repeated with a single launch.

A **step** is a function without arguments that reads and writes tensors which stay where they are. The same step runs
either way, so that what runs as a graph is tested where there is no GPU.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from ssd.errors import first_line
from ssd.model.kv.kv_cache import AttentionKernel, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.sampling.sampler import Noise, PassOutput, Sampler
from ssd.model.steps.buffers import Ints, StepBuffers, StepShape, powers_of_two

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

    All of a process are recorded on one stream: libraries keep tens of megabytes for every stream they ever ran on.
    Raises whatever a step does that cannot be recorded: RuntimeError where it waits for the device (a mixture of
    experts that asks which ones were chosen), torch.AcceleratorError, torch.OutOfMemoryError.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """One launch in place of hundreds. What the step allocates belongs to the graph and must not be kept."""
        with _RECORDING, collecting_nothing(), torch.cuda.device(self._device):
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
        """End a recording that the driver gave up: while torch takes it to be under way, nothing can be recorded.

        The graph lives on, as torch may still ask it which memory is its own.
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


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """No garbage is collected inside: graphs of an earlier target that are would be destroyed, which no recording
    survives."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


log = logging.getLogger(__name__)

_MOST_POSITIONS = 512
"""Rows times width of the largest pass. A larger one computes for longer than its launches take."""

_MOST_SHAPES = 96
"""Recorded at a time; the one that was used longest ago goes first."""

_FEWEST_KEYS = 256


class Scoring(Protocol):
    """What passes are recorded of: a target with slots."""

    kv_cache: SlotKVCache
    max_length: int
    max_width: int

    def score(self, tokens: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        """Logits [B, T, V] of new tokens, int64[B, T]; lengths stay as they are."""


class StaticSteps:
    """Scores new tokens of a target's slots with passes whose shapes are rounded up.

    Rows go up to a power of two or all slots, widths and keys to a power of two or the most there are. With a
    ``kernel`` that goes by each row's own length, all passes go over all keys. Each shape is recorded when it is first
    needed and compared with the same pass run eagerly. Whatever fails or differs is logged, once, and from then on
    there are no static steps: `run` returns None and the caller makes a plain pass.
    """

    def __init__(
        self,
        target: Scoring,
        record: Recorder,
        *,
        tolerance: float,
        kernel: AttentionKernel | None = None,
        sampler: Sampler | None = None,
        name: str = "static shapes",
        keeps_top: bool = False,
    ) -> None:
        """``target`` : whose passes these are; the positions of its slots beyond its length never hold text.

        tolerance : greatest relative error of the logits of a recorded pass. sampler : lets passes take noise. name :
        how passes are run, for reports. keeps_top : whether passes find the most probable tokens too.
        """
        kv_cache, max_length, max_width = target.kv_cache, target.max_length, target.max_width
        assert kv_cache.max_length >= max_length + max_width
        self.name = name
        self._score = target.score
        self._kv_cache = kv_cache
        self._max_length = max_length
        self._record = record
        self._tolerance = tolerance
        self._kernel = kernel
        self._rows = powers_of_two(1, kv_cache.num_slots)
        self._widths = powers_of_two(1, max_width)
        self._keys = [kv_cache.max_length] if kernel else powers_of_two(_FEWEST_KEYS, kv_cache.max_length)
        self._most_positions = max(_MOST_POSITIONS, kv_cache.num_slots)
        self._takes_noise = sampler is not None
        self._buffers = StepBuffers(
            kv_cache.num_slots, self._most_positions, max_width, kv_cache.device, sampler, keeps_top=keeps_top
        )
        self._steps: OrderedDict[StepShape, Step] = OrderedDict()
        self.moves = StaticMoves(kv_cache, scratch=max_length, record=record)
        """For what follows a pass over trees."""
        self.failure: str | None = None
        """Why there are no static steps any more."""

    @property
    def takes_noise(self) -> bool:
        """Whether passes choose tokens with noise."""
        return self._takes_noise and self.failure is None

    def shape_of(self, num_rows: int, width: int, longest: int, *, is_tree: bool) -> StepShape | None:
        """The shape that takes such a pass; None where none does. longest : tokens that the longest slot holds."""
        if num_rows > self._rows[-1] or width > self._widths[-1]:
            return None
        rows, wide = _rounded(num_rows, self._rows), _rounded(width, self._widths)
        if rows * wide > self._most_positions:
            return None
        return StepShape(rows, wide, _rounded(longest + wide, self._keys), is_tree)

    def run(self, slots: Ints, tokens: Ints, trees: TreeShape | None, noise: Noise | None = None) -> PassOutput | None:
        """Write and score ``tokens``, int64[B, T], behind what ``slots`` hold; lengths stay as they are.

        noise : only where it `takes_noise`. None where there is no static step for it: make a plain pass.
        """
        starts = self._kv_cache.lengths[slots]
        num_rows, width = tokens.shape
        shape = self.shape_of(num_rows, width, int(starts.max()), is_tree=trees is not None)
        if self.failure is not None or shape is None:
            return None
        self._buffers.fill(shape, slots, starts, tokens, trees, self._max_length, noise)
        if shape in self._steps:
            self._steps.move_to_end(shape)
            self._steps[shape]()
        elif not self._open(shape, num_rows):
            return None
        return self._given_out(shape, num_rows, width, noise)

    def _given_out(self, shape: StepShape, num_rows: int, width: int, noise: Noise | None) -> PassOutput:
        logits, chosen, top = self._buffers.outputs(shape, num_rows, width)
        return PassOutput(logits, chosen, noise, top)

    def _next_shape(self, slots: Ints) -> StepShape | None:
        """Of a pass over one token more of each slot."""
        return self.shape_of(len(slots), 1, int(self._kv_cache.lengths[slots].max()), is_tree=False)

    def can_follow(self, slots: Ints) -> bool:
        """Whether `follow` can be called."""
        return self.failure is None and self._next_shape(slots) in self._steps

    def follow(self, slots: Ints, noise: Noise | None = None) -> PassOutput:
        """As `run`, over the tokens that the last pass chose, one of each of the same slots."""
        shape = self._next_shape(slots)
        assert shape is not None
        starts, nothing = self._kv_cache.lengths[slots], np.zeros((len(slots), 1), np.int64)
        self._buffers.fill(shape, slots, starts, nothing, None, self._max_length, noise)
        self._buffers.feed_chosen(len(slots))
        self._steps.move_to_end(shape)
        self._steps[shape]()
        return self._given_out(shape, len(slots), 1, noise)

    @torch.inference_mode()
    def warm_up(self, *, with_trees: bool) -> None:
        """Record what is used most: chains of every size, and trees of one row. The largest first: it takes memory."""
        shapes = {(rows, width, False) for rows in self._rows for width in self._widths}
        if with_trees:
            shapes |= {(1, width, True) for width in self._widths}
            self.moves.open()
        for rows, width, is_tree in sorted(shapes, reverse=True):
            tokens = torch.zeros(rows, width, dtype=torch.int64).numpy()
            chain = torch.arange(-1, width - 1).repeat(rows, 1).numpy()
            # What this writes lies beyond the slots' lengths.
            self.run(np.arange(rows), tokens, TreeShape.build(chain) if is_tree else None)

    def _open(self, shape: StepShape, num_rows: int) -> bool:
        """Record a shape and leave the outputs of the pass that is in the buffers."""

        def step() -> None:
            inputs = self._buffers.inputs(shape, self._kv_cache, self._kernel)
            self._buffers.store(self._score(inputs.tokens, inputs.rows), inputs)

        try:
            step()
            found = self._buffers.outputs(shape, num_rows, shape.width)[0]
            expected = found.clone()
            recorded = self._record(step)
            found.zero_()  # one that repeats nothing must not seem right
            recorded()
            error, size = (
                float(torch.linalg.vector_norm(x, dtype=torch.float32)) for x in (found - expected, expected)
            )
            if not error <= self._tolerance * size:
                raise ValueError(f"its logits differ by {error:.2g}, their norm is {size:.2g}")
        # Whatever it is, a plain pass is right; one shape that fails is not worth a second try at the next.
        except Exception as failure:
            self._steps.clear()
            self.failure = first_line(failure)
            log.warning("passes are launched kernel by kernel: %s failed: %s", shape, self.failure)
            return False
        self._steps[shape] = recorded
        if len(self._steps) > _MOST_SHAPES:
            self._steps.popitem(last=False)
        return True


def _rounded(number: int, sizes: list[int]) -> int:
    return sizes[bisect_left(sizes, number)]


_MOST_MOVES = 256


class StaticMoves:
    """`SlotKVCache.move` of up to 256 positions, recorded once.

    A move that is repeated is another move, so it is recorded, and checked, on positions that hold no text.
    """

    def __init__(self, kv_cache: SlotKVCache, *, scratch: int, record: Recorder) -> None:
        """``scratch`` : the first of at least two positions of every slot that never hold text."""
        self._kv_cache, self._scratch, self._record = kv_cache, scratch, record
        self._ints = torch.zeros(3, _MOST_MOVES, dtype=torch.int64, device=kv_cache.device)
        self._step: Step | None = None
        self._has_failed = scratch + 2 > kv_cache.max_length

    def run(self, moves: torch.Tensor) -> bool:
        """Move as `SlotKVCache.move` does, ``moves`` on the host; False where that must be called instead. Nothing is
        done then.
        """
        if moves.shape[1] > _MOST_MOVES or not self.open():
            return False
        assert self._step is not None
        self._fill(moves)
        self._step()
        return True

    @torch.inference_mode()
    def open(self) -> bool:
        """Whether moves are recorded, which they are if they can be."""
        if self._has_failed or self._step is not None:
            return not self._has_failed
        assert self._kv_cache.bytes_per_token  # layers are there: what comes later would not be moved

        def step() -> None:
            self._kv_cache.move(self._ints)

        try:
            self._fill(torch.tensor([[0], [self._scratch + 1], [self._scratch]]))
            step()
            recorded = self._record(step)
            for stored in self._kv_cache.tensors():
                stored[0, :, self._scratch] += 1
            recorded()
            kept = (stored[0, :, self._scratch : self._scratch + 2] for stored in self._kv_cache.tensors())
            if not all(torch.equal(each[:, 0], each[:, 1]) for each in kept):
                raise ValueError("it did not move what it should")
        except Exception as failure:  # whatever it is, moving layer by layer is right
            self._has_failed = True
            log.warning("accepted paths are moved layer by layer: %s", first_line(failure))
            return False
        self._step = recorded
        return True

    def _fill(self, moves: torch.Tensor) -> None:
        """What is too much is the last move once more."""
        sent = torch.empty(self._ints.shape, dtype=torch.int64, pin_memory=self._ints.is_cuda)
        sent[:, : moves.shape[1]], sent[:, moves.shape[1] :] = moves, moves[:, -1:]
        self._ints.copy_(sent, non_blocking=True)  # torch keeps what is pinned until it was read
