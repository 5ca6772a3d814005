"""The check that static steps compute what plain passes compute: at start-up, on the device and loaded weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ssd.errors import first_line
from ssd.model.kv.kv_cache import AttentionKernel
from ssd.model.sampling.sampler import PassOutput, Sampler, sampler_of
from ssd.model.steps.static_steps import CudaGraphs, Recorder, StaticSteps, eagerly
from ssd.model.ways.slot_target import SlotTarget

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

_LENGTHS = (700, 3, 90)
"""Tokens held by the rows of the probe, where slots are that long: several splits of the kernel's, one, and one key
block. Fewer rows where there are fewer slots."""

_COUNTS = ([1, 1, 1], [5, 1, 3], [9, 9, 9])
_TREE = np.array([-1, 0, 0, 1, 2, 0, 5])


class Candidate(NamedTuple):
    """One way to run static steps. ``make_recorder`` may raise, as all that needs a device may."""

    name: str
    make_recorder: Callable[[], Recorder]
    kernel: AttentionKernel | None = None
    sampler: Sampler | None = None


def attach_steps(target: SlotTarget, *, tolerance: float, enforce_eager: bool = False, keeps_top: bool = False) -> None:
    """Give ``target``, which must be empty, the fastest static steps that agree with its plain passes.

    On CUDA only: elsewhere launching is not what a pass waits for. tolerance : greatest relative error of the logits.
    enforce_eager : record nothing, which saves the graphs' memory. keeps_top : have them find the most probable tokens.
    """
    if target.device.type == "cuda":
        candidates = _candidates(target.device, enforce_eager)
        attach_first(target, candidates, tolerance=tolerance, keeps_top=keeps_top)


def attach_first(
    target: SlotTarget, candidates: Iterable[Candidate], *, tolerance: float, keeps_top: bool = False
) -> None:
    """Take the first candidate that runs and agrees with plain passes; without one, passes stay plain."""
    for name, make_recorder, kernel, sampler in candidates:
        try:
            target.steps = StaticSteps(
                target, make_recorder(), kernel=kernel, sampler=sampler, tolerance=tolerance, name=name,
                keeps_top=keeps_top,
            )  # fmt: skip
            error = steps_error(target)
            if error <= tolerance:
                log.info("scoring by %s: relative error %.2g", name, error)
                return
            log.warning("%s differ from plain passes: relative error %.2g", name, error)
        # A driver, a compiler or a model that does not play along: plain passes are right in any case.
        except Exception as failure:
            log.warning("no %s: %s", name, first_line(failure))
            log.debug("no %s", name, exc_info=True)
        finally:
            for slot in range(target.num_slots):
                target.rollback(slot, 0)
    target.steps = None


def steps_error(target: SlotTarget) -> float:
    """How far the logits of static steps are from those of plain passes, as a share of their norm; the worst pass.

    Rows of different length in slots of reverse order, ragged widths, trees where they are verified; each pass is
    made plainly, taken back and made again, twice: recorded, and repeated. The target must be empty; leaves texts in
    the slots. Raises RuntimeError where static steps give up.
    """
    steps = target.steps
    assert steps is not None
    random = np.random.default_rng(0)
    slots = list(range(target.num_slots))[::-1][: len(_LENGTHS)]
    room = target.max_length - target.max_width
    target.steps = None
    lengths = [max(1, min(length, room)) for length in _LENGTHS]
    for slot, length in zip(slots, lengths, strict=False):
        target.prefill([slot], random.integers(0, target.vocab_size, (1, length)), [length])
    worst = 0.0
    for counts, parents in _passes(target, len(slots)):
        tokens = random.integers(0, target.vocab_size, (len(counts), max(counts)))
        target.steps = None
        expected = _scored(target, slots, tokens, counts, parents).logits.clone()
        target.steps = steps
        for _ in range(2):
            found = _scored(target, slots, tokens, counts, parents)
            if steps.failure is not None:
                raise RuntimeError(steps.failure)
            assert found.chosen is not None
            for b, count in enumerate(counts):
                logits, wanted = found.logits[b, :count], expected[b, :count]
                worst = max(worst, float((logits - wanted).float().norm() / wanted.float().norm()))
                if not torch.equal(found.chosen[b, :count], logits.argmax(-1)):
                    raise RuntimeError("the most probable tokens are not those of the logits")
                if not np.array_equal(
                    found.row(b).top([count])[1][0, :count, 0], logits.amax(-1).float().cpu().numpy()
                ):
                    raise RuntimeError("the most probable tokens are not those of the logits")
    return worst


def _passes(target: SlotTarget, num_rows: int) -> Iterator[tuple[list[int], Ints | None]]:
    """Counts of each pass, and parents where it is of trees."""
    for counts in _COUNTS:
        yield [min(count, target.max_width) for count in counts[:num_rows]], None
    yield [1], None
    if target.can_verify_trees:
        width = min(len(_TREE), target.max_width)
        yield [width], _TREE[None, :width]
        chain = np.arange(-1, width - 1)
        rows = [_TREE[:width], chain, _TREE[:width]][:num_rows]
        yield [width] * len(rows), np.stack(rows)


def _scored(
    target: SlotTarget, slots: Sequence[int], tokens: Ints, counts: Sequence[int], parents: Ints | None
) -> PassOutput:
    """A pass that leaves the slots as they were."""
    rows = list(slots[: len(counts)])
    held = [target.length(slot) for slot in rows]
    output = target.forward(rows, tokens, counts, parents=parents)
    for slot, length in zip(rows, held, strict=True):
        target.rollback(slot, length)
    return output


def _candidates(device: torch.device, enforce_eager: bool) -> Iterator[Candidate]:
    """What to try, fastest first."""
    kernel, sampler = triton_kernel(), sampler_of(device)
    if not enforce_eager:
        if kernel is not None:
            yield Candidate("CUDA graphs with our attention kernel", lambda: CudaGraphs(device), kernel, sampler)
        yield Candidate("CUDA graphs", lambda: CudaGraphs(device), None, sampler)
    if kernel is not None:
        yield Candidate("eager passes with our attention kernel", lambda: eagerly, kernel, sampler)


def triton_kernel() -> AttentionKernel | None:
    """Our attention kernel where Triton is installed."""
    try:
        from ssd.model.kv.triton_attention import triton_attention
    except ImportError:  # it comes with CUDA builds of torch; without it, torch attends
        return None
    return triton_attention
