"""Trained draft heads of the bundled model."""

from __future__ import annotations

from typing import Any

_KINDS = {"eagle3": "EAGLE-3", "medusa": "Medusa, 4 heads"}


def heads_section(run: dict[str, Any]) -> str:
    """One row a head and way of drafting: share of chains accepted to each depth, tokens a pass."""
    lines = [
        "| head | text | drafted | to depth 1 | 2 | 3 | 4 | tokens accepted |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for result in run["results"]:
        for text in result["held_out"]:
            sampled = f"temperature {text['temperature']}" if text["temperature"] else "greedy"
            for key, drafted in (
                ("most_probable", "most probable token"),
                ("outside_loops", "most probable token, outside loops"),
                ("same_noise", "with the target's noise"),
            ):
                if key in text:
                    shares = " | ".join(f"{share:.1%}" for share in text[key]["accepted_to_depth"])
                    lines.append(
                        f"| {_KINDS[result['kind']]} | {sampled} | {drafted} | {shares} | {text[key]['accepted']:.2f} |"
                    )
    lines.append("")
    for result in run["results"]:
        lines.append(
            f"- {_KINDS[result['kind']]}: {result['steps']} steps, {result['tokens'] / 1e6:.2f} M tokens read in "
            f"{result['seconds'] / 60:.0f} minutes on {result['threads']} threads that others kept busy, "
            f"{result['bytes'] / 1e6:.2f} MB; one pass takes {result['head_pass_ms']:.2f} ms of one core, the target's "
            f"{result['target_pass_ms']:.2f} ms"
        )
    environment, rows = run["environment"], run["parameters"]["rows"]
    return "\n".join(
        [
            *lines,
            "",
            f"Measured on {run['date']}, {environment['cpu']}, by "
            f"`python -m benchmarks.head_training` from what was saved; times on one thread. {rows} greedy and {rows} "
            "sampled texts behind prompts of files that nothing was trained on, a chain at every position: "
            + " and ".join(
                f"{text['loop_share']:.0%} of the {'sampled' if text['temperature'] else 'greedy'} tokens"
                for text in run["results"][0]["held_out"]
            )
            + " lie inside loops.",
        ]
    )
