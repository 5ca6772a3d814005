"""Forward passes of a few fixed shapes, each captured as a CUDA graph so that one launch replays it.

A **pass function** runs a forward pass. It has no arguments and reads and writes tensors at fixed addresses. The same
function runs eagerly or as a graph, so the code of graphs can be tested without a GPU.
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
from ssd.model.cuda_graphs.buffers import Ints, PassBuffers, PassShape, powers_of_two
from ssd.model.kv.kv_cache import AttentionKernel, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.sampling.sampler import Noise, PassOutput, Sampler

PassFunction = Callable[[], None]
CaptureFunction = Callable[[PassFunction], PassFunction]
"""A function that captures a forward pass: it takes the function that runs the pass and returns one that replays it."""

_WARM_UPS = 2

_ABORTED: list[torch.cuda.CUDAGraph] = []
# Captures are serialised, because engines that start at the same time in one process share a stream.
_CAPTURING = threading.Lock()


def run_eagerly(run_pass: PassFunction) -> PassFunction:
    """Return the function ``run_pass`` unchanged. Used in place of `CudaGraphCapture` to run forward passes eagerly."""
    return run_pass


class CudaGraphCapture:
    """Captures forward passes as CUDA graphs. The graphs share one memory pool, because they never run concurrently.

    All graphs of a process are captured on one CUDA stream, because libraries keep tens of megabytes for each stream.
    If a pass cannot be captured, the error is raised to the caller: RuntimeError if the pass waits for the device (for
    example because the host reads which experts were chosen), torch.AcceleratorError or torch.OutOfMemoryError.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run_pass: PassFunction) -> PassFunction:
        """Capture the forward pass that ``run_pass`` runs, and return a function that replays it as a CUDA graph.

        The graph reuses the memory that ``run_pass`` allocates, so keep no reference to these tensors.
        """
        with _CAPTURING, no_garbage_collection(), torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream), _forbid_synchronisation():
                for _ in range(_WARM_UPS):  # libraries initialise themselves in their first calls on a stream
                    run_pass()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads of the process may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    run_pass()
            except BaseException:
                torch.cuda.set_stream(current)  # torch may leave its capture stream as the current one
                self._end_aborted_capture(graph)
                torch.cuda.synchronize()
                self._capture_nothing()
                raise
        return graph.replay

    def _end_aborted_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make torch end a graph capture that the CUDA driver has aborted; until then, torch refuses other captures."""
        _ABORTED.append(graph)
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # torch has already ended the capture
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()

    def _capture_nothing(self) -> None:
        """Capture an empty CUDA graph after an aborted one, so that torch's random generator leaves capture mode."""
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=self._device)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collection in this context, because freeing an old CUDA graph would abort a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _forbid_synchronisation() -> Iterator[None]:
    """Make operations that wait for the GPU raise an error in this context, because they cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every wait; the capture does
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


log = logging.getLogger(__name__)

_MAX_POSITIONS = 512  # the maximum of rows times width; a larger pass computes for longer than its launches take

_MAX_SHAPES = 96  # the maximum number of captured shapes; the least recently used shape is evicted

_MIN_KEYS = 256


class ScoringTarget(Protocol):
    """The methods of a target model that `CudaGraphRunner` requires."""

    kv_cache: SlotKVCache
    max_length: int
    max_width: int

    def score(self, tokens: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        """Return the logits [B, T, V] of new tokens, int64[B, T], without changing the lengths of KV cache slots."""


class CudaGraphRunner:
    """Runs forward passes of a target model as CUDA graphs. The inputs of a pass are padded to one of a few shapes.

    The number of rows, the width (tokens per row) and the number of keys are each rounded up to a power of two or to
    their maximum. With an attention ``kernel``, which reads only each row's own keys, the number of keys is always the
    maximum. A shape is captured when it is first needed, and its logits are compared with those of an eager pass. If a
    capture fails, or its logits differ by a relative error above ``tolerance``, a warning is logged and all graphs are
    disabled: `run` then returns None and the caller runs an eager pass.

    Without a ``kernel``, torch's attention is used; without a ``sampler``, passes accept no noise. With ``keeps_top``,
    passes also return the most probable tokens. Padding is written to the positions of the target's slots from
    ``max_length`` on, so these positions must never hold text.

    Attributes:
        moves: Copies positions in the KV cache by a CUDA graph, for the accepted paths of draft trees.
        failure: Why graphs are disabled; None while they are enabled.
    """

    def __init__(
        self,
        target: ScoringTarget,
        capture: CaptureFunction,
        *,
        tolerance: float,
        kernel: AttentionKernel | None = None,
        sampler: Sampler | None = None,
        name: str = "static shapes",
        keeps_top: bool = False,
    ) -> None:
        kv_cache, max_length, max_width = target.kv_cache, target.max_length, target.max_width
        assert kv_cache.max_length >= max_length + max_width
        self.name = name
        self._score = target.score
        self._kv_cache = kv_cache
        self._max_length = max_length
        self._capture_pass = capture
        self._tolerance = tolerance
        self._kernel = kernel
        self._rows = powers_of_two(1, kv_cache.num_slots)
        self._widths = powers_of_two(1, max_width)
        self._keys = [kv_cache.max_length] if kernel else powers_of_two(_MIN_KEYS, kv_cache.max_length)
        self._most_positions = max(_MAX_POSITIONS, kv_cache.num_slots)
        self._supports_noise = sampler is not None
        self._buffers = PassBuffers(
            kv_cache.num_slots, self._most_positions, max_width, kv_cache.device, sampler, keeps_top=keeps_top
        )
        self._graphs: OrderedDict[PassShape, PassFunction] = OrderedDict()
        self.moves = CapturedMoves(kv_cache, scratch=max_length, capture=capture)
        self.failure: str | None = None

    @property
    def supports_noise(self) -> bool:
        """Whether CUDA graphs are enabled and can sample tokens with Gumbel noise on the GPU."""
        return self._supports_noise and self.failure is None

    def shape_of(self, num_rows: int, width: int, longest: int, *, is_tree: bool) -> PassShape | None:
        """Return the smallest shape of a CUDA graph into which a forward pass fits; None if the pass is too large.

        ``longest`` is the number of tokens in the longest KV cache slot of the pass.
        """
        if num_rows > self._rows[-1] or width > self._widths[-1]:
            return None
        rows, wide = _round_up(num_rows, self._rows), _round_up(width, self._widths)
        if rows * wide > self._most_positions:
            return None
        return PassShape(rows, wide, _round_up(longest + wide, self._keys), is_tree)

    def run(self, slots: Ints, tokens: Ints, trees: TreeShape | None, noise: Noise | None = None) -> PassOutput | None:
        """Run a forward pass that appends ``tokens``, int64[B, T], to KV cache slots, by replaying a CUDA graph.

        The lengths of the slots stay unchanged. Pass ``noise`` only if `supports_noise` is True. Returns None if there
        is no graph for this pass and it cannot be captured; the caller then runs an eager pass.
        """
        starts = self._kv_cache.lengths[slots]
        num_rows, width = tokens.shape
        shape = self.shape_of(num_rows, width, int(starts.max()), is_tree=trees is not None)
        if self.failure is not None or shape is None:
            return None
        self._buffers.fill(shape, slots, starts, tokens, trees, self._max_length, noise)
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            self._graphs[shape]()
        elif not self._capture(shape, num_rows):
            return None
        return self._outputs(shape, num_rows, width, noise)

    def _outputs(self, shape: PassShape, num_rows: int, width: int, noise: Noise | None) -> PassOutput:
        logits, sampled, top = self._buffers.outputs(shape, num_rows, width)
        return PassOutput(logits, sampled, noise, top)

    def _next_shape(self, slots: Ints) -> PassShape | None:
        return self.shape_of(len(slots), 1, int(self._kv_cache.lengths[slots].max()), is_tree=False)

    def can_run_ahead(self, slots: Ints) -> bool:
        """Return whether `run_ahead` can be called for ``slots``: the CUDA graph that it needs has been captured."""
        return self.failure is None and self._next_shape(slots) in self._graphs

    def run_ahead(self, slots: Ints, noise: Noise | None = None) -> PassOutput:
        """Launch the next decoding step before the host has read the tokens that the last forward pass sampled.

        The sampled tokens are copied to the inputs on the GPU, so the GPU does not wait for the host. ``slots`` must be
        the slots of the last pass.
        """
        shape = self._next_shape(slots)
        assert shape is not None
        starts, nothing = self._kv_cache.lengths[slots], np.zeros((len(slots), 1), np.int64)
        self._buffers.fill(shape, slots, starts, nothing, None, self._max_length, noise)
        self._buffers.feed_sampled(len(slots))
        self._graphs.move_to_end(shape)
        self._graphs[shape]()
        return self._outputs(shape, len(slots), 1, noise)

    @torch.inference_mode()
    def warm_up(self, *, with_trees: bool) -> None:
        """Capture CUDA graphs of the most frequent shapes: draft chains for all batch sizes, and one row's draft trees.

        The largest shapes, which need the most memory, are captured first.
        """
        shapes = {(rows, width, False) for rows in self._rows for width in self._widths}
        if with_trees:
            shapes |= {(1, width, True) for width in self._widths}
            self.moves.open()
        for rows, width, is_tree in sorted(shapes, reverse=True):
            tokens = torch.zeros(rows, width, dtype=torch.int64).numpy()
            chain = torch.arange(-1, width - 1).repeat(rows, 1).numpy()
            # This writes only beyond the slots' lengths.
            self.run(np.arange(rows), tokens, TreeShape.build(chain) if is_tree else None)

    def _capture(self, shape: PassShape, num_rows: int) -> bool:
        """Capture a CUDA graph for this shape, and return whether its logits match those of an eager forward pass."""

        def run_pass() -> None:
            inputs = self._buffers.inputs(shape, self._kv_cache, self._kernel)
            self._buffers.store(self._score(inputs.tokens, inputs.rows), inputs)

        try:
            run_pass()
            found = self._buffers.outputs(shape, num_rows, shape.width)[0]
            expected = found.clone()
            replay = self._capture_pass(run_pass)
            found.zero_()  # so that a graph that computes nothing is detected
            replay()
            error, size = (
                float(torch.linalg.vector_norm(x, dtype=torch.float32)) for x in (found - expected, expected)
            )
            if not error <= self._tolerance * size:
                raise ValueError(
                    f"the graph's logits differ by {error:.2g} from those of an eager pass; their norm is {size:.2g}"
                )
        # After any failure eager passes are right; if one shape fails, others are not tried.
        except Exception as failure:
            self._graphs.clear()
            self.failure = first_line(failure)
            log.warning(
                "CUDA graphs are disabled, because the capture of %s failed: %s. Forward passes are slower, but "
                "correct",
                shape,
                self.failure,
            )
            return False
        self._graphs[shape] = replay
        if len(self._graphs) > _MAX_SHAPES:
            self._graphs.popitem(last=False)
        return True


def _round_up(number: int, sizes: list[int]) -> int:
    return sizes[bisect_left(sizes, number)]


_MAX_MOVES = 256


class CapturedMoves:
    """Copies up to 256 positions within KV cache slots by one CUDA graph, which is faster than `SlotKVCache.move`.

    The graph is captured and tested on positions that hold no text, because repeated copies could corrupt text.
    ``scratch`` is the first of at least two positions at the end of every slot that never hold text.
    """

    def __init__(self, kv_cache: SlotKVCache, *, scratch: int, capture: CaptureFunction) -> None:
        self._kv_cache, self._scratch, self._capture_pass = kv_cache, scratch, capture
        self._ints = torch.zeros(3, _MAX_MOVES, dtype=torch.int64, device=kv_cache.device)
        self._moves: PassFunction | None = None
        self._has_failed = scratch + 2 > kv_cache.max_length

    def run(self, moves: torch.Tensor) -> bool:
        """Copy positions within KV cache slots by replaying the CUDA graph.

        ``moves`` has the format of `SlotKVCache.move`, but is on the host. Returns False without copying if the graph
        cannot be used; the caller then uses `SlotKVCache.move`.
        """
        if moves.shape[1] > _MAX_MOVES or not self.open():
            return False
        assert self._moves is not None
        self._fill(moves)
        self._moves()
        return True

    @torch.inference_mode()
    def open(self) -> bool:
        """Capture the CUDA graph on the first call, and return whether it is usable."""
        if self._has_failed or self._moves is not None:
            return not self._has_failed
        assert self._kv_cache.bytes_per_token  # all layers are allocated; layers allocated later would not be moved

        def run_pass() -> None:
            self._kv_cache.move(self._ints)

        try:
            self._fill(torch.tensor([[0], [self._scratch + 1], [self._scratch]]))
            run_pass()
            replay = self._capture_pass(run_pass)
            for stored in self._kv_cache.tensors():
                stored[0, :, self._scratch] += 1
            replay()
            copies = (stored[0, :, self._scratch : self._scratch + 2] for stored in self._kv_cache.tensors())
            if not all(torch.equal(each[:, 0], each[:, 1]) for each in copies):
                raise ValueError("the captured CUDA graph did not copy the KV entries")
        except Exception as failure:  # moving layer by layer is right in any case
            self._has_failed = True
            log.warning(
                "the CUDA graph that moves accepted KV entries of draft trees failed: %s. The entries are moved "
                "layer by layer, which is slower, but correct",
                first_line(failure),
            )
            return False
        self._moves = replay
        return True

    def _fill(self, moves: torch.Tensor) -> None:
        sent = torch.empty(self._ints.shape, dtype=torch.int64, pin_memory=self._ints.is_cuda)
        sent[:, : moves.shape[1]], sent[:, moves.shape[1] :] = moves, moves[:, -1:]
        self._ints.copy_(sent, non_blocking=True)  # torch keeps pinned memory until the copy has finished
