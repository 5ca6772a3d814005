"""Steps of large shapes beside what the memory can do; repeats, drafting for many rows, and where nothing is gained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks import overhead
from benchmarks.gpu_check.scene import Found, Keep, Scene, let_go
from benchmarks.growth import repeat
from benchmarks.profile import profiles as profiled_steps
from benchmarks.steps import (
    Rows,
    Shape,
    Tokens,
    at_once,
    cache_bytes,
    copy_bytes_per_second,
    passes_of,
    random_model,
    synchronize,
    time_steps,
    tokens_said,
    weight_bytes,
)
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, DraftRequest, ScoredPass
from ssd.engine import Engine
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec


def speed_large(scene: Scene, keep: Keep) -> Found:
    """Steps, repeats and drafting on the large shape."""
    model = random_model(scene.sizes.large, dtype=scene.served_dtype, device=scene.device, speaks=True)
    found: Found = {"passed": True, "shape": scene.sizes.large}
    found["steps"] = steps(scene, model, found, keep, scene.sizes.step_batches)
    keep(found)
    let_go(model.device)
    tokens = _REPEATED_TOKENS if scene.device != "cpu" else 24
    found["repeats"] = repeat(model, _numbers(), 4, tokens, DraftConfig().num_speculative_tokens)
    print(f"  repeats at batch 1: {found['repeats']['speedup_second']}x", flush=True)
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


_REPEATED_TOKENS = 256
_OUTPUT_TOKENS = 96
_UNTIMED_STEPS = 8


class TimedDrafter(SuffixDrafter):
    """The default drafter; notes the seconds of its calls since they were last taken."""

    seconds = 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Timed."""
        began = time.perf_counter()
        drafts = super().propose(requests)
        self.seconds += time.perf_counter() - began
        return drafts

    def observe_scores(self, scored: ScoredPass) -> None:
        """Timed."""
        began = time.perf_counter()
        super().observe_scores(scored)
        self.seconds += time.perf_counter() - began

    def learn_scores(self, scored: ScoredPass) -> None:
        """Timed."""
        began = time.perf_counter()
        super().learn_scores(scored)
        self.seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Since the last time."""
        taken, self.seconds = self.seconds, 0.0
        return taken


def propose(scene: Scene, model: PreTrainedModel) -> Found:
    """Milliseconds and share of a step: of text that is new, and of the same requests when they come again.

    A step's share is what the drafter's calls took of it, those that are skipped to keep it low among them.
    """
    sizes, draft = scene.sizes, DraftConfig()
    num_tokens, length = (_OUTPUT_TOKENS, sizes.context // 4) if scene.device != "cpu" else (16, 16)
    random = np.random.default_rng(0)
    prompts = random.integers(3, model.config.vocab_size, (sizes.propose_rows, length)).astype(np.int32)
    found: Found = {"rows": sizes.propose_rows, "index_tokens": sizes.index_tokens}
    target = open_target(
        model,
        num_slots=sizes.propose_rows,
        max_length=length + num_tokens + 8,
        max_draft_tokens=draft.num_speculative_tokens,
        keeps_top=True,
    )
    drafter = TimedDrafter()
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        _fill(caches, model.config.vocab_size, sizes.index_tokens)
        engine = Engine(target, drafter=drafter, caches=caches, config=at_once(target, list(prompts)), draft=draft)
        engine.warm_up()
        for traffic in ("new", "again"):
            steps, drafting = _steps(engine, drafter, list(prompts), num_tokens)
            caches.flush()
            found[traffic] = {
                "step_ms_p50": round(1e3 * median(steps), 4),
                "drafter_ms_mean": round(1e3 * sum(drafting) / len(drafting), 4),
                "share": round(sum(drafting) / sum(steps), 4),
                "steps": len(steps),
            }
            print(
                f"  drafting for {sizes.propose_rows} rows, {traffic}: {found[traffic]['drafter_ms_mean']} ms of "
                f"{found[traffic]['step_ms_p50']}, {found[traffic]['share']:.2%} of all steps",
                flush=True,
            )
    return found


def _fill(caches: CacheSet, vocab_size: int, num_tokens: int) -> None:
    random, namespace = np.random.default_rng(1), caches.get("default")
    for _ in range(-(-num_tokens // 2048)):
        namespace.append(random.integers(3, vocab_size, 2048).astype(np.int32), prompt_length=0)
    caches.flush()


def _steps(
    engine: Engine, drafter: TimedDrafter, prompts: Sequence[Tokens], num_tokens: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps in which every row decodes, and those of the drafter in each."""
    rows = Rows(engine, prompts, num_tokens)
    steps, drafting = [], []
    while engine.has_work():
        is_full = all(rows.outputs) and engine.metrics.num_running == len(prompts)
        drafter.take_seconds()
        began = time.perf_counter()
        rows.step()
        synchronize(engine.target.device)
        took = time.perf_counter() - began
        if is_full:
            steps.append(took)
            drafting.append(drafter.take_seconds())
    kept = min(_UNTIMED_STEPS, len(steps) // 2)
    return steps[kept:], drafting[kept:]


def overhead_large(scene: Scene, keep: Keep) -> Found:
    """On the large shape: what random weights say at temperature 1 never comes again."""
    model = random_model(scene.sizes.large, dtype=scene.served_dtype, device=scene.device)
    return _overhead(scene, model, _numbers(), keep)


def _numbers() -> TextCodec:
    """Prompts for random weights: those of the bundled tokenizer are in every vocabulary that is larger."""
    return TextCodec.load(str(MODEL_PATH))


def overhead_small(scene: Scene, keep: Keep) -> Found:
    """On the small model, in float32, whose passes are so short that the host shows."""
    model = load_model(scene.model, dtype="float32", device=scene.device)
    return _overhead(scene, model, TextCodec.load(scene.model), keep)


def _overhead(scene: Scene, model: PreTrainedModel, codec: TextCodec, keep: Keep) -> Found:
    sizes = scene.sizes
    vocab_size = model.config.get_text_config().vocab_size
    found: Found = {"passed": True, "rows": []}
    for batch in sizes.overhead_batch:
        let_go(model.device)
        max_tokens = 32 if scene.device != "cpu" else 4
        for row in overhead.compare(model, codec, batch, sizes.pairs, max_tokens, most_id=vocab_size):
            found["rows"].append(row)
            found["passed"] &= not row["mismatches"] or model.dtype != torch.float32
            keep(found)
            print(
                f"  overhead, batch {batch:>2}, {row['traffic']}: tokens/s {row['tokens_ratio_p50']:.3f} "
                f"{row['tokens_ratio_95']}, first token {row['first_token_ratio_p50']:.3f}",
                flush=True,
            )
    return found


def profiles(scene: Scene, keep: Keep) -> Found:
    """Steps of one and of 16 positions a row, at every batch size; the traces go beside the result."""
    sizes = scene.sizes
    model = random_model(sizes.large, dtype=scene.served_dtype, device=scene.device, speaks=True)
    drafts = (0, 15) if scene.device != "cpu" else (0, 3)
    out = None if scene.out is None else scene.out / "traces"
    found = profiled_steps(model, None, sizes.profile_batch, drafts, sizes.context, sizes.rounds, 4, out)
    return {"passed": True, **found}
