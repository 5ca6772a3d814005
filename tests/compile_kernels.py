"""Compile our kernels for GPUs that need not be there: Triton brings its own assembler.

``python -m tests.compile_kernels`` prints what each takes, and fails where one keeps more than a few bytes outside its
registers; TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ssd.drafting.token_recycling import TOP_K
from ssd.model.triton.triton_attention import NUM_STAGES, _attend_split, _combine_splits, tiles_of
from ssd.model.triton.triton_decoder import _rotate_and_store
from ssd.model.triton.triton_layers import _BLOCK as GATE_BLOCK
from ssd.model.triton.triton_layers import BLOCK_HEADS, _gate, _normalise, _rotate_both
from ssd.model.triton.triton_linear import FEW_ROWS, _product
from ssd.model.triton.triton_linear import tiles_of as linear_tiles_of
from ssd.model.triton.triton_sampling import (
    _BLOCK,
    _MAX_SPLITS,
    _choose_split,
    _choose_top,
    _sample_split,
    _top_split,
)
from ssd.model.triton.triton_write import _write

CAPABILITIES = (80, 90)
"""Ampere, Hopper."""

_STRICT, _MOST_SPILLED = 90, 16
"""Where no more than a few bytes of a thread may lie outside its registers; some dozens do on Ampere."""

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_POINTERS = {
    "weights": "fp32",
    "partial": "fp32",
    "slots": "i64",
    "starts": "i64",
    "positions": "i64",
    "tree_mask": "u8",
}
_SAMPLING_POINTERS = {"keys": "i64", "temperatures": "fp32", "scores": "fp64", "tokens": "i32", "out": "i64"}
_VALUES = (
    "query",
    "keys",
    "values",
    "out",
    "sinks",
    "logits",
    "x",
    "weight",
    "q",
    "k",
    "cos",
    "sin",
    "query_out",
    "key_out",
    "gate",
    "up",
    "stored_keys",
    "stored_values",
    "key",
    "value",
    "more",
    "total",
)
_NUMBERS = {"scale": "fp32", "softcap": "fp32", "eps": "fp32", "offset": "fp32"}
_ODD = ("width", "splits", "heads", "size", "num_rows", "query_row", "query_head", "query_position")
"""Numbers that need not be multiples of 16."""


class Variant(NamedTuple):
    """A kernel as it is launched. pointers : what arguments point to, those that do not point to ``element``."""

    name: str
    kernel: Any
    element: str
    constants: dict[str, Any]
    pointers: dict[str, str]
    num_warps: int = 4
    num_stages: int = NUM_STAGES


class Compiled(NamedTuple):
    """What a program takes: registers of a thread, bytes of shared memory, and of a thread's memory beside those."""

    registers: int
    shared: int
    spilled: int


def variants() -> Iterator[Variant]:
    """As an 8B Llama has them: chains and trees; float32, a window; latent attention; Gemma 2; then the others."""
    for is_tree in (False, True):
        for num_queries in (4, 32, 64):
            yield _attention("bf16", num_queries, is_tree=is_tree)
        yield _attention("fp32", 64, is_tree=is_tree, window=4096)
    yield _attention("bf16", 4, is_whole=True)
    for element in ("bf16", "fp32"):
        yield _attention(element, 16, split_keys=256)
    yield _attention("fp16", 64, dim=192, chunk=8192)
    for element in ("bf16", "fp32"):
        yield _attention(element, 64, dim=256, value_dim=256, is_capped=True, window=4096, is_tree=True)
    combining = {"VALUE_DIM": 128, "SPLITS": 32, "HAS_SINKS": True, "BLOCK_VALUE": 128}
    yield Variant("combine", _combine_splits, "bf16", combining, _POINTERS)
    for element in ("fp32", "bf16", "fp16"):
        best = {"COUNT": TOP_K, "BLOCK": _BLOCK}
        yield Variant(f"top {element}", _top_split, element, best, {"found": "i64"})
        yield Variant(f"sample {element}", _sample_split, element, {"BLOCK": _BLOCK}, _SAMPLING_POINTERS)
    yield Variant("choose", _choose_split, "fp32", {"BLOCK": _MAX_SPLITS}, _SAMPLING_POINTERS)
    best = {"COUNT": TOP_K, "BLOCK": 1024}
    yield Variant("best", _choose_top, "fp32", best, {"found": "i64", "out": "i32"})
    for element in ("fp32", "bf16"):
        for is_sum in (False, True):
            rule = {"ROUNDS_FIRST": True, "BLOCK": 4096, "IS_SUM": is_sum}
            yield Variant(f"norm {element}{' of a sum' if is_sum else ''}", _normalise, element, rule, {}, 8)
        heads = {"QUERY_HEADS": 32, "KEY_HEADS": 8, "QUERY_BLOCKS": 4, "HALF": 64, "BLOCK_HALF": 64}
        yield Variant(f"rotary {element}", _rotate_both, element, {**heads, "BLOCK_HEADS": BLOCK_HEADS}, {}, 2)
        placed = {**heads, "KEY_BLOCKS": 1, "BLOCK_HEADS": BLOCK_HEADS}
        yield Variant(f"place {element}", _rotate_and_store, element, placed, {"slots": "i64", "places": "i64"}, 2)
        for num_outputs in (4096, 6144, 128256):
            for num_rows in (FEW_ROWS, FEW_ROWS + 1):
                yield _linear(element, num_rows, num_outputs)
        yield _linear(element, FEW_ROWS + 1, 70, size=32, has_bias=True)  # in one step
        stored = {"HEADS": 8, "DIM": 128, "VALUE_DIM": 128, "BLOCK_HEADS": 8, "BLOCK_DIM": 128, "BLOCK_VALUE": 128}
        yield Variant(f"write {element}", _write, element, stored, {"slots": "i64", "places": "i64"})
        yield Variant(f"gate {element}", _gate, element, {"BLOCK": GATE_BLOCK}, {})


def _attention(
    element: str,
    num_queries: int,
    *,
    dim: int = 128,
    value_dim: int = 128,
    window: int = 0,
    chunk: int = 0,
    is_capped: bool = False,
    is_tree: bool = False,
    is_whole: bool = False,
    split_keys: int = 0,
) -> Variant:
    tiles = tiles_of(_DTYPES[element], dim, value_dim, num_queries, is_tree=is_tree)
    constants = {
        "GROUPS": 4,
        "KV_HEADS": 8,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "IS_WHOLE": is_whole,
        "SPLIT_KEYS": split_keys,
        "WINDOW": window,
        "CHUNK": chunk,
        "IS_CAPPED": is_capped,
        "IS_TREE": is_tree,
        "BLOCK_QUERIES": tiles.queries,
        "BLOCK_KEYS": tiles.keys,
        "BLOCK_DIM": tiles.dim,
        "BLOCK_VALUE": tiles.value_dim,
    }
    name = f"{element} {tiles.queries} queries of {dim}{' of a tree' if is_tree else ''}{' in one' if is_whole else ''}"
    name += " exact" if split_keys else ""
    pointers = {**_POINTERS, "found": element if is_whole else "fp32"}
    return Variant(name, _attend_split, element, constants, pointers, tiles.num_warps)


def _linear(element: str, num_rows: int, num_outputs: int, *, size: int = 4096, has_bias: bool = False) -> Variant:
    tiles = linear_tiles_of(num_rows, num_outputs, _DTYPES[element])
    constants = {
        "SIZE": size,
        "NUM_OUTPUTS": num_outputs,
        "HAS_BIAS": has_bias,
        "IS_TRANSPOSED": tiles.outputs >= 64,
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_OUTPUTS": tiles.outputs,
        "BLOCK_INPUTS": tiles.inputs,
        "PREFETCH_BYTES": 512,
    }
    name = f"linear {element} of {num_outputs} by {size}, {tiles.rows} rows"
    return Variant(name, _product, element, constants, {"bias": element}, num_stages=tiles.stages)


def compiled(variant: Variant, capability: int) -> Compiled:
    """What a program of the kernel takes; raises what the compiler raises."""
    names, is_early = variant.kernel.arg_names, False
    if "IS_EARLY" in names:
        is_early = capability >= _STRICT
        variant = variant._replace(constants={**variant.constants, "IS_EARLY": is_early})
    types = {name: _type_of(name, variant) for name in names}
    values = {(names.index(name),): value for name, value in variant.constants.items()}
    # Pointers are 16-byte aligned, as torch's are, and so are rows.
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if types[name].startswith("*") or (types[name] == "i32" and name not in _ODD)
    }
    source = ASTSource(variant.kernel, types, values, aligned)
    options = {"num_stages": variant.num_stages, "num_warps": variant.num_warps, "launch_pdl": is_early}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if variant.constants.get("HAS_BIAS") and not re.search(r"dot (%\w+, ){2}%cst", found.asm["ttgir"]):
        raise ValueError(f"{variant.name}: its sum begins with the bias, and not so in all tiles")
    with TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(found.asm["cubin"])
        told = subprocess.run([_CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    sizes = {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", told.stdout)}
    return Compiled(sizes["REG"], int(found.metadata.shared), sizes["STACK"] + sizes["LOCAL"])


def _type_of(name: str, variant: Variant) -> str:
    if name in variant.constants:
        return "constexpr"
    if name in variant.pointers:
        return f"*{variant.pointers[name]}"
    return f"*{variant.element}" if name in _VALUES else _NUMBERS.get(name, "i32")


def main() -> int:
    """Every variant for every GPU."""
    num_spilling = 0
    for capability in CAPABILITIES:
        for variant in variants():
            found = compiled(variant, capability)
            num_spilling += capability == _STRICT and found.spilled > _MOST_SPILLED
            print(
                f"sm_{capability} {variant.name}: {found.registers} registers, {found.shared} bytes of shared memory, "
                f"{found.spilled} spilled",
                flush=True,
            )
    return int(num_spilling > 0)


if __name__ == "__main__":
    sys.exit(main())
