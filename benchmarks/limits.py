"""Measure how much drafts can gain at most: ``python -m benchmarks.limits [MODEL] [--batch B...] [--out FILE]``

Times forward passes over batches of several sizes, with several positions per row: one for the row's last token, the
others for draft tokens. If a draft token is accepted with probability p, a pass over w positions gives a row
1 + p + p^2 + ... + p^(w-1) tokens on average. The table has the speed-up over passes without drafts that follows from
the times, so its maximum over w is the best length of a draft for this p.

A further draft token pays only if its acceptance probability is above the share of a token's time that it adds to the
pass, which the column "least probability" contains. The share is the same for every row of the pass, so the best drafts
of a batch end, in each row, before the first token below it. A second token for the same place, as in a draft tree,
pays under the same condition, and the probabilities of both are at most 1 together.

All widths are timed in each round, in rotating order. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from benchmarks.run import SPREAD, Option, Run, in_turn, spread
from benchmarks.steps import Shape, pass_seconds
from ssd.model.loading.load_target import open_target

PROBABILITIES: Final = (0.5, 0.7, 0.9, 1.0)

OPTIONS: dict[str, Any] = {
    "batch": Option(default=[1, 4, 8], help="batch sizes"),
    "draft": Option(default=[1, 2, 4, 8], help="numbers of draft tokens per row, ascending; 0 is always measured"),
    "context": Option(default=64, help="number of tokens of each row before the pass"),
    "passes": Option(default=1, help="number of passes that are timed together"),
    "rounds": 15,
}
COLUMNS = (
    ("model", "{model}"),
    (">batch", "{batch}"),
    (">draft tokens per row", "{draft}"),
    (">time of a pass, ms", SPREAD.replace("%s", "ms")),
    (">least probability", "{least_probability:.2f}"),
    *((f">speed-up if p = {p:g}", f"{{speed_ups[{number}]:.2f}}") for number, p in enumerate(PROBABILITIES)),
)
NOTE = (
    "Times: median (minimum ... maximum) of {parameters[rounds]} rounds, after {parameters[context]} tokens of each "
    "row; the other columns: medians of the ratios within a round. The command is `python -m benchmarks.limits`, with "
    "float32 weights. Measured on {measured}."
)
RUN = "threads: {threads}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    this = Run("limits", __doc__, argv, OPTIONS, COLUMNS, has_model=True, has_shapes=True)
    args, (_, model) = this.args, this.load()
    drafts = [0, *args.draft]
    for batch in args.batch:
        longest = max(drafts)
        target = open_target(
            model, num_slots=batch, max_length=args.context + longest + 2, max_draft_tokens=longest, keeps_top=False
        )
        seconds: dict[int, list[float]] = {draft: [] for draft in drafts}
        for number in range(args.rounds):
            for draft in in_turn(drafts, number):
                seconds[draft].append(pass_seconds(target, Shape(batch, args.context, draft), args.passes))
        for row in rows_of(batch, seconds):
            this.row(row)
    return this.end()


def rows_of(batch: int, seconds: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each number of draft tokens. Ratios are medians of the ratios within a round.

    ``seconds`` are the times of passes in each round, by the number of draft tokens per row, 0 included.
    """
    rows, before = [], 0
    for draft, times in seconds.items():
        added = [
            (more - less) / (plain * max(1, draft - before))
            for more, less, plain in zip(times, seconds[before], seconds[0], strict=True)
        ]
        gain = median(plain / time for plain, time in zip(seconds[0], times, strict=True))
        tokens = [sum(p**place for place in range(draft + 1)) for p in PROBABILITIES]
        rows.append(
            {
                "batch": batch,
                "draft": draft,
                "ms": spread([1e3 * each for each in times]),
                "least_probability": round(median(added), 3) if draft else None,
                "speed_ups": [round(each * gain, 3) for each in tokens],
            }
        )
        before = draft
    return rows


if __name__ == "__main__":
    sys.exit(main())
