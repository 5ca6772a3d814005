"""The index, by its size and beside others."""

from __future__ import annotations

from typing import Any


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
        "| | bytes a token | present, us p50 | ours faster by | broken, us p50 | ours faster by |",
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
        "Those without stored bytes look at the request's own text, here 64 tokens, and at nothing else. "
        "Below 1x ours is the slower one.",
    ]
