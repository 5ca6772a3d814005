"""Selection of the CUDA graph variant for a target: the first variant that runs and matches eager forward passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from ssd.errors import first_line
from ssd.model.cuda_graphs.graph_runner import CaptureFunction, CudaGraphCapture, CudaGraphRunner, run_eagerly
from ssd.model.kv.kv_cache import AttentionKernel
from ssd.model.runners.probe import relative_error, score_as_trees, score_batched, score_tokens
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import Sampler, select_sampler

log = logging.getLogger(__name__)

# The number of tokens in each slot of the test, if slots are that long: enough for several splits of the attention
# kernel, for one split, and for one block of keys. Fewer rows are used if there are fewer slots.
_PROMPT_LENGTHS = (700, 3, 90)
_SCORED = 24
_WIDTHS = (1, 5, 9, 3)


class GraphVariant(NamedTuple):
    """A way to run fixed-shape forward passes: CUDA graphs or eager, torch's or SSD's attention, and a sampler."""

    name: str
    make_capture: Callable[[], CaptureFunction]  # may raise if the device does not support it
    kernel: AttentionKernel | None = None  # None: torch's attention
    sampler: Sampler | None = None  # None: passes do not sample


def attach_cuda_graphs(
    target: SlotRunner, *, tolerance: float, enforce_eager: bool = False, keeps_top: bool = False
) -> None:
    """Use CUDA graphs for a target's forward passes, in the fastest variant whose logits match those of eager passes.

    No slot of the target may contain tokens. On devices other than CUDA nothing is done, because kernel launches are
    not the bottleneck there. ``tolerance`` is the maximum relative error of the logits. With ``enforce_eager`` no
    graphs are captured, which saves their memory. With ``keeps_top``, forward passes also return the most probable
    tokens.
    """
    if target.device.type == "cuda":
        attach_first_valid(
            target, _list_variants(target.device, enforce_eager), tolerance=tolerance, keeps_top=keeps_top
        )


def attach_first_valid(
    target: SlotRunner, candidates: Iterable[GraphVariant], *, tolerance: float, keeps_top: bool = False
) -> None:
    """Use the first of several CUDA graph variants that runs and matches eager passes; if none does, stay eager."""
    for name, make_capture, kernel, sampler in candidates:
        try:
            target.graph_runner = CudaGraphRunner(
                target,
                make_capture(),
                kernel=kernel,
                sampler=sampler,
                tolerance=tolerance,
                name=name,
                keeps_top=keeps_top,
            )
            error = measure_graph_error(target)
            if error <= tolerance:
                log.info("forward passes use %s (relative error to eager passes: %.2g)", name, error)
                return
            log.warning(
                "%s differ from eager passes and are not used (relative error %.2g): forward passes are slower, "
                "but correct",
                name,
                error,
            )
        # The driver, the compiler or the model may fail; eager passes are right in any case.
        except Exception as failure:
            log.warning("%s cannot be used: %s", name, first_line(failure))
            log.debug("%s cannot be used", name, exc_info=True)
        finally:
            for slot in range(target.num_slots):
                target.rollback(slot, 0)
    target.graph_runner = None


def measure_graph_error(target: SlotRunner) -> float:
    """Return the largest relative error of a target's logits in CUDA graphs, compared with eager forward passes.

    Up to three texts are scored in batched passes of different widths and, if the target verifies trees, as draft
    trees. This is done twice, so that graphs are tested both at their capture and at a replay. No slot may contain
    tokens. Raises RuntimeError if a capture fails.
    """
    runner, random = target.graph_runner, np.random.default_rng(0)
    assert runner is not None
    slots = list(range(target.num_slots))[::-1][: len(_PROMPT_LENGTHS)]
    behind = max(1, min(_SCORED, target.max_length - 1))
    starts = [max(0, min(length, target.max_length - behind)) for length in _PROMPT_LENGTHS[: len(slots)]]
    texts = [random.integers(0, target.vocab_size, start + behind) for start in starts]

    def prefill_starts() -> None:
        for slot, start, text in zip(slots, starts, texts, strict=True):
            if start:
                target.prefill([slot], text[None, :start], [start])

    prefill_starts()
    target.graph_runner = None
    expected = [
        score_tokens(target, slot, text[start:]) for slot, start, text in zip(slots, starts, texts, strict=True)
    ]
    for slot in slots:
        target.rollback(slot, 0)
    target.graph_runner = runner
    pairs, widths = [], [min(width, target.max_width) for width in _WIDTHS]
    for _ in range(2):
        prefill_starts()
        pairs += score_batched(target, slots, texts, expected, widths)
        if target.can_verify_trees:
            prefill_starts()
            for slot, text, wanted in zip(slots, texts, expected, strict=True):
                pairs += score_as_trees(target, slot, text, wanted, random, target.max_width)
        if runner.failure is not None:
            raise RuntimeError(runner.failure)
    return relative_error(pairs)


def _list_variants(device: torch.device, enforce_eager: bool) -> Iterator[GraphVariant]:
    kernel: AttentionKernel | None = None
    with suppress(ImportError):  # triton comes with CUDA builds of torch; without it, torch computes attention
        from ssd.model.triton.triton_attention import triton_attention as kernel
    sampler = select_sampler(device)
    if not enforce_eager:
        if kernel is not None:
            yield GraphVariant(
                "CUDA graphs with our attention kernel", lambda: CudaGraphCapture(device), kernel, sampler
            )
        yield GraphVariant("CUDA graphs", lambda: CudaGraphCapture(device), None, sampler)
    if kernel is not None:
        yield GraphVariant("eager passes with our attention kernel", lambda: run_eagerly, kernel, sampler)
