"""Whether this model, on this machine, says the same bits of a position in every pass; and making it so.

Linear layers get the numbers of rows that keep the bits, found with their own weights (`find_rows`); the rest of a
model's layers keeps them by how it computes. Then the whole model is asked (`different_positions`). What was found is
kept beside the machine code of kernels, for the next process with the same model, machine, types and threads.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ssd.compiled.machine_code import machine_code_directory, source_stamp
from ssd.config import Exact
from ssd.errors import ModelError, first_line
from ssd.model.exact.check import different_positions
from ssd.model.layers.adapted_linear import AdaptedLinear
from ssd.model.layers.packed_linear import PackedLinear, packed_linears
from ssd.model.layers.row_plan import PLAIN, RowPlan, find_rows
from ssd.model.target import Exactness, Target

log = logging.getLogger(__name__)

_MOST_COST = 0.05
_ROUNDS, _TRIES, _WIDTHS = 5, 3, (1, 8)

_found: dict[str, dict[str, Any]] = {}
"""What this process found, by `_key`."""


def settle_exactness(target: Target, wanted: Exact) -> None:
    """Plan ``target``'s products, see that its passes agree to the bit, and note what holds in ``target.exactness``.

    For the number of threads that the calling thread's passes have. wanted : "auto" has it where it costs at most 5 %
    of a decode pass; "on" whatever it costs; "off" takes the products that are fastest alone. ``target`` must be empty,
    and is left so. Raises ModelError where it is "on" and cannot be. At most a second for a small model.
    """
    layers = packed_linears(target.model)
    if wanted == "off":
        _use(layers, {})
        target.exactness = Exactness(wanted, False, "switched off")
        return
    key = _key(target)
    found = _found.get(key) or _read(key)
    if found is None:
        found = _look(target, layers)
        _keep(key, found)
    _found[key] = found
    plans = {name: RowPlan(*plan) for name, plan in found["plans"].items()}
    differ, compared, cost = str(found["differ"]), int(found["compared"]), float(found["cost"])
    _use(layers, plans)
    if differ and wanted == "on":
        raise ModelError(
            f"--exact on: {type(target.model).__name__}, driven {target.way}, is not exact to the bit here: {differ}. "
            "Leave the option out to serve it with outputs that are equal up to rounding"
        )
    if wanted == "auto" and not differ and cost > _MOST_COST:
        differ = f"it would take {cost:.0%} more time; --exact on has it"
    if differ:
        _use(layers, {})
    target.exactness = Exactness(wanted, not differ, differ, compared, cost)


def _look(target: Target, layers: list[PackedLinear]) -> dict[str, Any]:
    plans: dict[str, RowPlan] = {}
    for layer in layers:
        name = _name(layer)
        if name not in plans:
            plans[name] = find_rows(layer.product, layer.in_features, layer.out_features, layer.kind[-1])
    _use(layers, plans)
    compared, differ = 0, ""
    inexact = next((name for name, plan in plans.items() if not plan.is_exact), None)
    if inexact is not None:
        differ = f"no numbers of rows of a linear layer ({inexact}) agree"
    else:
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
    is_free = all(plan.is_free for plan in plans.values())
    cost = 0.0 if differ or is_free else min(_cost(target, layers, plans) for _ in range(_TRIES))
    return {"plans": {name: list(plan) for name, plan in plans.items()}, "differ": differ, "compared": compared,
            "cost": cost}  # fmt: skip


def _use(layers: list[PackedLinear], plans: dict[str, RowPlan]) -> None:
    for layer in layers:
        layer.rows = plans.get(_name(layer), PLAIN)


def _name(layer: PackedLinear) -> str:
    size, num_outputs, has_bias, dtype = layer.kind
    return f"{size}x{num_outputs}{'+' if has_bias else ''} {str(dtype).removeprefix('torch.')}"


def _cost(target: Target, layers: list[PackedLinear], plans: dict[str, RowPlan]) -> float:
    """What the plans add to passes over 1 and 8 positions of a row, as a share: least times, by turns."""
    least: dict[tuple[int, bool], float] = {}
    for _ in range(_ROUNDS):
        for width in _WIDTHS:
            for planned in (False, True):
                _use(layers, plans if planned else {})
                seconds = _seconds(target, width)
                least[width, planned] = min(seconds, least.get((width, planned), seconds))
    return float(np.mean([least[width, True] / least[width, False] for width in _WIDTHS])) - 1.0


def _seconds(target: Target, width: int) -> float:
    began = time.perf_counter()
    target.forward([0], np.ones((1, width), np.int64), [width])
    took = time.perf_counter() - began
    target.rollback(0, 0)
    return took


def _key(target: Target) -> str:
    """All that the bits may depend on but the weights' values."""
    model = target.model
    parts = {
        "model": type(model).__name__,
        "config": model.config.to_dict() if hasattr(model, "config") else {},
        "dtype": str(target.dtype),
        "way": [target.way, target.can_verify_trees, min(target.num_slots, 3), min(target.max_length, 128)],
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
    return found if isinstance(found, dict) and found.keys() == {"plans", "differ", "compared", "cost"} else None


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
