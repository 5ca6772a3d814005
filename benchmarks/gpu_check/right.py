"""Is it right on the device? Attention against float32, and passes in every way: same logits, same text, how long?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.scene import Found, Keep, Scene, Sizes
from benchmarks.steps import passes_of, synchronize
from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import Draft, SamplingRow
from ssd.model.kv.attention import slot_attention
from ssd.model.kv.kv_cache import AttentionKernel, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.loading.load_target import DTYPES, load_model, open_target
from ssd.model.sampling.noise import Noise
from ssd.model.sampling.sampler import PassOutput, sampler_of
from ssd.model.sampling.target_tokens import noise_of, target_tokens
from ssd.model.steps.static_steps import CudaGraphs, Recorder, StaticSteps, eagerly
from ssd.model.ways.slot_target import SlotTarget
from ssd.model.ways.steps_probe import make_steps, steps_error, triton_kernel

MOST_ERROR = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Relative to the norm of the output: what rounding makes of it. float32 without reduced matrix precision."""


@dataclass(frozen=True, slots=True)
class Case:
    """``heads`` : query heads, key heads, dimension. ``lengths`` : of the rows, before the ``width`` new positions."""

    name: str
    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    width: int = 1
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_tree: bool = False


def cases(longest: int) -> Iterator[Case]:
    """Lengths, heads, windows, sinks, caps and trees, each with few and many positions."""
    llama = Case("Llama 8B", (32, 8, 128), (longest,))
    for width in (1, 2, 16, 64):
        yield replace(llama, name=f"Llama 8B, T {width}", width=width)
        ragged = (longest, 1, longest // 3, 0, longest // 2 + 1, 255, 256, 257)
        yield replace(llama, name=f"ragged rows, T {width}", lengths=ragged, width=width)
    for width in (1, 9):
        yield Case(f"one key head, T {width}", (8, 1, 64), (longest // 2, 3), width)
        yield Case(f"as many key heads, T {width}", (12, 12, 80), (longest // 2, 3), width)
        yield Case(f"small, T {width}", (4, 2, 64), (700, 3, 90), width)
        yield Case(f"window, T {width}", (32, 8, 128), (longest, 77), width, window=min(4096, longest // 2))
        yield Case(f"narrow window, T {width}", (4, 1, 256), (longest // 2, 600), width, window=512)
        yield Case(f"sinks and window, T {width}", (64, 8, 64), (longest // 2, 100), width, window=128, has_sinks=True)
        yield Case(f"sinks, T {width}", (64, 8, 64), (longest // 2, 100), width, has_sinks=True)
        yield Case(f"soft cap, T {width}", (8, 4, 256), (longest // 2, 100), width, softcap=50.0)
        yield Case(f"chunks, T {width}", (8, 2, 128), (longest // 2, 100), width, chunk=max(8, longest // 5))
    for width in (7, 17, 64):
        yield Case(f"trees, T {width}", (32, 8, 128), (longest, 5), width, is_tree=True)


def attention(scene: Scene, keep: Keep) -> Found:
    """The relative error of every case in every type; torch's own attention runs where there is no kernel."""
    device, kernel = torch.device(scene.device), triton_kernel() if scene.device != "cpu" else None
    found: Found = {"passed": True, "kernel": kernel is not None, "cases": []}
    worst = dict.fromkeys(DTYPES, 0.0)
    for case in cases(scene.sizes.longest):
        row: dict[str, Any] = {"case": case.name}
        for dtype in DTYPES:
            try:
                with sdpa_kernel(SDPBackend.MATH):  # other ways may shorten products of float32 on a device
                    expected = attend(case, DTYPES[dtype], torch.float32, device, None)
                got = attend(case, DTYPES[dtype], DTYPES[dtype], device, kernel).float()
                error = float((got - expected).norm() / expected.norm())
                row[dtype] = float(f"{error:.2g}")
                worst[dtype] = max(worst[dtype], error) if error == error else float("inf")
                is_right = error <= MOST_ERROR[dtype]
            except Exception as failure:  # a compiler that gives one case up says nothing of the next
                row[dtype], is_right = f"{type(failure).__name__}: {failure}".splitlines()[0][:200], False
            if not is_right:
                found["passed"] = False
                print(f"attention {case.name} {dtype}: error {row[dtype]}", flush=True)
        found["cases"].append(row)
        keep(found)
    found["worst"] = {dtype: float(f"{error:.2g}") for dtype, error in worst.items()}
    print(f"attention: {len(found['cases'])} cases, greatest relative error {found['worst']}")
    return found


@torch.inference_mode()
def attend(
    case: Case, rounded: torch.dtype, dtype: torch.dtype, device: torch.device, kernel: AttentionKernel | None
) -> torch.Tensor:
    """[B, T, H, D], computed in ``dtype`` from random numbers that were rounded to ``rounded``."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(rounded).to(dtype)

    (num_heads, kv_heads, dim), batch = case.heads, len(case.lengths)
    # Two dozen positions more than the longest row needs, and a slot that no row has.
    cache = SlotKVCache(batch + 1, max(case.lengths) + case.width + 24, device)
    keys, values = (numbers(batch + 1, kv_heads, cache.max_length, dim) for _ in range(2))
    cache._layers[0] = cache._allocate_keys(keys).copy_(keys), cache._allocate_values(values).copy_(values)
    slots = list(range(batch + 1))[::-1][:batch]
    cache.lengths[slots] = case.lengths
    tree = TreeShape.build(_branching(batch, case.width)) if case.is_tree else None
    rows = SlotRows.build(cache, slots, case.width, device, tree)
    rows.kernel = kernel
    query = numbers(batch, case.width, num_heads, dim).transpose(1, 2)
    key, value = numbers(batch, kv_heads, case.width, dim), numbers(batch, kv_heads, case.width, dim)
    chunked = SimpleNamespace(attention_chunk_size=case.chunk, layer_types=["chunked_attention"])
    layer: Any = SimpleNamespace(layer_idx=0, config=chunked if case.chunk else None)
    sinks = numbers(num_heads) if case.has_sinks else None
    out, _ = slot_attention(layer, query, key, value, None, dim**-0.5, case.window, case.softcap, sinks, slot_rows=rows)
    return out


def _branching(batch: int, width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Parents of trees that branch at random, int64[batch, width]."""
    random = np.random.default_rng(0)
    parents = np.full((batch, width), -1, np.int64)
    for node in range(1, width):
        parents[:, node] = random.integers(max(0, node - 4), node, batch)
    return parents


_CONTEXT = 256
_NUM_TOKENS = 32
_MOST_ERROR = {"float32": 1e-3, "bfloat16": 0.08, "float16": 0.02}
"""As `find_way` allows."""


def passes(scene: Scene, keep: Keep) -> Found:
    """For each type and way: error against plain passes, greedy tokens that differ, milliseconds of a pass.

    Float32 must say the same tokens; where shorter types differ it is counted.
    """
    sizes = scene.sizes
    found: Found = {"passed": True}
    for dtype in _MOST_ERROR:
        target = open_target(
            load_model(scene.model, dtype=dtype, device=scene.device),
            num_slots=max(sizes.batch),
            max_length=512,
            max_draft_tokens=64,
        )
        if not isinstance(target, SlotTarget):
            return {"passed": False, "reason": f"driven {target.way}"}
        ways: list[dict[str, Any]] = []
        found[dtype] = {"chosen": passes_of(target), "ways": ways}
        plain_text: list[list[int]] = []
        for name, steps in _ways(target, _MOST_ERROR[dtype]):
            way: dict[str, Any] = {"way": name}
            ways.append(way)
            try:
                target.steps = steps
                way |= _measure(target, sizes)
                text = way.pop("text")
                plain_text = plain_text or text
                differing = sum(a != b for row, plain in zip(text, plain_text, strict=True)
                                for a, b in zip(row, plain, strict=True))  # fmt: skip
                way["tokens_that_differ"] = differing
                way["passed"] = way["failure"] is None and way["error"] <= _MOST_ERROR[dtype]
                way["passed"] &= dtype != "float32" or differing == 0
                way["passed"] &= not any(row["tokens_that_differ"] for row in way["sampled"])
            except Exception as failure:  # said, and the other ways are tried
                way |= {"passed": False, "failure": f"{type(failure).__name__}: {str(failure).splitlines()[:1]}"}
            finally:
                _empty(target)
            found["passed"] &= way["passed"]
            _print(dtype, way)
            keep(found)
    return found


def _ways(target: SlotTarget, tolerance: float) -> Iterator[tuple[str, StaticSteps | None]]:
    def steps(record: Recorder, kernel: AttentionKernel | None = None) -> StaticSteps:
        return make_steps(target, record, tolerance=tolerance, kernel=kernel, sampler=sampler_of(target.device))

    yield "plain", None
    yield "static shapes", steps(eagerly)
    if target.device.type == "cuda":
        yield "graphs", steps(CudaGraphs(target.device))
        if (kernel := triton_kernel()) is not None:
            yield "static shapes, our kernel", steps(eagerly, kernel)
            yield "graphs, our kernel", steps(CudaGraphs(target.device), kernel)


def _measure(target: SlotTarget, sizes: Sizes) -> dict[str, Any]:
    steps = target.steps
    error = 0.0 if steps is None else steps_error(target)
    _empty(target)
    free, began = _free_bytes(target), time.perf_counter()
    if target.device.type != "cpu":
        target.warm_up()
    synchronize(target.device)
    return {
        "error": float(f"{error:.2g}"),
        "warm_up_s": round(time.perf_counter() - began, 2),
        "warm_up_bytes": free - _free_bytes(target),
        "recorded": 0 if steps is None else steps.num_recorded,
        "text": _greedy(target),
        "times": [
            {"batch": batch, "T": width, "ms_p50": round(1e3 * median(_seconds(target, batch, width, sizes.rounds)), 4)}
            for batch in sizes.batch
            for width in sizes.width
        ],
        "sampled": [
            _sampled(target, batch, width, sizes.rounds) for batch in sizes.batch for width in _ends(sizes.width)
        ],
        "failure": None if steps is None else steps.failure,
    }


def _greedy(target: SlotTarget) -> list[list[int]]:
    """What the model says after prompts of different length, all slots at once."""
    random, slots = np.random.default_rng(0), list(range(target.num_slots))
    for slot in slots:
        target.prefill([slot], random.integers(3, target.vocab_size, (1, 5 + 9 * slot)), [5 + 9 * slot])
    fed, text = np.full((len(slots), 1), 3), []
    for _ in range(_NUM_TOKENS):
        fed = _best(target.forward(slots, fed, [1] * len(slots))).cpu().numpy()
        text.append(fed[:, 0].tolist())
    _empty(target)
    return text


def _ends(widths: Sequence[int]) -> list[int]:
    return sorted({min(widths), max(widths)})


def _sampled(target: SlotTarget, batch: int, width: int, rounds: int) -> dict[str, Any]:
    """Times of passes whose tokens are sampled inside, where that can be, and outside; tokens that differ."""
    draft, params = Draft(np.full(width - 1, 7, np.int32)), SamplingParams(temperature=1.0)
    rows = [SamplingRow(params=params, noise=SequenceNoise.seeded(b), draft=draft) for b in range(batch)]
    found: dict[str, Any] = {"batch": batch, "T": width, "tokens_that_differ": 0}
    for name, noise in (("inside", noise_of(rows, width)), ("outside", None)):
        if noise is not None and not target.takes_noise:
            continue
        found[f"{name}_ms_p50"] = round(1e3 * median(_seconds(target, batch, width, rounds, rows, noise)), 4)
        if noise is not None:
            output = target.forward(list(range(batch)), np.full((batch, width), 7), [width] * batch, noise)
            inside, outside = target_tokens(output, rows), target_tokens(PassOutput(output.logits), rows)
            found["tokens_that_differ"] = int((inside != outside).sum())
            _empty(target)
    return found


def _seconds(
    target: SlotTarget,
    batch: int,
    width: int,
    rounds: int,
    rows: Sequence[SamplingRow] = (),
    noise: Noise | None = None,
) -> list[float]:
    """Of passes that score ``width`` positions of each row and bring tokens to the host: those of ``rows``, else the
    most probable ones.
    """
    slots = list(range(batch))
    for slot in slots:
        target.prefill([slot], np.full((1, _CONTEXT), 5), [_CONTEXT])
    tokens, seconds = np.full((batch, width), 7), []
    for _ in range(rounds + 1):
        synchronize(target.device)
        began = time.perf_counter()
        output = target.forward(slots, tokens, [width] * batch, noise)
        if rows:
            target_tokens(output, rows)
        else:
            _best(output).cpu()
        seconds.append(time.perf_counter() - began)
        for slot in slots:
            target.rollback(slot, _CONTEXT)
    _empty(target)
    return seconds[1:]


def _best(output: PassOutput) -> torch.Tensor:
    """The most probable tokens, int64[B, T], of a pass without noise."""
    return output.logits.argmax(-1) if output.chosen is None else output.chosen


def _empty(target: SlotTarget) -> None:
    for slot in range(target.num_slots):
        target.rollback(slot, 0)


def _free_bytes(target: SlotTarget) -> int:
    return int(torch.cuda.mem_get_info(target.device)[0]) if target.device.type == "cuda" else 0


def _print(dtype: str, way: dict[str, Any]) -> None:
    if "times" not in way:
        print(f"passes {dtype} {way['way']}: {way['failure']}")
        return
    taken = f"{way['recorded']} shapes in {way['warm_up_s']} s and {way['warm_up_bytes'] / 1e6:.0f} MB"
    agreement = f"error {way['error']:.1e}, {way['tokens_that_differ']} tokens differ"
    print(f"passes {dtype} {way['way']}: {agreement}, {taken}, {way['failure'] or 'no failure'}")
    for row in way["times"]:
        print(f"  batch {row['batch']:>2} T {row['T']:>2}: {row['ms_p50']:8.3f} ms")
    for row in way["sampled"]:
        times = ", ".join(f"{row[key]:.3f} ms {key.split('_')[0]}" for key in row if key.endswith("ms_p50"))
        print(f"  batch {row['batch']:>2} T {row['T']:>2} sampled: {times}, {row['tokens_that_differ']} tokens differ")
