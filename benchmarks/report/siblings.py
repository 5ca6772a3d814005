"""What samples of one prompt bring each other while they run."""

from __future__ import annotations

from typing import Any

from benchmarks.report.engine import ON, said, spread


def siblings_section(result: dict[str, Any]) -> str:
    """A row a number of samples, noise and distance: drafts without and with what the others say, in turn."""
    names = "tokens a pass", "tokens per CPU second over off", "tokens a pass, cheap"
    figures = [f"{name}, {by}" for name in names for by in ("each for itself", "from each other")]
    lines = [f"| {' | '.join(['samples', 'begin', 'noise', *figures])} |", "|--:|---|---|--:|--:|--:|--:|--:|--:|"]
    for run in result["runs"]:
        begin = "together" if run["apart"] == 0 else f"{run['apart']} passes apart"
        _, alone, live, alone_cheap, live_cheap = run["rows"]
        lines.append(
            f"| {run['samples']} | {begin} | {run['noise']} | {alone['tokens_per_pass'][0]:.2f} "
            f"| {live['tokens_per_pass'][0]:.2f} | {said(spread('over_off_by_cpu_time'), alone)} "
            f"| {said(spread('over_off_by_cpu_time'), live)} "
            f"| {alone_cheap['tokens_per_pass'][0]:.2f} | {live_cheap['tokens_per_pass'][0]:.2f} |"
        )
    parameters = result["parameters"]
    compared = sum(run["compared_tokens"] for run in result["runs"])
    lines += [
        "",
        f"`python -m benchmarks.siblings` on {said(ON, result)}: {parameters['prompts']} prompts of at most "
        f"{parameters['prompt_tokens']} tokens, none twice, answers of at most {parameters['max_tokens']}, temperature "
        f"{parameters['temperature']}, top-p {parameters['top_p']}, caches empty at first; medians over "
        f"{parameters['rounds']} rounds (least ... most), each of other prompts. CPU time is what other "
        "programs on the machine change least. Cheap: at a price of "
        f"{parameters['price']} accepted tokens for each drafted one, whatever was measured. {compared:,} tokens "
        "compared with speculation off: no difference.",
    ]
    return "\n".join(lines)
