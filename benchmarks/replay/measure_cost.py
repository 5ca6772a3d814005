"""What does a verify pass of T tokens cost, in passes of one? Measured through our engine's own target.

``python -m benchmarks.replay.measure_cost [MODEL] [--rounds N] [--out FILE] [--json]``

One row, batch 1: the model's own greedy continuation of a prompt is verified T tokens at a time, as a step does it (one
forward pass, the target's token at every position). A round times every width once, in random order; a width's cost is
the median over rounds of its time over that of one token in the same round. Every pass must choose the tokens that
single steps chose. Prints a table, writes the file that `benchmarks.replay` reads, ends stdout with one JSON line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.exactness import TIE_MARGIN
from benchmarks.replay.job import MEASURED_PATH
from benchmarks.run import Option, Run
from benchmarks.steps import texts_of
from ssd.engine.measured import decode, time_rounds
from ssd.model.loading.load_target import open_target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 17, 25, 33, 49, 65, 97, 129)


OPTIONS: dict[str, Any] = {
    "rounds": 100,
    "context": Option(default=256, help="tokens before the verified ones"),
}
COLUMNS = (
    (">tokens", "{tokens}"), (">ms p50", "{ms_p50:.2f}"), (">cost", "{costs:.2f}"), (">p10", "{costs_p10:.2f}"),
    (">p90", "{costs_p90:.2f}"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    run = Run("verify-cost", __doc__, argv, OPTIONS, COLUMNS, has_model=True,
              program="replay.measure_cost")  # fmt: skip
    args = run.args
    args.out = args.out or MEASURED_PATH
    codec, model = run.load()
    target = open_target(
        model,
        num_slots=1,
        max_length=args.context + max(WIDTHS) + 1,
        max_draft_tokens=max(WIDTHS),
    )
    run.ran_on(target)
    chosen = decode(target, texts_of(codec)[: args.context], max(WIDTHS) + 1)
    seconds, others = time_rounds(target, chosen, WIDTHS, args.rounds)
    for width, lead in others:
        if target.exactness.holds or lead >= TIE_MARGIN:
            raise SystemExit(f"a pass of {width} tokens chose another token, which led by {lead:.2g}")
    ratios = seconds / seconds[:, :1]
    found = {
        "ms_p50": np.round(np.median(seconds, axis=0) * 1e3, 3).tolist(),
        "costs": np.round(np.median(ratios, axis=0), 4).tolist(),
        "costs_p10": np.round(np.percentile(ratios, 10, axis=0), 4).tolist(),
        "costs_p90": np.round(np.percentile(ratios, 90, axis=0), 4).tolist(),
    }
    for place, width in enumerate(WIDTHS):
        run.row({"tokens": width, **{name: values[place] for name, values in found.items()}})
    return run.end(widths=list(WIDTHS), **found)


if __name__ == "__main__":
    sys.exit(main())
