"""Splice measured figures into the README: ``python -m benchmarks.report``.

Reads ``benchmarks/results/growth.json`` and ``replay.json`` and rewrites what stands between the markers
``<!-- growth:begin -->`` ... ``<!-- growth:end -->`` (and ``replay``). No figure in the README is typed by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Rewrite the README's figures."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, render in (("growth", growth_section), ("replay", replay_section)):
        path = RESULTS / f"{name}.json"
        if path.exists():
            text = spliced(text, name, render(json.loads(path.read_text())))
    readme.write_text(text)


def spliced(text: str, name: str, section: str) -> str:
    """``text`` with the part between the markers of ``name`` replaced."""
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"the README has no markers for {name!r}")
    return pattern.sub(lambda match: f"{match[1]}{section.strip()}\n{match[2]}", text)


def growth_section(result: dict[str, Any]) -> str:
    """The growth figure, its table and what it was measured on."""
    environment, parameters = result["environment"], result["parameters"]
    again = result["repeated_requests"]
    lines = [
        "![tokens per second against tokens cached](benchmarks/results/growth.png)",
        "",
        "| stream | sampling | on / off, first fifth | last fifth | min ... max | tokens per pass, first -> last |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        lines.append(
            f"| {run['shares']} | {run['sampling']} | {run['speedup_first']:.2f}x | {run['speedup_last']:.2f}x "
            f"| {run['speedup_min']:.2f} ... {run['speedup_max']:.2f} "
            f"| {run['acceptance_length_first']:.2f} -> {run['acceptance_length_last']:.2f} |"
        )
    ties = again["ties"] + sum(run["ties"] for run in result["runs"])
    tokens = 2 * again["output_tokens"] + sum(run["output_tokens"] for run in result["runs"])
    lines += [
        "",
        f"The same {again['requests']} greedy requests twice: {again['steps_first']} forward passes on an empty cache, "
        f"{again['steps_second']} the second time, at {again['speedup_second']:.1f}x the tokens/s of speculation off. "
        f"Every output was compared with speculation off: {tokens:,} tokens, {ties} near-ties, no other difference.",
        "",
        f"`python -m benchmarks.growth` on {result['date']}: {result['model']}, {result['dtype'].split('.')[-1]}, "
        f"{environment['cpu']}, {environment['cores']} cores, batch {parameters['batch']}, "
        f"{parameters['requests']} requests of at most {parameters['max_tokens']} tokens, draft limit "
        f"{parameters['num_speculative_tokens']}. On and off ran in turn; figures are medians over windows. A small "
        "model repeats itself more than a large one when greedy, so the sampled rows are the fairer ones.",
    ]
    return "\n".join(lines)


def replay_section(result: dict[str, Any]) -> str:
    """Tokens per verify step and drafted tokens per step, a column a drafter."""
    rows = result["results"]
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    lines = [
        f"Tokens per verify step @ drafted tokens per step, draft limit {rows[0]['max_draft']}, tokenizer "
        f"{rows[0]['tokenizer']}:",
        "",
        "| trace | " + " | ".join(drafters) + " |",
        "|---|" + "--:|" * len(drafters),
    ]
    for trace in dict.fromkeys(row["trace"] for row in rows):
        cells = []
        for drafter in drafters:
            row = next(row for row in rows if row["trace"] == trace and row["drafter"] == drafter)
            drafted = row["drafted_tokens"] / row["verify_steps"]
            cells.append(f"{row['mean_acceptance_length']:.2f} @ {drafted:.1f}")
        lines.append(f"| {trace} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
