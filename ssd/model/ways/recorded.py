"""Static steps for a target: the first that run and say what its plain passes say, with the loaded weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from ssd.errors import first_line
from ssd.model.kv.kv_cache import AttentionKernel
from ssd.model.sampling.sampler import Sampler, sampler_of
from ssd.model.steps.static_steps import CudaGraphs, Recorder, StaticSteps, eagerly
from ssd.model.ways.probe import as_trees, relative_error, scored, together
from ssd.model.ways.slot_target import SlotTarget

log = logging.getLogger(__name__)

_BEGINNINGS = (700, 3, 90)
"""Tokens held by the rows of the probe, where slots are that long: several splits of the kernel's, one, and one key
block. Fewer rows where there are fewer slots."""
_SCORED = 24
_WIDTHS = (1, 5, 9, 3)


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
        attach_first(target, _candidates(target.device, enforce_eager), tolerance=tolerance, keeps_top=keeps_top)


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
    """How far the logits of static steps are from those of plain passes, as a share of their norm; the worst.

    Rows of different length in slots of reverse order, in passes of ragged widths and as trees where those are
    verified: twice, recorded and repeated. The target must be empty. Raises RuntimeError where static steps give up.
    """
    steps, random = target.steps, np.random.default_rng(0)
    assert steps is not None
    slots = list(range(target.num_slots))[::-1][: len(_BEGINNINGS)]
    behind = max(1, min(_SCORED, target.max_length - 1))
    starts = [max(0, min(length, target.max_length - behind)) for length in _BEGINNINGS[: len(slots)]]
    texts = [random.integers(0, target.vocab_size, start + behind) for start in starts]

    def begin() -> None:
        for slot, start, text in zip(slots, starts, texts, strict=True):
            if start:
                target.prefill([slot], text[None, :start], [start])

    begin()
    target.steps = None
    expected = [scored(target, slot, text[start:]) for slot, start, text in zip(slots, starts, texts, strict=True)]
    for slot in slots:
        target.rollback(slot, 0)
    target.steps = steps
    pairs, widths = [], [min(width, target.max_width) for width in _WIDTHS]
    for _ in range(2):
        begin()
        pairs += together(target, slots, texts, expected, widths)
        if target.can_verify_trees:
            begin()
            for slot, text, wanted in zip(slots, texts, expected, strict=True):
                pairs += as_trees(target, slot, text, wanted, random, target.max_width)
        if steps.failure is not None:
            raise RuntimeError(steps.failure)
    return relative_error(pairs)


def _candidates(device: torch.device, enforce_eager: bool) -> Iterator[Candidate]:
    """What to try, fastest first."""
    kernel: AttentionKernel | None = None
    with suppress(ImportError):  # triton comes with CUDA builds of torch; without it, torch attends
        from ssd.model.kv.triton_attention import triton_attention as kernel
    sampler = sampler_of(device)
    if not enforce_eager:
        if kernel is not None:
            yield Candidate("CUDA graphs with our attention kernel", lambda: CudaGraphs(device), kernel, sampler)
        yield Candidate("CUDA graphs", lambda: CudaGraphs(device), None, sampler)
    if kernel is not None:
        yield Candidate("eager passes with our attention kernel", lambda: eagerly, kernel, sampler)
