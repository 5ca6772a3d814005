"""Retrieval and another drafter under one switch, beside an oracle."""

from __future__ import annotations

from typing import Any

_COLUMNS = ("other_alone", "ours_alone_path", "ours_alone", "both", "oracle", "oracle_tree")


def hybrid_section(result: dict[str, Any]) -> str:
    """A line a file: speed-ups over plain decoding, and how near the switch comes to the oracle."""
    lines = [
        "| recorded requests | number | the other alone | ours alone, chains | ours alone, trees | both "
        "| oracle, chains | oracle, trees | both / oracle | the other asked at |",
        "|---|" + "--:|" * 9,
    ]
    for row in result["results"]:
        cells = " | ".join(f"{row[name]:.2f}x" for name in _COLUMNS)
        shares = f"{row['both'] / row['oracle']:.2f}, {row['both'] / row['oracle_tree']:.2f}"
        name = row["file"].split(".")[0]
        lines.append(f"| {name} | {row['requests']} | {cells} | {shares} | {row['other_asked_share']:.0%} of steps |")
    parameters = result["parameters"]
    return "\n".join(
        [
            *lines,
            "",
            f"`python -m benchmarks.hybrid`, other drafter: {parameters['other']}, drafts of 5 tokens; draft limit "
            f"{parameters['max_draft']}, batch 1.",
        ]
    )
