"""The attention kernel against torch, compiled where there is a GPU, else interpreted: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.triton_here import DEVICE, HAS_GPU, caches_as_on_a_device, runs_loops

# isort: split
from ssd.model.kv.attention import slot_attention
from ssd.model.kv.kv_cache import AttentionRules, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.triton import triton_attention as kernels
from ssd.model.triton.triton_attention import exact_triton_attention, split_keys_of, triton_attention
from ssd.model.triton.triton_write import write_by_triton
from tests.compile_kernels import variants
from tests.models import tiny_model
from tests.static_targets import pair_of_targets
from tests.test_static_steps import random_walk
from tests.trees import trees

pytestmark = [runs_loops, pytest.mark.filterwarnings("default")]

# The interpreter computes with numpy, which has no bfloat16.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3} | ({torch.bfloat16: 3e-2} if HAS_GPU else {})
LONGEST, LARGE_DIMS = (8192, [(64, 64), (80, 80), (128, 128), (256, 256)]) if HAS_GPU else (150, [])


@pytest.fixture(autouse=True, scope="module")
def _device() -> Iterator[None]:
    with caches_as_on_a_device():
        yield


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Heads, sizes, lengths and rules."""
    rows = draw(st.integers(1, 3))
    drafts = draw(st.one_of(st.none(), st.lists(trees(max_size=9), min_size=rows, max_size=rows)))
    return {
        "lengths": draw(st.lists(st.integers(0, LONGEST), min_size=rows, max_size=rows)),
        "width": 10 if drafts else draw(st.sampled_from([1, 2, 3, 7, 20])),
        "parents": [parents for _, parents in drafts] if drafts else None,
        "kv_heads": draw(st.sampled_from([1, 2, 3])),
        "groups": draw(st.sampled_from([1, 2, 3, 4])),
        "dims": draw(st.sampled_from([(16, 16), (8, 8), (24, 16), (40, 40), *LARGE_DIMS])),
        "window": draw(st.sampled_from([None, None, 1, 6, 70, LONGEST // 2])),
        "chunk": draw(st.sampled_from([None, None, 8, 50])),
        "softcap": draw(st.sampled_from([None, 20.0])),
        "has_sinks": draw(st.booleans()),
        "dtype": draw(st.sampled_from(list(TOLERANCES))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=30)
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 11),
    st.sampled_from([(16, 16), (24, 40), (128, 64)]),
    st.booleans(),
    st.integers(0, 999),
)
def test_new_keys_and_values_are_written_at_their_places(
    batch: int, width: int, heads: int, dims: tuple[int, int], is_part: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = [torch.randn(5, heads, 60, dim, generator=generator).to(DEVICE) for dim in dims]
    expected = [each.clone() for each in stored]
    kv_cache = SlotKVCache(5, 60, DEVICE)
    kv_cache.lengths[:] = torch.randint(0, 50, (5,), generator=generator).numpy()
    slots = torch.randperm(5, generator=generator)[:batch].tolist()
    rows = SlotRows.build(kv_cache, slots, width, DEVICE)
    # As layers hand them over: transposed, and parts of one product or not.
    new = [torch.randn(batch, width, heads * dim + 7, generator=generator).to(DEVICE) for dim in dims]
    new = [each[..., 7:] if is_part else each[..., 7:].contiguous() for each in new]
    keys, values = (each.view(batch, width, heads, dim).transpose(1, 2) for each, dim in zip(new, dims, strict=True))
    write_by_triton(keys, values, stored[0], stored[1], rows.slots, rows.places)
    for given_, there in zip((keys, values), expected, strict=True):
        rows.put(given_, there)
    assert torch.equal(stored[0], expected[0]) and torch.equal(stored[1], expected[1])


@pytest.mark.parametrize("kernel", [triton_attention, exact_triton_attention])
@settings(max_examples=40, phases=[p for p in Phase if p is not Phase.explain])
@given(problem=problems())
def test_the_kernel_computes_what_torch_computes(kernel: Any, problem: dict[str, Any]) -> None:
    found, expected = (attend(problem, kernel) for kernel in (kernel, None))
    assert found.shape == expected.shape and found.dtype == problem["dtype"]
    assert float((found.float() - expected).norm() / expected.norm()) < TOLERANCES[problem["dtype"]]


def attend(problem: dict[str, Any], kernel: Any) -> torch.Tensor:
    """The kernel in the type asked for, or torch in float32 on the same rounded numbers."""
    generator = torch.Generator().manual_seed(problem["seed"])
    dtype = problem["dtype"] if kernel is not None else torch.float32

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(problem["dtype"]).to(dtype).to(DEVICE)

    lengths, width, kv_heads = problem["lengths"], problem["width"], problem["kv_heads"]
    heads, (dim, value_dim) = kv_heads * problem["groups"], problem["dims"]
    slots = list(range(len(lengths) + 1))[::-1][: len(lengths)]
    kv_cache = SlotKVCache(len(lengths) + 1, LONGEST + 50, DEVICE)
    kv_cache._layers[0] = (
        numbers(len(lengths) + 1, kv_heads, LONGEST + 50, dim),
        numbers(len(lengths) + 1, kv_heads, LONGEST + 50, value_dim),
    )
    kv_cache.lengths[slots] = lengths
    shape = None
    if problem["parents"] is not None:
        parents = np.tile(np.arange(-1, width - 1), (len(lengths), 1))
        for b, row in enumerate(problem["parents"]):
            parents[b, 1 : len(row) + 1] = np.array(row, np.int64) + 1
        shape = TreeShape.build(parents)
    rows = SlotRows.build(kv_cache, slots, width, DEVICE, shape)
    rows.kernel = kernel
    # As the layers of a model hand it over: transposed.
    query = numbers(len(lengths), width, heads, dim).transpose(1, 2)
    key, value = numbers(len(lengths), kv_heads, width, dim), numbers(len(lengths), kv_heads, width, value_dim)
    chunked = SimpleNamespace(attention_chunk_size=problem["chunk"], layer_types=["chunked_attention"])
    module: Any = SimpleNamespace(layer_idx=0, config=chunked if problem["chunk"] else None)
    sinks = numbers(heads) if problem["has_sinks"] else None
    out, _ = slot_attention(
        module, query, key, value, None, 0.3, problem["window"], problem["softcap"], sinks, slot_rows=rows
    )
    return out


_LENGTH = 600
"""Of a slot: three splits."""


@settings(max_examples=8, phases=[p for p in Phase if p is not Phase.explain])
@given(
    kv_heads=st.integers(1, 2),
    groups=st.sampled_from([1, 2, 3, 4]),
    dims=st.sampled_from([(16, 16), (24, 16), (40, 40)]),
    window=st.sampled_from([None, None, 1, 6, 70, 300]),
    chunk=st.sampled_from([None, None, 8, 50, 300]),
    softcap=st.sampled_from([None, 20.0]),
    has_sinks=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_query_has_the_same_bits_alone_and_among_others(
    kv_heads: int,
    groups: int,
    dims: tuple[int, int],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    heads, num_slots = kv_heads * groups, 3
    kv_cache = SlotKVCache(num_slots, _LENGTH, DEVICE)
    stored = [numbers(num_slots, kv_heads, _LENGTH, dim) for dim in dims]
    queries = numbers(num_slots, _LENGTH, heads, dims[0])
    sinks = numbers(heads) if has_sinks else None

    def found(slots: list[int], starts: list[int], width: int) -> torch.Tensor:
        kv_cache.lengths[slots] = starts
        rows = SlotRows.build(kv_cache, slots, width, DEVICE)
        some = torch.stack([queries[slot, start : start + width] for slot, start in zip(slots, starts, strict=True)])
        return exact_triton_attention(
            some.transpose(1, 2),
            stored[0],
            stored[1],
            rows,
            AttentionRules(0.3, window, chunk, softcap, sinks),
        )

    slots = data.draw(st.permutations(range(num_slots)))[: data.draw(st.integers(1, num_slots))]
    width = data.draw(st.sampled_from([2, 3, 7, 9, 20]))
    ends = st.one_of(st.integers(0, _LENGTH - width), st.sampled_from([0, 58, 63, 64, 256, 500, _LENGTH - width]))
    starts = [data.draw(ends) for _ in slots]
    together = found(slots, starts, width)
    for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        for at in {width - 1, data.draw(st.integers(0, width - 1))}:
            assert torch.equal(found([slot], [start + at], 1)[0, 0], together[row, at])
        first = data.draw(st.integers(0, width - 1))
        assert torch.equal(found([slot], [start + first], width - first)[0], together[row, first:])
    with pytest.MonkeyPatch.context() as patch:  # what is launched in parts
        patch.setattr(kernels, "_MAX_PARTIAL", 5 * heads * dims[1])
        assert torch.equal(found(slots, starts, width), together)


def test_splits_are_as_many_as_a_slot_needs_and_at_most_32() -> None:
    found = [split_keys_of(length) for length in (1, 2048, 8192, 8193, 131072 + 17)]
    assert found == [64, 64, 256, 512, 8192]


@pytest.mark.parametrize(
    "architecture",
    [
        "Llama",
        "Mistral (sliding window)",
        "Gemma 2 (soft caps)",
        "gpt-oss (sinks)",
        "Llama 4 (chunks, temperature)",
        "DeepSeek-V3 (latent attention)",
    ],
)
def test_models_say_the_same_with_the_kernel(architecture: str) -> None:
    recorder = "as a CUDA graph" if HAS_GPU else "eagerly"
    plain, static = pair_of_targets(tiny_model(architecture), recorder, num_slots=3, kernel=triton_attention)
    random_walk(plain, static, seed=1, num_actions=10)
    assert static.graph_runner is not None and static.graph_runner.failure is None


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_and_fit_their_registers_and_shared_memory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-2000:]}"
    sizes = [int(size) for size in re.findall(r"(\d+) bytes", done.stdout)]
    assert len(sizes) == 2 * len(list(variants()))
    assert max(sizes) <= 99 * 1024  # what a block may take on the smaller GPUs of these kinds
