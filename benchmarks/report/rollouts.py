"""What coupled rollouts save in training, and what becomes of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.report.spread import ratio_with_spread

_ROWS = (
    ("passes", "passes for a token"),
    ("row_passes", "passes for a token, each row counted"),
    ("seconds", "time of generating"),
    ("cpu_s", "CPU time of generating"),
)


def rollouts_section(results: Sequence[dict[str, Any]]) -> str:
    """Of each result two tables: how many times less than speculation off, and rewards, by epoch."""
    lines: list[str] = []
    for result in results:
        lines += [f"Learning rate {result['parameters']['learning_rate']:g}:", "", *_tables(result), ""]
    parameters = results[0]["parameters"]
    lines.append(
        f"`python -m benchmarks.rollouts`: GRPO, {parameters['prompts']} prompts of {parameters['num_generations']} "
        f"samples of at most {parameters['max_tokens']} tokens, {parameters['prompts_per_step']} prompts a step, "
        f"{parameters['slots']} slots, temperature {parameters['temperature']}; reward 1 where something is returned. "
        "Medians (least ... most) over seeds, of rewards means. Contenders with one figure ran with the first seed."
    )
    return "\n".join(lines)


def _tables(result: dict[str, Any]) -> list[str]:
    """Their lines, and what they were measured on."""
    parameters, environment = result["parameters"], result["environment"]
    epochs = range(1, parameters["epochs"] + 1)
    titles = [*(f"epoch {epoch}" for epoch in epochs), "all"]
    lines = [f"| times less than speculation off | {' | '.join(titles)} |", f"|---|{'--:|' * len(titles)}"]
    for key, title in _ROWS:
        lines.append(f"| {title} | {' | '.join(map(ratio_with_spread, result['over_off'][key]))} |")
    titles = [*(f"epoch {epoch}" for epoch in epochs), "after, other noise"]
    lines += ["", f"| mean reward | {' | '.join(titles)} |", f"|---|{'--:|' * len(titles)}"]
    for name, found in result["contenders"].items():
        columns = [*zip(*found["rewards"], strict=True), found["rewards_after"]]
        lines.append(f"| {name} | {' | '.join(map(_rewards, columns))} |")
    same = "are the same" if result["same_answers_without_speculation"] else "differ"
    loading = 1000 * result["contenders"]["coupled"]["loading_s"]
    return [
        *lines,
        "",
        f"{result['date']}: {result['model']}, {environment['cpu']}, {environment['cores']} cores, "
        f"{parameters['seeds']} seeds. The answers of the first coupled run and those of its noise without speculation "
        f"{same}. Taking weights over: {loading:.0f} ms.",
    ]


def _rewards(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} ... {max(values):.3f})"
