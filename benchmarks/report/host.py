"""The host's part of a step."""

from __future__ import annotations

from typing import Any

_TRAFFIC = {"off": "speculation off", "new": "new text", "again": "stored text", "sampled": "stored text, sampled"}


def host_section(result: dict[str, Any]) -> str:
    """Microseconds a step, by traffic and batch."""
    parts = list(result["rows"][0]["parts_us_p50"])
    lines = [
        f"| traffic | rows | host, us a step | a device waits, us | of a pass | {' | '.join(parts)} | drafted a row |",
        "|---|--:|--:|--:|--:|" + "--:|" * len(parts) + "--:|",
    ]
    for row in result["rows"]:
        by_part = " | ".join(f"{row['parts_us_p50'][part]:.0f}" for part in parts)
        lines.append(
            f"| {_TRAFFIC[row['traffic']]} | {row['batch']} | {row['host_us_p50']:.0f} | {row['exposed_us_p50']:.0f} "
            f"| {row['exposed_us_p50'] / row['pass_us']:.1%} | {by_part} | {row['drafted_per_row']:.1f} |"
        )
    parameters, environment = result["parameters"], result["environment"]
    lines += [
        "",
        f"`python -m benchmarks.host` on {result['date']}: {environment['cpu']}, {environment['cores']} cores, medians "
        f"of {parameters['rounds']} rounds of {parameters['steps']} steps, at most {parameters['limit']} drafted "
        "tokens a row. All is real but the model: its passes take what those of Llama-3.1-8B take on an H100 by a "
        "published cost model, and are driven as recorded ones are. A device waits from the tokens of a pass to the "
        "next launch; the rest is done while it computes. Of a pass: of one without drafts.",
    ]
    return "\n".join(lines)
