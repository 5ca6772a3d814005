"""What packed and fused linear layers take beside torch's own, on a CPU.

``python -m benchmarks.packed_linear [MODEL]``

For passes of 1 to 256 positions: all linear layers of the model, one after another, as transformers calls them and as
the engine does. Outputs are compared. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.environment import head, model_facts, model_name
from ssd.bundled import MODEL_PATH
from ssd.target.loading import load_model
from ssd.target.packed_linear import FusedMember, pack_linears
from ssd.target.probe import plain_logits

POSITIONS = (1, 2, 4, 8, 16, 32, 64, 256)
_TURN = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs by more than rounding."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_linear", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL_PATH), help="directory or id (default: bundled)")
    parser.add_argument("--rounds", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)
    library = load_model(args.model, dtype=args.dtype, device="cpu")
    packed = deepcopy(library)
    if not pack_linears(packed, plain_logits(library), 0.1):
        raise SystemExit("this model's layers cannot be packed here")
    parameters = {"rounds": args.rounds, "positions": POSITIONS}
    print(f"packed_linear: {model_name(args.model)}, {args.dtype}, {json.dumps(parameters)}")
    names = [name for name, module in library.named_modules() if type(module) is nn.Linear]
    before, after = ([model.get_submodule(name) for name in names] for model in (library, packed))
    worst = compare(before, after, args.dtype)
    rows = []
    print(f"{'positions':>10} {'torch ms':>9} {'packed ms':>10} {'ratio':>6} {'10 to 90 %':>12}")
    for positions in POSITIONS:
        row = time_layers(before, after, positions, args.rounds, args.dtype)
        rows.append(row)
        low, high = row["speedup_p10_p90"]
        print(
            f"{positions:>10} {row['torch_ms_p50']:>9.3f} {row['packed_ms_p50']:>10.3f} {row['speedup']:>6.2f} "
            f"{low:>5.2f} to {high:.2f}",
            flush=True,
        )
    facts = {**head("packed_linear"), **model_facts(model_name(args.model), library)}
    print(json.dumps({**facts, "parameters": parameters, "largest_relative_error": worst, "rows": rows}))
    return int(worst > (1e-4 if args.dtype == "float32" else 0.05))


def inputs_of(layers: Sequence[Any], positions: int, dtype: str) -> list[torch.Tensor]:
    """An input for each layer; layers that read the same one in the model do so here."""
    torch.manual_seed(positions)
    made: dict[tuple[int, int], torch.Tensor] = {}
    found = []
    for index, layer in enumerate(layers):
        key = (index if not isinstance(layer, FusedMember) else -id(layer.group), _size(layer))
        if key not in made:
            made[key] = torch.randn(1, positions, _size(layer)).to(getattr(torch, dtype))
        found.append(made[key])
    return found


def compare(before: Sequence[Any], after: Sequence[Any], dtype: str) -> float:
    """The largest relative error of any layer at any number of positions."""
    worst = 0.0
    with torch.inference_mode():
        for positions in POSITIONS:
            for plain, packed, x in zip(before, after, inputs_of(after, positions, dtype), strict=True):
                want = plain(x).float()
                worst = max(worst, float((packed(x).float() - want).norm() / want.norm()))
    return round(worst, 9)


@torch.inference_mode()
def time_layers(before: Sequence[Any], after: Sequence[Any], positions: int, rounds: int, dtype: str) -> dict[str, Any]:
    """All layers once a round, the two kinds by turns, the first of each turn not timed."""
    inputs = inputs_of(after, positions, dtype)
    kinds: list[Callable[[], list[Any]]] = [
        lambda layers=layers: [layer(x) for layer, x in zip(layers, inputs, strict=True)]  # type: ignore[misc]
        for layers in (before, after)
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    while len(seconds[1]) < rounds:
        for run, found in zip(kinds, seconds, strict=True):
            run()
            for _ in range(_TURN):
                began = time.perf_counter()
                run()
                found.append(time.perf_counter() - began)
    ratios = np.array(seconds[0]) / np.array(seconds[1])
    return {
        "positions": positions,
        "torch_ms_p50": round(median(seconds[0]) * 1e3, 4),
        "packed_ms_p50": round(median(seconds[1]) * 1e3, 4),
        "speedup": round(float(np.median(ratios)), 3),
        "speedup_p10_p90": [round(float(x), 3) for x in np.percentile(ratios, [10, 90])],
    }


def _size(layer: Any) -> int:
    return int(layer.group.packed.in_features if isinstance(layer, FusedMember) else layer.in_features)


if __name__ == "__main__":
    raise SystemExit(main())
