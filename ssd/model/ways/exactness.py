"""Whether this model, on this machine, says the same bits of a position in every pass; and making it so.

On a CPU linear layers get the numbers of rows that keep the bits, found with their own weights (`find_rows`); the rest
of a model's layers keeps them by how it computes. On CUDA libraries' products and attention give way to kernels of ours
where they do not keep them. Then the whole model is asked (`different_positions`). What was found is kept beside the
machine code of kernels, for the next process with the same model, machine, types and threads.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ssd.config import Exact
from ssd.errors import ModelError, first_line
from ssd.jit.code_cache import machine_code_directory, source_stamp
from ssd.model.layers.adapted_linear import AdaptedLinear
from ssd.model.layers.packed_linear import PackedLinear, packed_linears
from ssd.model.layers.row_plan import PLAIN, RowPlan, find_rows
from ssd.model.target import Exactness, Target
from ssd.model.ways.probe import Pairs, alone, as_trees, scored, together
from ssd.model.ways.slot_target import SlotTarget

_LENGTHS = (61, 38, 17)
"""Of the texts, each in a slot of its own; and the most of them that are read."""
_PREFILLS = ((7, 40), (1, 9), (16, 55))
"""Tokens at once, and all tokens, that are read before what is scored."""


@torch.inference_mode()
def different_positions(target: Target) -> Iterator[tuple[str, int, int]]:
    """For each kind of pass: what it is, positions compared with one pass over the text, and those with other bits.

    Texts of random tokens, each with an adapter of its own where there are any. ``target`` must be empty, and is left
    so. Some 50 passes.
    """
    random = np.random.default_rng(0)
    lengths = [min(length, target.max_length - 1) for length in _LENGTHS[: target.num_slots]]
    texts = [random.integers(0, target.vocab_size, length) for length in lengths]
    slots = list(range(target.num_slots))[-len(texts) :][::-1]
    for slot, adapter in zip(slots, cycle([*sorted(target.adapter_names), None]), strict=False):
        target.adapters[slot] = adapter
    expected = [alone(target, slot, text) for slot, text in zip(slots, texts, strict=True)]

    yield _compared("several widths", together(target, slots[:1], texts[:1], expected[:1]))
    yield _compared("rows beside each other", together(target, slots, texts, expected))
    text, slot = texts[0], slots[0]
    for chunk, read in _PREFILLS:
        read = min(read, len(text) - 1)
        for first in range(0, read, chunk):
            part = text[first : min(first + chunk, read)]
            target.prefill([slot], part[None], [len(part)])
        after = scored(target, slot, text[read:])
        target.rollback(slot, 0)
        yield _compared(f"behind a prefill by {chunk}", [(after, expected[0][read:])])
    if target.can_verify_trees:
        yield _compared("paths of trees", as_trees(target, slots[0], texts[0], expected[0], random))
    for slot in slots:
        target.adapters[slot] = None


def _compared(what: str, pairs: Pairs) -> tuple[str, int, int]:
    differ = sum(int((found != wanted).any(-1).sum()) for found, wanted in pairs)
    return what, sum(len(found) for found, _ in pairs), differ


log = logging.getLogger(__name__)

_KEPT = {"plans", "kernels", "differ", "compared"}

_found: dict[str, dict[str, Any]] = {}
"""What this process found, by `_key`."""


def settle_exactness(target: Target, wanted: Exact) -> None:
    """Plan ``target``'s products, see that its passes agree to the bit, and note what holds in ``target.exactness``.

    For the number of threads that the calling thread's passes have. wanted : "auto" has it where passes agree; "on",
    too, where only kernels of ours make them agree, or raises ModelError; "off" takes the products that are fastest
    alone. ``target`` must be empty, and is left so. At most a second for a small model.
    """
    layers, kernels = packed_linears(target.model), _with_own_kernels(target)
    _use(layers, {})
    if kernels is not None:
        kernels.use_own_kernels(False)
    if wanted == "off":
        target.exactness = Exactness(False, "switched off")
        return
    own = kernels if wanted == "on" else None
    key = _key(target, own is not None)
    found = _found.get(key) or _read(key)
    if found is None:
        found = _look(target, layers, own)
        _keep(key, found)
    _found[key] = found
    differ = str(found["differ"])
    if differ and wanted == "on":
        raise ModelError(
            f"--exact on: {type(target.model).__name__}, driven {target.way}, is not exact to the bit here: {differ}. "
            "Leave the option out to serve it with outputs that are equal up to rounding"
        )
    if differ and kernels is not None:
        differ += "; --exact on has it by kernels of ours, which draft chains"
    _use(layers, {} if differ else {name: RowPlan(*plan) for name, plan in found["plans"].items()})
    if kernels is not None:
        kernels.use_own_kernels(bool(found["kernels"]))
    target.exactness = Exactness(not differ, differ, int(found["compared"]))


def _with_own_kernels(target: Target) -> SlotTarget | None:
    """One that can compute by kernels of ours: on CUDA, where triton is installed; None otherwise."""
    can = target.device.type == "cuda" and find_spec("triton") is not None
    return target if can and isinstance(target, SlotTarget) else None


def _look(target: Target, layers: list[PackedLinear], kernels: SlotTarget | None) -> dict[str, Any]:
    plans: dict[str, RowPlan] = {}
    for layer in layers:
        name = _name(layer)
        if name not in plans:
            plans[name] = find_rows(layer.product, layer.in_features, layer.out_features, layer.kind[-1])
    _use(layers, plans)
    inexact = next((name for name, plan in plans.items() if not plan.is_exact), None)
    compared, differ = (0, f"no numbers of rows of a linear layer ({inexact}) agree") if inexact else _asked(target)
    takes_kernels = kernels is not None and bool(differ)
    if kernels is not None and takes_kernels:
        kernels.use_own_kernels(True)
        compared, differ = _asked(target)
    plans_kept = {name: list(plan) for name, plan in plans.items()}
    return {"plans": plans_kept, "kernels": takes_kernels, "differ": differ, "compared": compared}


def _asked(target: Target) -> tuple[int, str]:
    """Positions compared, and how some differ."""
    compared, differ = 0, ""
    try:
        for what, count, different in different_positions(target):
            compared += count
            if different and not differ:
                differ = f"{different} of {count} positions differ ({what})"
    except Exception as failure:  # a model that does not play along: the promise does not hold, the service goes on
        differ = first_line(failure)
        for slot in range(target.num_slots):
            target.rollback(slot, 0)
            target.adapters[slot] = None
    return compared, differ


def _use(layers: list[PackedLinear], plans: dict[str, RowPlan]) -> None:
    for layer in layers:
        layer.rows = plans.get(_name(layer), PLAIN)


def _name(layer: PackedLinear) -> str:
    size, num_outputs, has_bias, dtype = layer.kind
    return f"{size}x{num_outputs}{'+' if has_bias else ''} {str(dtype).removeprefix('torch.')}"


def _key(target: Target, takes_kernels: bool) -> str:
    """All that the bits may depend on but the weights' values."""
    model = target.model
    parts = {
        "model": type(model).__name__,
        "config": model.config.to_dict() if hasattr(model, "config") else {},
        "dtype": str(target.dtype),
        "way": [
            takes_kernels,
            target.way,
            target.can_verify_trees,
            min(target.num_slots, 3),
            min(target.max_length, 128),
        ],
        "adapters": sorted(
            {
                (name, len(addition.down))
                for layer in model.modules()
                if isinstance(layer, AdaptedLinear)
                for name, addition in layer.additions.items()
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


def _file(key: str) -> Path | None:
    directory = machine_code_directory()
    return None if directory is None else directory / f"exact-{key}.json"


def _read(key: str) -> dict[str, Any] | None:
    path = _file(key)
    try:
        found = None if path is None else json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() == _KEPT else None


def _keep(key: str, found: dict[str, Any]) -> None:
    path = _file(key)
    if path is None:
        return
    try:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(found))
        new.replace(path)
    except OSError as error:  # it is found anew by every process
        log.debug("cannot keep %s: %s", path, error)
