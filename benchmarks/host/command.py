"""What of a step is the engine's own work?

``python -m benchmarks.host [--batch B...] [--traffic off new again sampled] [--steps N] [--rounds R]``

All is real but the model: its passes compute nothing and take, by a clock, what those of Llama-3.1-8B take on an H100.
Inputs are put into place as for passes that are recorded there, chosen tokens and the most probable ones come
back with them. Each row says a text of the Python library. "off" is speculation off; "new": on, where nothing of
the text is stored; "again": all of it is; "sampled": the same at temperature 1.

Microseconds a step, medians over all steps of all rounds: of the host in all; of that before the next pass begins, for
which a device waits (the rest is done while it computes); and by part. Every row must have said its text. Prints a
table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.environment import head
from benchmarks.host.steps import PARTS, PROMPT_TOKENS, TRAFFIC, Steps, Text, time_steps, tokens_said
from benchmarks.hybrid.costs import pass_seconds
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.model.loading.load_target import load_model
from ssd.text.codec import TextCodec

_HEAD = ("traffic", "batch", "host us", "10 to 90 %", "exposed", "of a pass", *PARTS, "drafted", "accepted")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a row did not say its text."""
    args = _parse(argv)
    parameters = {name: getattr(args, name) for name in ("batch", "traffic", "steps", "rounds", "limit")}
    print(f"host: {json.dumps(parameters)}")
    codec = TextCodec.load(str(MODEL_PATH))
    text = np.array([token for piece in snippets(0) for token in codec.encode_prompt(piece)], np.int32)
    print(" ".join(f"{title:>11}" for title in _HEAD))
    rows, is_right = [], True
    for batch in args.batch:
        runs: dict[str, list[Steps]] = {traffic: [] for traffic in args.traffic}
        for _ in range(args.rounds):
            for traffic in args.traffic:
                # A target changes its model.
                model = load_model(MODEL_PATH, dtype="float32", device="cpu")
                texts = texts_of(text, batch, PROMPT_TOKENS + tokens_said(args.steps, args.limit))
                runs[traffic].append(time_steps(model, codec, texts, traffic, args.steps, args.limit))
        for traffic, found in runs.items():
            is_right = is_right and all(run.is_right for run in found)
            rows.append(_row(traffic, batch, found))
            print(_line(rows[-1]), flush=True)
    result = {**head("host"), "parameters": parameters, "is_right": is_right, "rows": rows}
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(not is_right)


def texts_of(text: Text, count: int, length: int) -> list[Text]:
    """So many pieces of a text, each of another beginning; those that are many overlap."""
    begins = np.linspace(0, len(text) - length, count).astype(int)
    return [text[begin : begin + length] for begin in begins]


def _row(traffic: str, batch: int, runs: Sequence[Steps]) -> dict[str, Any]:
    host = [seconds for run in runs for seconds in run.host]
    num_rows = batch * len(host)
    return {
        "traffic": traffic,
        "batch": batch,
        "steps": len(host),
        "host_us_p50": _us(median(host)),
        "host_us_p10_p90": [_us(float(each)) for each in np.percentile(host, [10, 90])],
        "exposed_us_p50": _us(median(seconds for run in runs for seconds in run.exposed)),
        "pass_us": _us(pass_seconds(batch, 0)),
        "parts_us_p50": {part: _us(median(s for run in runs for s in run.parts[part])) for part in PARTS},
        "drafted_per_row": round(sum(run.drafted for run in runs) / num_rows, 2),
        "accepted_per_row": round(sum(run.accepted for run in runs) / num_rows, 2),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _line(row: dict[str, Any]) -> str:
    low, high = row["host_us_p10_p90"]
    cells = (
        row["traffic"],
        row["batch"],
        row["host_us_p50"],
        f"{low:.0f}..{high:.0f}",
        row["exposed_us_p50"],
        f"{row['exposed_us_p50'] / row['pass_us']:.1%}",
        *row["parts_us_p50"].values(),
        row["drafted_per_row"],
        row["accepted_per_row"],
    )
    return " ".join(f"{cell:>11}" for cell in cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 8, 32, 64], metavar="B", help="rows (default: 1 8 32 64)")
    add("--traffic", nargs="+", default=list(TRAFFIC), choices=TRAFFIC, help="(default: all)")
    add("--steps", type=int, default=60, help="timed in each round (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of all traffic in turn (default: %(default)s)")
    add("--limit", type=int, default=7, help="most tokens drafted for a row (default: %(default)s)")
    add("--out", type=Path, help="also write the JSON line to this file")
    args = parser.parse_args(argv)
    if min(*args.batch, args.steps, args.rounds, args.limit) < 1:
        parser.error("all numbers are from 1")
    return args
