"""Steps of large shapes, beside what the memory can do: plain, of more positions, and what the host adds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.decode.shapes import random_model
from benchmarks.decode.steps import (
    Shape,
    Tokens,
    cache_bytes,
    copy_bytes_per_second,
    passes_of,
    synchronize,
    time_steps,
    tokens_said,
    weight_bytes,
)
from benchmarks.gpu_check.memory import let_go
from benchmarks.gpu_check.proposing import propose
from benchmarks.gpu_check.repeats import repeats
from benchmarks.gpu_check.scene import Found, Keep, Scene
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target


def speed_large(scene: Scene, keep: Keep) -> Found:
    """Steps, repeats and drafting on the large shape."""
    model = random_model(scene.sizes.large, dtype=scene.served_dtype, device=scene.device, speaks=True)
    found: Found = {"passed": True, "shape": scene.sizes.large}
    found["steps"] = steps(scene, model, found, keep, scene.sizes.step_batches)
    keep(found)
    let_go(model.device)
    found["repeats"] = repeats(scene, model)
    keep(found)
    let_go(model.device)
    found["propose"] = propose(scene, model)
    return found


def speed_small(scene: Scene, keep: Keep) -> Found:
    """Steps of the small shape at batch 1."""
    model = random_model(scene.sizes.small, dtype=scene.served_dtype, device=scene.device, speaks=True)
    found: Found = {"passed": True, "shape": scene.sizes.small}
    found["steps"] = steps(scene, model, found, keep, ())
    return found


def speed_variants(scene: Scene, keep: Keep) -> Found:
    """The large shape launched kernel by kernel, and with fused layers: what recording and fusing bring."""
    found: Found = {"passed": True, "shape": scene.sizes.large}
    for name in ("enforce_eager", "fused"):
        model = random_model(scene.sizes.large, dtype=scene.served_dtype, device=scene.device, speaks=True)
        found[name] = steps(
            scene,
            model,
            found,
            keep,
            (),
            most_width=16,
            enforce_eager=name == "enforce_eager",
            fuse_linears=name == "fused",
        )
        keep(found)
        del model
        let_go(torch.device(scene.device))
    return found


def steps(
    scene: Scene,
    model: PreTrainedModel,
    found: Found,
    keep: Keep,
    batches: Sequence[int],
    *,
    most_width: int = 1 << 30,
    enforce_eager: bool = False,
    fuse_linears: bool = False,
) -> Found:
    """Milliseconds of a step by batch and positions, of its pass alone, and what copying the weights would take.

    ``batches`` : beside 1, each with 1, 4 and 16 positions, as many as a recorded pass takes.
    """
    sizes = scene.sizes
    bytes_read = weight_bytes(model)
    widest = min(most_width, max(sizes.step_widths))
    target = open_target(
        model,
        num_slots=max([1, *batches]),
        max_length=sizes.context + tokens_said(sizes.rounds, widest) + 8,
        max_draft_tokens=widest - 1,
        enforce_eager=enforce_eager,
        fuse_linears=fuse_linears,
    )
    copied = copy_bytes_per_second(target.device, sizes.copy_mb << 20)
    result: Found = {
        "passes": passes_of(target),
        "weight_bytes": bytes_read,
        "copy_bytes_per_s": round(copied),
        "floor_ms": round(1e3 * bytes_read / copied, 4),
        "rows": [],
    }
    widths = {1: [width for width in sizes.step_widths if width <= widest]}
    widths |= {batch: [width for width in (1, 4, 16) if batch * width <= 512 and width <= widest] for batch in batches}
    for batch, of_batch in widths.items():
        for width in of_batch:
            row = _row(target, Shape(batch, sizes.context, width - 1), sizes.rounds, bytes_read, copied)
            result["rows"].append(row)
            found["steps"] = result
            keep(found)
            print(
                f"  batch {batch:>2} T {width:>2}: step {row['step_ms_p50']:8.3f} ms, pass {row['pass_ms']:8.3f}, "
                f"host beside it {row['outside_target_ms_p50']:7.3f}, {row['of_copy']:.3f} of the copy rate",
                flush=True,
            )
    return result


def _row(target: Target, shape: Shape, rounds: int, bytes_read: int, copied: float) -> dict[str, Any]:
    random = np.random.default_rng(shape.batch)
    num_tokens = tokens_said(rounds, shape.width)
    length = max(8, shape.context - num_tokens // 2)
    prompts: list[Tokens] = [random.integers(3, target.vocab_size, length).astype(np.int32) for _ in range(shape.batch)]
    known: list[list[int]] = [[] for _ in prompts]
    if shape.draft:
        known = time_steps(target, prompts, Shape(shape.batch, shape.context, 0), num_tokens, [], None).outputs
    timing = time_steps(target, prompts, shape, rounds, known, None)
    step = median(timing.steps)
    read = bytes_read + cache_bytes(target, shape)
    alone = pass_seconds(target, shape, rounds)
    return {
        "batch": shape.batch,
        "context": shape.context,
        "T": shape.width,
        "step_ms_p50": round(1e3 * step, 4),
        "step_ms_p10_p90": [round(1e3 * float(x), 4) for x in np.percentile(timing.steps, [10, 90])],
        "pass_ms": round(1e3 * alone, 4),
        "outside_pass_share": round(1 - alone / step, 4),
        "outside_target_ms_p50": round(1e3 * median(timing.outside), 4),
        "tokens_per_step": round(timing.num_tokens / len(timing.steps), 2),
        "of_copy": round(bytes_read / copied / step, 4),
        "of_copy_with_cache": round(read / copied / step, 4),
        "changed": sum(a[: len(b)] != b[: len(a)] for a, b in zip(timing.outputs, known, strict=True) if b),
    }


def pass_seconds(target: Target, shape: Shape, rounds: int) -> float:
    """Of one pass among many that are launched without waiting: the device's time, where the host is faster.

    The best of three rounds.
    """
    slots = list(range(shape.batch))
    for slot in slots:
        target.rollback(slot, 0)  # the engine before kept what it had computed
        target.prefill([slot], np.full((1, shape.context), 5), [shape.context])
    tokens, counts = np.full((shape.batch, shape.width), 7), [shape.width] * shape.batch

    def passes(number: int) -> float:
        synchronize(target.device)
        began = time.perf_counter()
        for _ in range(number):
            target.forward(slots, tokens, counts)
            for slot in slots:
                target.rollback(slot, shape.context)
        synchronize(target.device)
        return (time.perf_counter() - began) / number

    passes(2)
    best = min(passes(rounds) for _ in range(3))
    for slot in slots:
        target.rollback(slot, 0)
    return best
