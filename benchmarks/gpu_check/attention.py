"""Attention over the slot KV cache: against float32 over all that models ask for, and beside other people's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention.command import MOST_ERROR, compare
from benchmarks.gpu_check.scene import Found, Keep, Scene
from ssd.model.kv.attention import slot_attention
from ssd.model.kv.kv_cache import AttentionKernel, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.loading.load_target import DTYPES
from ssd.model.ways.steps_probe import triton_kernel


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


def attention_race(scene: Scene, keep: Keep) -> Found:
    """Ours beside other attentions, recorded, in the type that large models are served in."""
    sizes, device = scene.sizes, torch.device(scene.device)
    found: Found = {"passed": True, "rows": []}
    for context in sizes.attention_contexts:
        for batch in sizes.attention_batches:
            found["rows"] += compare(
                [batch],
                list(sizes.attention_widths),
                [context],
                (32, 8, 128) if scene.device != "cpu" else (4, 2, 16),
                scene.served_dtype,
                device,
                sizes.rounds,
            )
            found["passed"] = all(row.get("is_right", True) for row in found["rows"] if row["candidate"] == "ours")
            keep(found)
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
