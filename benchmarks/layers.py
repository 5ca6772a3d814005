"""What the layers that replace a model's own on a CPU take beside them.

``python -m benchmarks.layers [MODEL]``

For passes of 1 to 256 positions: all linear layers of the model, all normalisations, all rotary embeddings, one after
another, and the whole model without a KV cache, each as transformers computes it and as the engine does. Outputs are
compared. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.environment import head, model_facts, model_name
from ssd.bundled import MODEL_PATH
from ssd.model.layers.fused_linear import FusedMember
from ssd.model.layers.packed_linear import pack_linears, prepare_linears
from ssd.model.layers.probe_logits import plain_logits
from ssd.model.layers.replace import replace_layers
from ssd.model.layers.vector_layers import FusedNorm, fuse_norms, fuse_rotary
from ssd.model.loading.load_target import load_model

POSITIONS = (1, 2, 4, 8, 16, 32, 64, 256)
_TURN = 5
_MOST_ERROR = {"float32": 1e-4, "bfloat16": 0.05}

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same work by the library's layers and by ours, for a number of positions."""

    kind: str
    positions: int
    before: Sequence[Call]
    after: Sequence[Call]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs by more than rounding."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(MODEL_PATH), help="directory or id (default: bundled)")
    parser.add_argument("--rounds", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=sorted(_MOST_ERROR))
    args = parser.parse_args(argv)
    library = load_model(args.model, dtype=args.dtype, device="cpu")
    ours = deepcopy(library)
    kinds = (pack_linears, fuse_norms, fuse_rotary)
    if not replace_layers(ours, kinds, expected=plain_logits(library), tolerance=0.1):
        raise SystemExit("this model's layers cannot be replaced here")
    prepare_linears(ours)
    parameters = {"rounds": args.rounds, "positions": POSITIONS}
    print(f"layers: {model_name(args.model)}, {args.dtype}, {json.dumps(parameters)}")
    print(f"{'kind':>8} {'positions':>10} {'library ms':>11} {'ours ms':>8} {'ratio':>6} {'10 to 90 %':>12}")
    rows = []
    for comparison in comparisons(library, ours):
        row = measure(comparison, args.rounds)
        rows.append(row)
        low, high = row["speedup_p10_p90"]
        print(
            f"{row['kind']:>8} {row['positions']:>10} {row['library_ms_p50']:>11.3f} {row['ours_ms_p50']:>8.3f} "
            f"{row['speedup']:>6.2f} {low:>5.2f} to {high:.2f}",
            flush=True,
        )
    worst = max(row["largest_relative_error"] for row in rows)
    facts = {**head("layers"), **model_facts(model_name(args.model), library)}
    print(json.dumps({**facts, "parameters": parameters, "largest_relative_error": worst, "rows": rows}))
    return int(worst > _MOST_ERROR[args.dtype])


def comparisons(library: PreTrainedModel, ours: PreTrainedModel) -> list[Comparison]:
    """All there is to compare: each kind at every number of positions."""
    found = []
    for positions in POSITIONS:
        torch.manual_seed(positions)
        for kind, names in replaced_modules(library, ours).items():
            before, after = ([model.get_submodule(name) for name in names] for model in (library, ours))
            inputs = inputs_of(before, after, positions, library.dtype)
            calls = [[_call(layer, x) for layer, x in zip(layers, inputs, strict=True)] for layers in (before, after)]
            found.append(Comparison(kind, positions, *calls))
        ids = torch.randint(library.config.vocab_size, (1, positions))
        whole = [[_whole(model, ids)] for model in (library, ours)]
        found += [rotary_calls(library, ours, positions)] if _rotary_of(ours) else []
        found.append(Comparison("model", positions, *whole))
    return found


def replaced_modules(library: PreTrainedModel, ours: PreTrainedModel) -> dict[str, list[str]]:
    """Names of the layers that another took the place of, by kind."""
    linear = [name for name, module in library.named_modules() if type(module) is nn.Linear]
    norm = [name for name, module in ours.named_modules() if isinstance(module, FusedNorm)]
    return {"linear": linear} | ({"norm": norm} if norm else {})


def inputs_of(before: Sequence[Any], after: Sequence[Any], positions: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """An input for each layer; layers that read the same one in the model do so here."""
    made: dict[int, torch.Tensor] = {}
    found = []
    for index, (plain, layer) in enumerate(zip(before, after, strict=True)):
        key = -id(layer.group) if isinstance(layer, FusedMember) else index
        if key not in made:
            made[key] = torch.randn(1, positions, plain.weight.shape[-1]).to(dtype)
        found.append(made[key])
    return found


def rotary_calls(library: PreTrainedModel, ours: PreTrainedModel, positions: int) -> Comparison:
    """Queries and keys of every layer turned, both in one tensor; laid out as projections leave them."""
    config = library.config.get_text_config()
    heads, size = config.num_attention_heads, _head_size(library)
    calls: tuple[list[Call], list[Call]] = ([], [])
    for rotary, plain in _rotary_of(ours):
        queries, keys = (torch.randn(1, positions, heads, size).to(library.dtype).transpose(1, 2) for _ in range(2))
        angles = [torch.randn(1, positions, size).to(library.dtype) for _ in range(2)]
        for function, found in zip((plain, rotary), calls, strict=True):
            found.append(lambda f=function, q=queries, k=keys, a=angles: torch.cat(f(q, k, *a)))  # type: ignore[misc]
    return Comparison("rotary", positions, *calls)


@torch.inference_mode()
def measure(comparison: Comparison, rounds: int) -> dict[str, Any]:
    """All calls once a round, the two kinds by turns, the first of each turn not timed."""
    worst = 0.0
    for before, after in zip(comparison.before, comparison.after, strict=True):
        want = before().float()
        worst = max(worst, float((after().float() - want).norm() / want.norm()))
    seconds: tuple[list[float], list[float]] = ([], [])
    while len(seconds[1]) < rounds:
        for calls, found in zip((comparison.before, comparison.after), seconds, strict=True):
            for turn in range(_TURN + 1):
                began = time.perf_counter()
                for call in calls:
                    call()
                if turn:
                    found.append(time.perf_counter() - began)
    ratios = np.array(seconds[0]) / np.array(seconds[1])
    return {
        "kind": comparison.kind,
        "positions": comparison.positions,
        "library_ms_p50": round(median(seconds[0]) * 1e3, 4),
        "ours_ms_p50": round(median(seconds[1]) * 1e3, 4),
        "speedup": round(float(np.median(ratios)), 3),
        "speedup_p10_p90": [round(float(x), 3) for x in np.percentile(ratios, [10, 90])],
        "largest_relative_error": round(worst, 9),
    }


def _call(layer: Any, x: torch.Tensor) -> Call:
    return lambda: layer(x)


def _whole(model: PreTrainedModel, ids: torch.Tensor) -> Call:
    return lambda: model(input_ids=ids, use_cache=False).logits


def _rotary_of(ours: PreTrainedModel) -> list[tuple[Any, Any]]:
    """Of each layer the function that turns queries and keys, and the library's."""
    names = [vars(module)["forward"].__globals__ for module in ours.modules() if "forward" in vars(module)]
    functions = [each["apply_rotary_pos_emb"] for each in names]
    return [(function, function.plain) for function in functions]


def _head_size(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


if __name__ == "__main__":
    sys.exit(main())
