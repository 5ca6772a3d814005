"""Predictions of logs beside what the engine did."""

from __future__ import annotations

from typing import Any

from benchmarks.report.growth import measured_on


def evaluate_section(results: list[dict[str, Any]]) -> str:
    """A row a workload and model, and the median error of each model."""
    lines = [
        "| model | workload | measured | rounds | predicted | error | tokens a step, measured / replayed |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        for found in result["workloads"]:
            rounds = found["measured_rounds"]
            lines.append(
                f"| {result['model']} | {found['workload']}: {found['shares']} | {found['measured']:.2f}x "
                f"| {min(rounds):.2f} ... {max(rounds):.2f} | {found['predicted']:.2f}x | {found['error']:+.1%} "
                f"| {found['tokens_per_step']:.2f} / {found['predicted_tokens_per_step']:.2f} |"
            )
    for result in results:
        parameters = result["parameters"]
        compared = sum(found["output_tokens"] for found in result["workloads"])
        lines += [
            "",
            f"Median error {result['median_error']:.1%}: `python -m benchmarks.evaluate` on {measured_on(result)}, "
            f"{parameters['requests']} greedy requests of each workload, answers of at most {parameters['max_tokens']} "
            f"tokens, medians over {parameters['rounds']} rounds, each with an empty cache at first. Measured is the "
            "time of the output with speculation off over that with it on, both by default. Predicted is what "
            "`ssd-cache evaluate --measure` says of the log of these requests. What the model's own candidates add is "
            "in the predicted speed-up and not in the replayed tokens a step. "
            f"{compared:,} tokens compared: no difference.",
        ]
    return "\n".join(lines)
