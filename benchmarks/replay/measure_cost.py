"""What does a verify pass of T tokens cost, in passes of one? Measured through our engine's own target.

``python -m benchmarks.replay.measure_cost [MODEL] [--rounds N] [--out FILE] [--json]``

One row, batch 1: the model's own greedy continuation of a prompt is verified T tokens at a time, as a step does it (one
forward pass, the target's token at every position). A round times every width once, in random order; a width's cost is
the median over rounds of its time over that of one token in the same round. Every pass must choose the tokens that
single steps chose. Prints a table, writes the file that `benchmarks.replay` reads, ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import head, model_facts, model_name
from benchmarks.exactness import TIE_MARGIN
from benchmarks.replay.settings import MEASURED_PATH
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.engine.measured import decode, time_rounds
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 17, 25, 33, 49, 65, 97, 129)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parse(arguments)
    target = open_target(
        load_model(options.model, dtype=options.dtype, device=options.device),
        num_slots=1,
        max_length=options.context + max(WIDTHS) + 1,
        max_draft_tokens=max(WIDTHS),
    )
    codec = TextCodec.load(str(options.model))
    text = [token_id for snippet in snippets(0) for token_id in codec.encode_prompt(snippet)]
    chosen = decode(target, text[: options.context], max(WIDTHS) + 1)
    seconds, others = time_rounds(target, chosen, WIDTHS, options.rounds)
    for width, lead in others:
        if target.exactness.holds or lead >= TIE_MARGIN:
            raise SystemExit(f"a pass of {width} tokens chose another token, which led by {lead:.2g}")
    ratios = seconds / seconds[:, :1]
    result: dict[str, Any] = {
        **head("verify-cost"),
        **model_facts(model_name(options.model), target),
        "parameters": {"context": options.context, "rounds": options.rounds},
        "widths": list(WIDTHS),
        "ms_p50": np.round(np.median(seconds, axis=0) * 1e3, 3).tolist(),
        "costs": np.round(np.median(ratios, axis=0), 4).tolist(),
        "costs_p10": np.round(np.percentile(ratios, 10, axis=0), 4).tolist(),
        "costs_p90": np.round(np.percentile(ratios, 90, axis=0), 4).tolist(),
    }
    if not options.json:
        print(table(result))
    line = json.dumps(result)
    options.out.write_text(line + "\n")
    print(line)
    return 0


def table(result: dict[str, Any]) -> str:
    """One line a width."""
    lines = [
        f"verify-cost: {result['model']}, {result['device']}, {result['dtype']}, {result['threads']} threads, "
        f"{json.dumps(result['parameters'])}",
        f"{'tokens':>7} {'ms p50':>9} {'cost':>8} {'p10':>8} {'p90':>8}",
    ]
    columns = zip(*(result[key] for key in ("widths", "ms_p50", "costs", "costs_p10", "costs_p90")), strict=True)
    lines += [f"{width:>7} {ms:>9.2f} {cost:>8.2f} {low:>8.2f} {high:>8.2f}" for width, ms, cost, low, high in columns]
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.measure_cost", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("model", nargs="?", default=MODEL_PATH, help="Hugging Face directory or id (default: bundled)")
    add("--rounds", type=int, default=100)
    add("--context", type=int, default=256, help="tokens before the verified ones")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--out", type=Path, default=MEASURED_PATH, help="file to write (default: the one that the replay reads)")
    add("--json", action="store_true", help="print the JSON line alone, no table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
