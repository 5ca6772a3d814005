"""Compile our kernels for GPUs that need not be there: Triton brings its own assembler.

``python -m tests.compile_kernels`` prints what each takes; TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ssd.model.kv.triton_attention import _attend_split, _combine_splits
from ssd.model.sampling.triton_sampling import _BLOCK, _MOST_SPLITS, _choose_split, _sample_split

CAPABILITIES = (80, 90)
"""Ampere, Hopper."""

PLAIN: dict[str, Any] = {
    "GROUPS": 4, "KV_HEADS": 8, "DIM": 128, "VALUE_DIM": 128, "SPLITS": 8, "WINDOW": 0, "CHUNK": 0, "IS_CAPPED": False,
    "IS_TREE": False, "BLOCK_QUERIES": 16, "BLOCK_KEYS": 64, "BLOCK_DIM": 128, "BLOCK_VALUE": 128,
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", PLAIN),
    ("bf16", {**PLAIN, "IS_TREE": True, "BLOCK_QUERIES": 64}),
    ("fp32", {**PLAIN, "IS_TREE": True, "WINDOW": 4096, "BLOCK_QUERIES": 64, "BLOCK_KEYS": 32}),
    ("fp16", {**PLAIN, "DIM": 192, "BLOCK_DIM": 256, "CHUNK": 8192, "BLOCK_QUERIES": 32, "BLOCK_KEYS": 32}),
    ("bf16", {**PLAIN, "DIM": 256, "VALUE_DIM": 256, "BLOCK_DIM": 256, "BLOCK_VALUE": 256, "IS_CAPPED": True,
              "WINDOW": 4096, "IS_TREE": True, "BLOCK_QUERIES": 32, "BLOCK_KEYS": 32}),
]  # fmt: skip
"""Element type and constants: as an 8B Llama has them, trees, float32, latent attention, and Gemma 2."""

_POINTERS = {"partial": "fp32", "weights": "fp32", "slots": "i64", "starts": "i64", "positions": "i64", "sees": "u8"}
_NUMBERS = {"scale": "fp32", "softcap": "fp32"}
_SAMPLING_POINTERS = {"keys": "i64", "temperatures": "fp32", "scores": "fp64", "tokens": "i32", "out": "i64"}


def compiled_bytes(
    kernel: Any, element: str, constants: dict[str, Any], capability: int, pointers: dict[str, str] = _POINTERS
) -> int:
    """Shared memory that a program of the kernel takes; raises what the compiler raises.

    pointers : what arguments point to, those that do not point to ``element``.
    """
    names = kernel.arg_names
    types = {name: _type_of(name, element, constants, pointers) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    # Pointers are 16-byte aligned, as torch's are.
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if types[name].startswith("*")}
    source = ASTSource(kernel, types, values, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2})
    return int(found.metadata.shared)


def _type_of(name: str, element: str, constants: dict[str, Any], pointers: dict[str, str]) -> str:
    if name in constants:
        return "constexpr"
    if name in pointers:
        return f"*{pointers[name]}"
    if name in ("query", "keys", "values", "out", "sinks", "logits"):
        return f"*{element}"
    return _NUMBERS.get(name, "i32")


def main() -> None:
    """Every variant for every GPU."""
    combining = {"VALUE_DIM": 128, "SPLITS": 32, "HAS_SINKS": True, "BLOCK_VALUE": 128}
    sampling = {"BLOCK": _BLOCK}
    for capability in CAPABILITIES:
        for element, constants in VARIANTS:
            shared = compiled_bytes(_attend_split, element, constants, capability)
            print(f"sm_{capability} {element}: {shared} bytes of shared memory")
        print(f"sm_{capability} combine: {compiled_bytes(_combine_splits, 'bf16', combining, capability)} bytes")
        for element in ("fp32", "bf16", "fp16"):
            shared = compiled_bytes(_sample_split, element, sampling, capability, _SAMPLING_POINTERS)
            print(f"sm_{capability} sample {element}: {shared} bytes of shared memory")
        shared = compiled_bytes(_choose_split, "fp32", {"BLOCK": _MOST_SPLITS}, capability, _SAMPLING_POINTERS)
        print(f"sm_{capability} choose: {shared} bytes of shared memory")


if __name__ == "__main__":
    main()
