"""What coupled rollouts save in training, and what becomes of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

_ROWS = (
    ("passes", "passes for a token"),
    ("row_passes", "passes for a token, each row counted"),
    ("seconds", "time of generating"),
    ("cpu_s", "CPU time of generating"),
)


def rollouts_section(result: dict[str, Any]) -> str:
    """Two tables: how many times less than speculation off, and rewards, by epoch."""
    parameters, environment = result["parameters"], result["environment"]
    epochs = range(1, parameters["epochs"] + 1)
    titles = [*(f"epoch {epoch}" for epoch in epochs), "all"]
    lines = [f"| times less than speculation off | {' | '.join(titles)} |", f"|---|{'--:|' * len(titles)}"]
    for key, title in _ROWS:
        lines.append(f"| {title} | {' | '.join(map(_spread, result['over_off'][key]))} |")
    titles = [*(f"epoch {epoch}" for epoch in epochs), "after, other noise"]
    lines += ["", f"| mean reward | {' | '.join(titles)} |", f"|---|{'--:|' * len(titles)}"]
    for name, found in result["contenders"].items():
        columns = [*zip(*found["rewards"], strict=True), found["rewards_after"]]
        lines.append(f"| {name} | {' | '.join(map(_rewards, columns))} |")
    same = "are the same" if result["same_answers_without_speculation"] else "differ"
    loading = 1000 * result["contenders"]["coupled"]["loading_s"]
    lines += [
        "",
        f"`python -m benchmarks.rollouts` on {result['date']}: GRPO, {result['model']}, {environment['cpu']}, "
        f"{environment['cores']} cores, {parameters['seeds']} seeds, {parameters['prompts']} prompts of "
        f"{parameters['num_generations']} samples of at most {parameters['max_tokens']} tokens, "
        f"{parameters['prompts_per_step']} prompts a step, {parameters['slots']} slots, temperature "
        f"{parameters['temperature']}, learning rate {parameters['learning_rate']:g}; reward 1 where something is "
        "returned. Medians (least ... most) over seeds, of rewards means. Contenders with "
        "one figure ran with the first seed. "
        f"The answers of the first coupled run and those of its noise without speculation {same}. Taking weights over: "
        f"{loading:.0f} ms.",
    ]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    middle, least, most = values
    return f"{middle:.2f}x ({least:.2f} ... {most:.2f})"


def _rewards(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} ... {max(values):.3f})"
