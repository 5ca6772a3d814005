"""Tables of training with rollouts of shared noise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.report.engine import Result, said, section, spread
from benchmarks.run import Columns, table


def rollouts_section(results: Sequence[Result]) -> str:
    """Of each result two tables: how many times less than speculation off, and rewards, by epoch."""
    rows = {
        "passes": "passes for a token",
        "row_passes": "passes for a token, each row counted",
        "seconds": "time of generating",
        "cpu_s": "CPU time of generating",
    }
    parts = []
    for result in results:
        epochs = result["parameters"]["epochs"]
        titles = [f">epoch {epoch}" for epoch in range(1, epochs + 1)]
        less = [(f"{title}", spread(f"by[{place}]")) for place, title in enumerate([*titles, ">all"])]
        columns: Columns = (("times less than speculation off", "{what}"), *less)
        saved = [{"what": what, "by": result["over_off"][key]} for key, what in rows.items()]
        reward = [(title, f"{{by[{place}]}}") for place, title in enumerate([*titles, ">after, other noise"])]
        rewards = [
            {"name": name, "by": [_rewards(each) for each in (*zip(*of["rewards"], strict=True), of["rewards_after"])]}
            for name, of in result["contenders"].items()
        ]
        note = said(
            "{date}: {model}, {environment[cpu]}, {environment[cores]} cores, {parameters[seeds]} seeds. The answers "
            "of the first coupled run and those of its noise without speculation {same}. Taking weights over: "
            "{ms:.0f} ms.",
            result,
            same="are the same" if result["same_answers_without_speculation"] else "differ",
            ms=1000 * result["contenders"]["coupled"]["loading_s"],
        )
        parts += [
            f"Learning rate {result['parameters']['learning_rate']:g}:",
            "\n".join(table(columns, saved)),
            section((("mean reward", "{name}"), *reward), rewards, note),
        ]
    note = (
        "`python -m benchmarks.rollouts`: GRPO, {parameters[prompts]} prompts of {parameters[num_generations]} samples "
        "of at most {parameters[max_tokens]} tokens, {parameters[prompts_per_step]} prompts a step, "
        "{parameters[slots]} slots, temperature {parameters[temperature]}; reward 1 where something is returned. "
        "Medians (least ... most) over seeds, of rewards means. Contenders with one figure ran with the first seed."
    )
    return "\n\n".join([*parts, said(note, results[0])])


def _rewards(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} ... {max(values):.3f})"
