"""What each source of drafts brings alone, and all together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report.growth import measured_on
from benchmarks.report.spread import ratio_with_spread


def sources_section(results: Sequence[dict[str, Any]]) -> str:
    """A table a model: tokens a pass and tokens/s over speculation off, of every source and sampling."""
    lines: list[str] = []
    for result in results:
        lines += [*_table(result), ""]
    parameters = results[0]["parameters"]
    lines.append(
        f"`python -m benchmarks.sources`: prompts of at most {parameters['prompt_tokens']} tokens, none twice, outputs "
        f"of at most {parameters['max_tokens']}, caches empty at first, one request at a time to each contender in "
        f"turn; sampled: temperature {parameters['temperature']}, top-p {parameters['top_p']}. Medians over rounds "
        "(least ... most), prompts included. By CPU time: tokens per second of it, which other programs on the machine "
        "change less."
    )
    return "\n".join(lines)


def _table(result: dict[str, Any]) -> list[str]:
    """Its lines, and what it was measured on."""
    lines = [
        "| sampling | source | tokens a pass | tokens/s over off | by CPU time | drafted a pass |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        lines += [
            f"| {run['sampling']} | {row['source']} | {row['tokens_per_pass'][0]:.2f} "
            f"| {ratio_with_spread(row['over_off'])} | {ratio_with_spread(row['over_off_by_cpu_time'])} "
            f"| {row['drafted_per_pass'][0]:.1f} |"
            for row in run["rows"][1:]
        ]
    bests = []
    for run in result["runs"]:
        if (found := run["all_over_best"]) is not None:
            by_clock, by_cpu_time = found["ratio"][0], found["ratio_by_cpu_time"][0]
            bests.append(f"{run['sampling']} {by_clock:.2f}x {found['best']}, {by_cpu_time:.2f}x by CPU time")
    compared = sum(run["compared_tokens"] for run in result["runs"])
    parameters = result["parameters"]
    lines += [
        "",
        f"{measured_on(result)}, {parameters['requests']} requests, {parameters['rounds']} rounds. All together over "
        f"the best alone: {'; '.join(bests)}. {compared:,} tokens compared with speculation off: no difference.",
    ]
    return lines
