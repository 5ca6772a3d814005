"""Splice measured figures into the README: ``python -m benchmarks.report``.

Reads ``growth.json``, ``replay.json``, ``replay-curve.json``, ``replay-tree.json`` and ``index-*.json`` in
``benchmarks/results`` and rewrites what stands between the markers ``<!-- growth:begin -->`` ...
``<!-- growth:end -->`` (and so on). No figure in the README is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.settings import OURS, PRICED_BY

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Rewrite the README's figures."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    growth, replay, path, tree = (_result(name) for name in ("growth", "replay", "replay-curve", "replay-tree"))
    if growth is not None:
        text = spliced(text, "growth", growth_section(growth))
    if replay is not None:
        lines = [replay_section(replay), "", curve_section(path, tree) if path is not None else ""]
        text = spliced(text, "replay", "\n".join(lines))
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("index-*.json")]
    if runs:
        text = spliced(text, "index", index_section(sorted(runs, key=stored_tokens)))
    readme.write_text(text)


def _result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


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


def curve_section(path: dict[str, Any], tree: dict[str, Any] | None) -> str:
    """Against other drafters that may draft as much: accepted tokens a step, and what passes cost and give."""
    lines = ["![accepted over drafted tokens per step](benchmarks/results/replay-curve.png)"]
    for drafter in path["comparison"]:
        places = " / ".join(f"{place:.0%}" for place in path["comparison"][drafter]["places"])
        costs = [row["setting"].removeprefix(PRICED_BY) for row in path["results"] if PRICED_BY in row["setting"]]
        costs = list(dict.fromkeys(costs))
        kinds = [("path", path), *([("tree", tree)] if tree is not None else [])]
        lines += [
            "",
            f"Ours beside {drafter}, path against path and tree against tree. Left: accepted tokens per step over "
            f"{drafter}'s at as many drafted ones, {places} along what both curves cover. Right: speed-up over plain "
            f"decoding under a cost curve, ours priced by that curve / the best of {drafter}'s settings in hindsight. "
            "Geometric means over tokenizers.",
            "",
            f"| trace | {' | '.join(f'{kind}, ratio' for kind, _ in kinds)} | "
            + " | ".join(f"{kind}, {cost}" for kind, _ in kinds for cost in costs)
            + " |",
            "|---|" + "--:|" * (len(kinds) + len(kinds) * len(costs)),
        ]
        traces = dict.fromkeys(row["trace"] for row in path["results"])
        for trace in [*traces, None]:
            cells = [_ratios(result["comparison"][drafter], trace) for _, result in kinds]
            cells += [_speed_ups(result["results"], drafter, cost, trace) for _, result in kinds for cost in costs]
            name = trace or "**all**"
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        errors = [
            f"{kind} at most {max(errors):.3f}, {np.mean(errors):.3f} on average"
            for kind, result in kinds
            if (errors := [row["calibration"]["error"] for row in result["results"] if row["drafter"] == OURS])
        ]
        lines += ["", f"Expected calibration error of our estimates over traces and settings: {'; '.join(errors)}."]
    parameters = path["parameters"]
    lines += [
        "",
        f"`make bench`: {len(traces)} traces, tokenizers {', '.join(parameters['tokenizers'])}, the first "
        f"{parameters['max_output_tokens']:,} output tokens of each, draft limit "
        f"{parameters['draft']['num_speculative_tokens']}. Cost curves: free up to 32 tokens and linear beyond; and "
        "one measured on this engine with the bundled model on a CPU. The time of proposals is left out.",
    ]
    return "\n".join(lines)


def _mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def _ratios(comparison: dict[str, Any], trace: str | None) -> str:
    rows = [row["ratios"] for row in comparison["rows"] if row["ratios"] and trace in (None, row["trace"])]
    return " / ".join(f"{_mean(at):.2f}" for at in zip(*rows, strict=True)) if rows else "no overlap"


def _speed_ups(rows: list[dict[str, Any]], drafter: str, cost: str, trace: str | None) -> str:
    ours, theirs = [], []
    for key in dict.fromkeys((row["trace"], row["tokenizer"]) for row in rows):
        here = [row for row in rows if (row["trace"], row["tokenizer"]) == key and trace in (None, key[0])]
        ours += [row["speed_up"][cost] for row in here if row["setting"] == f"{PRICED_BY}{cost}"]
        theirs += [max(row["speed_up"][cost] for row in here if row["drafter"] == drafter)] if here else []
    return f"{_mean(ours):.2f}x / {_mean(theirs):.2f}x"


def stored_tokens(run: dict[str, Any]) -> int:
    """Ring and static segments together."""
    return int(run["tokens"]) + int(run["parameters"]["static"])


_INDEX_ROWS = (
    ("bytes a token at rest, all included", "bytes_per_token", ".1f"),
    ("propose a draft of 10, us p50", "propose_us_p50", ".0f"),
    ("p99", "propose_us_p99", ".0f"),
    ("new text can be drafted after, ms p99", "freshness_ms_p99", ".1f"),
    ("upkeep at 10,000 tokens/s, share of a core", "maintenance_core_share", ".1%"),
    ("propose while merging, us p99", "propose_us_p99_merging", ".0f"),
    ("reopened from disk, s to the first draft", "reopen_s", ".2f"),
)


def index_section(runs: list[dict[str, Any]]) -> str:
    """One column a size, then the peers of the run that asked them."""
    lines = ["| tokens | " + " | ".join(_size(run) for run in runs) + " |", "|---|" + "--:|" * len(runs)]
    for label, key, form in _INDEX_ROWS:
        # Static files are mapped and built elsewhere: what the process grew by says nothing about their tokens.
        figures = [None if key == "bytes_per_token" and run["parameters"]["static"] else run.get(key) for run in runs]
        lines.append(f"| {label} | " + " | ".join(_figure(figure, form) for figure in figures) + " |")
    compared = next((run for run in reversed(runs) if run["peers"]), None)
    if compared is not None:
        lines += ["", *_peers_table(compared)]
    environment = runs[0]["environment"]
    lines += [
        "",
        f"`python -m benchmarks.index`, {environment['cpu']}, {environment['cores']} cores, made text of "
        f"{runs[0]['parameters']['vocab']:,} ids, one thread, called from Python; contexts of 64 tokens never asked "
        "before, half of them present, of the other half only the last 1 to 10 tokens; on what ingest leaves behind.",
    ]
    return "\n".join(lines)


def _size(run: dict[str, Any]) -> str:
    static = int(run["parameters"]["static"])
    text = f"{stored_tokens(run) / 1e6:.0f} M"
    return f"{text}, {static / 1e6:.0f} M of it static files" if static else text


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _peers_table(run: dict[str, Any]) -> list[str]:
    """Rows of one comparison; ratios are within rounds of the same run."""
    lines = [
        f"Beside others on the same {run['parameters']['peer_tokens'] / 1e6:.0f} M tokens, medians of rounds in turn:",
        "",
        "| | bytes a token | present, us p50 | against ours | broken, us p50 | against ours |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, figures in run["peers"].items():
        if "propose_us_present_p50" not in figures:
            continue
        cells = [_figure(figures.get("bytes_per_token"), ".0f") if figures.get("bytes_per_token") else "-"]
        for kind in ("present", "broken"):
            times = figures.get(f"propose_{kind}_times_ours")
            cells += [f"{figures[f'propose_us_{kind}_p50']:.0f}", "" if times is None else f"{times:.1f}x"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "Those without stored bytes look at the request's own text, here 64 tokens, and at nothing else.",
    ]


if __name__ == "__main__":
    main()
