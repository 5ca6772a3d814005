"""What do prices lose where requests that gain much run beside requests that gain little?

``python -m benchmarks.mixed [--batch B...] [--cost cpu h100] [--steps N] [--seeds N]``

Half the rows of a batch are greedy and near-variants of stored texts, the others sampled at temperature 1 and half made
of other text. The engine is real; its passes compute nothing and take what a cost model says, by a clock of their
own, so that what other programs do to the machine changes nothing. Ways to price drafts: off; the engine's own; drafts
for one class alone; and an oracle, the best of fixed prices for each class, found by trying all on the same texts.

Tokens a second in all and by class over those of the engine's own prices: medians over seeds, least and most. Every row
must have said its text. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.environment import head
from benchmarks.mixed.decoding import CLASSES, COSTS, Prices, Rates, Text, decode
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.model.loading.load_target import load_model
from ssd.text.codec import TextCodec

TRIED: Final = ((0.05, 0.15, 0.4), (0.0, 0.02, 0.05, 0.2, 1.0))
"""Prices that the oracle chooses from, of each class."""

OWN: Final = Prices("own")
_WAYS: Final = (
    Prices("off", drafts=()),
    OWN,
    Prices("again alone", drafts=("again",)),
    Prices("new alone", drafts=("new",)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a row did not say its text."""
    args = _parse(argv)
    parameters = {name: getattr(args, name) for name in ("batch", "cost", "steps", "seeds")}
    print(f"mixed: {json.dumps(parameters)}")
    codec = TextCodec.load(str(MODEL_PATH))
    text = np.array([token for piece in snippets(0) for token in codec.encode_prompt(piece)], np.int32)
    rows = []
    for cost, batch in product(args.cost, args.batch):
        found = {
            way: [_decode(codec, text, batch, cost, way, args.steps, seed) for seed in range(args.seeds)]
            for way in (*_WAYS, *_oracles())
        }
        rows += _rows(batch, cost, found)
        for row in rows[-len(_WAYS) - 1 :]:
            low, high = row["over_own_range"]
            print(
                f"{cost:>5} {batch:>3} {row['prices']:>24} {row['tokens_per_s']:>9.0f} {row['over_own']:>7.3f}x "
                f"({low:.3f} ... {high:.3f}) again {row['again']:>8.0f} new {row['new']:>8.0f} "
                f"width {row['width']:.1f}",
                flush=True,
            )
    is_right = all(row["is_right"] for row in rows)
    result = {**head("mixed"), "parameters": parameters, "classes": CLASSES, "is_right": is_right, "rows": rows}
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(not is_right)


def _oracles() -> list[Prices]:
    return [Prices(f"fixed {again} and {new}", by_class=(again, new)) for again, new in product(*TRIED)]


def _decode(codec: TextCodec, text: Text, batch: int, cost: str, way: Prices, num_steps: int, seed: int) -> Rates:
    model = load_model(MODEL_PATH, dtype="float32", device="cpu")  # a target changes its model
    return decode(model, codec, text, batch, cost, way, num_steps, seed)


def _rows(batch: int, cost: str, found: dict[Prices, list[Rates]]) -> list[dict[str, Any]]:
    """Of each way, and of the best of the oracle's, one row."""
    own = found[OWN]

    def ratios(way: Prices) -> list[float]:
        return [rates.total / base.total for rates, base in zip(found[way], own, strict=True)]

    best = max(_oracles(), key=lambda way: median(ratios(way)))
    return [
        {
            "cost": cost,
            "batch": batch,
            "prices": way.name,
            "is_oracle": way is best,
            "tokens_per_s": round(median(rates.total for rates in found[way]), 1),
            "again": round(median(rates.again for rates in found[way]), 1),
            "new": round(median(rates.new for rates in found[way]), 1),
            "width": round(median(rates.width for rates in found[way]), 2),
            "over_own": round(median(ratios(way)), 4),
            "over_own_range": [round(min(ratios(way)), 4), round(max(ratios(way)), 4)],
            "is_right": all(rates.is_right for rates in found[way]),
        }
        for way in (*_WAYS, best)
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[2, 4, 8, 16], metavar="B", help="rows (default: 2 4 8 16)")
    add("--cost", nargs="+", default=list(COSTS), choices=sorted(COSTS), help="of passes (default: all)")
    add("--steps", type=int, default=150, help="counted (default: %(default)s)")
    add("--seeds", type=int, default=3, help="of texts (default: %(default)s)")
    add("--out", type=Path, help="also write the JSON line to this file")
    args = parser.parse_args(argv)
    if min(*args.batch, args.steps, args.seeds) < 1 or any(batch % 2 for batch in args.batch):
        parser.error("numbers are from 1, batches even")
    return args
