"""Batch invariance: tests whether a position's logits are bit-identical in every forward pass, and enforces it.

On a CPU each linear layer pads or splits its rows to numbers of rows that give bit-identical results, which
`find_invariant_shapes` finds with the layer's own weights. The other layers are batch-invariant by construction. On
CUDA, the libraries' matrix products and attention are used. With ``--batch-invariant on``, SSD's slower kernels replace
them if they are not batch-invariant. The whole model is tested (`compare_passes`). The result is stored next to the
kernels' machine code, for later processes with the same model, machine, dtypes and threads.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ssd.config import BatchInvariant
from ssd.errors import ModelError, first_line
from ssd.jit.code_cache import machine_code_directory, source_stamp
from ssd.model.cpu.packed_linear import PackedLinear, packed_linears
from ssd.model.cpu.row_plan import EXACT_ROWS, UNPADDED, Product, RowPlan, find_invariant_shapes, with_fastest_rows
from ssd.model.runners.adapted_linear import AdaptedLinear
from ssd.model.runners.probe import Pairs, score_alone, score_as_trees, score_batched, score_tokens
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import BatchInvariance, Target

_LENGTHS = (61, 38, 17)  # the lengths of the test texts, each in its own slot
# The chunk size and the total number of tokens that are prefilled before the scored tokens.
_PREFILLS = ((7, 40), (1, 9), (16, 55))
_TIMED_BYTES = 64 << 20  # of weights of a kind of layer; more than a processor's cache, so that they come from memory


@torch.inference_mode()
def compare_passes(target: Target) -> Iterator[tuple[str, int, int]]:
    """Test batch invariance: compare logits of differently shaped forward passes with those of one pass per text.

    The passes differ in width, batch size, prefill chunks and draft trees. For each kind of pass this yields its name,
    the number of positions compared and the number of positions whose logits are not bit-identical. The texts consist
    of random tokens and use different adapters, if there are adapters. All slots of ``target`` must be free, and they
    are free afterwards. The test runs about 50 forward passes.
    """
    random = np.random.default_rng(0)
    lengths = [min(length, target.max_length - 1) for length in _LENGTHS[: target.num_slots]]
    texts = [random.integers(0, target.vocab_size, length) for length in lengths]
    slots = list(range(target.num_slots))[-len(texts) :][::-1]
    for slot, adapter in zip(slots, cycle([*sorted(target.adapter_names), None]), strict=False):
        target.adapters[slot] = adapter
    expected = [score_alone(target, slot, text) for slot, text in zip(slots, texts, strict=True)]

    yield _count_differences("different widths", score_batched(target, slots[:1], texts[:1], expected[:1]))
    yield _count_differences("batched rows", score_batched(target, slots, texts, expected))
    text, slot = texts[0], slots[0]
    for chunk, read in _PREFILLS:
        read = min(read, len(text) - 1)
        for first in range(0, read, chunk):
            part = text[first : min(first + chunk, read)]
            target.prefill([slot], part[None], [len(part)])
        after = score_tokens(target, slot, text[read:])
        target.rollback(slot, 0)
        yield _count_differences(f"after a prefill in chunks of {chunk}", [(after, expected[0][read:])])
    if target.can_verify_trees:
        yield _count_differences(
            "paths of draft trees", score_as_trees(target, slots[0], texts[0], expected[0], random)
        )
    for slot in slots:
        target.adapters[slot] = None


def _count_differences(what: str, pairs: Pairs) -> tuple[str, int, int]:
    differ = sum(int((found != wanted).any(-1).sum()) for found, wanted in pairs)
    return what, sum(len(found) for found, _ in pairs), differ


log = logging.getLogger(__name__)

_RESULT_KEYS = {"plans", "kernels", "differ", "compared"}

_results: dict[str, dict[str, Any]] = {}  # The test results of this process, by `_result_key`.


def verify_batch_invariance(target: Target, wanted: BatchInvariant) -> None:
    """Make the target's forward passes batch-invariant if possible, and set ``target.batch_invariance``.

    The result is valid for the calling thread's number of torch threads. Testing a small model takes up to a second.

    Args:
        target: The target; no slot may contain tokens, and none does afterwards.
        wanted: "auto" uses batch-invariant products on a CPU, if the whole model is then batch-invariant. "on" also
            tries SSD's batch-invariant CUDA kernels, and raises ModelError if forward passes still differ. "off" uses
            the fastest products without a test.
    """
    layers, kernels = packed_linears(target.model), _runner_with_invariant_kernels(target)
    _apply_plans(layers, {})
    if kernels is not None:
        kernels.use_invariant_kernels(False)
    if wanted == "off":
        target.batch_invariance = BatchInvariance(False, "switched off")
        return
    own = kernels if wanted == "on" else None
    key = _result_key(target, own is not None)
    found = _results.get(key) or _load_result(key)
    if found is None:
        found = _test_invariance(target, layers, own)
        _store_result(key, found)
    _results[key] = found
    differ = str(found["differ"])
    if differ and wanted == "on":
        raise ModelError(
            f"--batch-invariant on: {type(target.model).__name__} ({target.backend}) does not compute "
            f"bit-identical logits on this machine: {differ}. Omit the option to serve the model with outputs "
            "that are equal up to rounding"
        )
    if differ and kernels is not None:
        differ += "; --batch-invariant on uses SSD's batch-invariant kernels instead, which verify draft chains only"
    _apply_plans(layers, {} if differ else {name: RowPlan(*plan) for name, plan in found["plans"].items()})
    if kernels is not None:
        kernels.use_invariant_kernels(bool(found["kernels"]))
    target.batch_invariance = BatchInvariance(not differ, differ, int(found["compared"]))


def _runner_with_invariant_kernels(target: Target) -> SlotRunner | None:
    """Return the target if it can use SSD's batch-invariant CUDA kernels, else None."""
    can = target.device.type == "cuda" and find_spec("triton") is not None
    return target if can and isinstance(target, SlotRunner) else None


def _test_invariance(target: Target, layers: list[PackedLinear], kernels: SlotRunner | None) -> dict[str, Any]:
    plans: dict[str, RowPlan] = {}
    for layer in layers:
        name = _kind_name(layer)
        if name not in plans:
            plans[name] = find_invariant_shapes(layer.product, layer.in_features, layer.out_features, layer.kind[-1])
    inexact = next((name for name, plan in plans.items() if not plan.is_exact), None)
    if not inexact:
        plans = with_fastest_rows(plans, list(_timed_products(layers)))
    _apply_plans(layers, plans)
    compared, differ = (
        (0, f"a linear layer ({inexact}) has no batch-invariant numbers of rows") if inexact else _compare_all(target)
    )
    takes_kernels = kernels is not None and bool(differ)
    if kernels is not None and takes_kernels:
        kernels.use_invariant_kernels(True)
        compared, differ = _compare_all(target)
    plans_kept = {name: list(plan) for name, plan in plans.items()}
    return {"plans": plans_kept, "kernels": takes_kernels, "differ": differ, "compared": compared}


def _timed_products(layers: list[PackedLinear]) -> Iterator[tuple[str, Product, torch.Tensor]]:
    """Select layers to time, in the model's order: of each kind some that together exceed the processor's caches."""
    num_bytes: Counter[str] = Counter()
    for layer in layers:
        name = _kind_name(layer)
        if num_bytes[name] < _TIMED_BYTES:
            num_bytes[name] += layer.num_bytes
            yield name, layer.product, torch.zeros(EXACT_ROWS, layer.in_features, dtype=layer.kind[-1])


def _compare_all(target: Target) -> tuple[int, str]:
    """Run `compare_passes`; return the number of positions compared and the first difference as text, "" if none."""
    compared, differ = 0, ""
    try:
        for what, count, different in compare_passes(target):
            compared += count
            if different and not differ:
                differ = f"{different} of {count} positions differ ({what})"
    except Exception as failure:  # the model is not batch-invariant; it is served nevertheless
        differ = first_line(failure)
        for slot in range(target.num_slots):
            target.rollback(slot, 0)
            target.adapters[slot] = None
    return compared, differ


def _apply_plans(layers: list[PackedLinear], plans: dict[str, RowPlan]) -> None:
    for layer in layers:
        layer.rows = plans.get(_kind_name(layer), UNPADDED)


def _kind_name(layer: PackedLinear) -> str:
    size, num_outputs, has_bias, dtype = layer.kind
    return f"{size}x{num_outputs}{'+' if has_bias else ''} {str(dtype).removeprefix('torch.')}"


def _result_key(target: Target, takes_kernels: bool) -> str:
    """Return the key for storing the test's result: a hash of the machine, the settings and the model's structure."""
    model = target.model
    parts = {
        "model": type(model).__name__,
        "config": model.config.to_dict() if hasattr(model, "config") else {},
        "dtype": str(target.dtype),
        "way": [
            takes_kernels,
            target.backend,
            target.can_verify_trees,
            min(target.num_slots, 3),
            min(target.max_length, 128),
        ],
        "adapters": sorted(
            {
                (name, len(addition.down))
                for layer in model.modules()
                if isinstance(layer, AdaptedLinear)
                for name, addition in layer.lora_weights.items()
            }
        ),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.processor(),
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
        "machine": [os.environ.get("ONEDNN_MAX_CPU_ISA", ""), _processor()],
        "sources": source_stamp(Path(__file__)),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return " ".join(next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags"))


def _result_file(key: str) -> Path | None:
    directory = machine_code_directory()
    return None if directory is None else directory / f"exact-{key}.json"


def _load_result(key: str) -> dict[str, Any] | None:
    path = _result_file(key)
    try:
        found = None if path is None else json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() == _RESULT_KEYS else None


def _store_result(key: str, found: dict[str, Any]) -> None:
    path = _result_file(key)
    if path is None:
        return
    try:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(found))
        new.replace(path)
    except OSError as error:  # every process then tests again
        log.debug("cannot store %s: %s", path, error)
