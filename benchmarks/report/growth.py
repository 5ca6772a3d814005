"""The growth figure and its table."""

from __future__ import annotations

from typing import Any


def growth_section(result: dict[str, Any]) -> str:
    """The growth figure, its table and what it was measured on."""
    caution = "A small model repeats itself more than a large one when greedy, so the sampled rows are the fairer ones."
    return f"{growth_figure('growth')}\n\n{growth_table(result)} {caution}"


def growth_figure(name: str) -> str:
    """The figure that was written with the result of this name."""
    return f"![tokens per second against tokens cached](../benchmarks/results/{name}.png)"


def growth_table(result: dict[str, Any]) -> str:
    """A row a stream and sampling, how outputs compare, and what it was measured on."""
    parameters, again = result["parameters"], result["repeated_requests"]
    lines = [
        "| stream | sampling | on / off, first fifth | last fifth | min ... max | tokens per pass, first -> last |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        lines.append(
            f"| {run['shares']} | {run['sampling']} | {run['speedup_first']:.2f}x | {run['speedup_last']:.2f}x "
            f"| {run['speedup_min']:.2f} ... {run['speedup_max']:.2f} "
            f"| {run['acceptance_length_first']:.2f} -> {run['acceptance_length_last']:.2f} |"
        )
    tokens = 2 * again["output_tokens"] + sum(run["output_tokens"] for run in result["runs"])
    lines += [
        "",
        f"The same {again['requests']} greedy requests twice: {again['steps_first']} forward passes on an empty cache, "
        f"{again['steps_second']} the second time, at {again['speedup_second']:.1f}x the tokens/s of speculation off. "
        f"Every output was compared with speculation off: {tokens:,} tokens, no difference.",
        "",
        f"`python -m benchmarks.growth` on {measured_on(result)}, batch {parameters['batch']}, "
        f"{parameters['requests']} requests of at most {parameters['max_tokens']} tokens, draft limit "
        f"{parameters['num_speculative_tokens']}. On and off ran in turn; figures are medians over windows.",
    ]
    return "\n".join(lines)


def measured_on(result: dict[str, Any]) -> str:
    """When, and on what model and machine."""
    environment = result["environment"]
    return (
        f"{result['date']}: {result['model']}, {result['dtype'].split('.')[-1]}, {environment['cpu']}, "
        f"{environment['cores']} cores"
    )
