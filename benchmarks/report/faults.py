"""The tables of faults, for SECURITY.md."""

from __future__ import annotations

from typing import Any

_COLUMNS = ("right", "interrupted", "failed", "changed", "promised", "lost", "twice", "elsewhere")


def faults_section(result: dict[str, Any]) -> str:
    """A line a fault, the sum, and what it was measured on."""
    environment, parameters = result["environment"], result["parameters"]
    lines = [
        "| fault | answers right | cut off | failed | changed | notes promised | lost | twice | elsewhere |",
        "|---|" + "--:|" * len(_COLUMNS),
    ]
    for row in result["rows"]:
        if row.get("skipped"):
            lines.append(f"| {row['fault']} | skipped: {row['skipped']} |" + " |" * (len(_COLUMNS) - 1))
        else:
            lines.append(f"| {row['fault']} | " + " | ".join(f"{row[name]:,}" for name in _COLUMNS) + " |")
    lines += [
        "| **all** | " + " | ".join(f"**{result[name]:,}**" for name in _COLUMNS) + " |",
        "",
        f"`python -m benchmarks.faults` on {result['date']}: real servers of the bundled model under "
        f"{parameters['clients']} clients, {environment['cpu']}, {environment['cores']} cores, {parameters['rounds']} "
        f"round of each fault and {parameters['combinations']} combinations from seed {parameters['seed']}. Every "
        "answer is compared with the same model without speculation. Cut off: the server was killed while it answered. "
        "A note is a text that was acknowledged and has to be found afterwards, once, in its namespace.",
    ]
    return "\n".join(lines)


_FLEET_COLUMNS = ("right", "interrupted", "failed", "changed", "deaf")


def fleet_section(result: dict[str, Any]) -> str:
    """A line a round, the sum, and what it was measured on."""
    environment, parameters, steps = result["environment"], result["parameters"], result["steps"]
    lines = [
        "| round | answers right | cut off | failed | changed | not shared in 30 s | shared again after |",
        "|---|" + "--:|" * (len(_FLEET_COLUMNS) + 1),
    ]
    for row in result["rows"]:
        if row["sharing_back_s"] is not None or row["deaf"]:
            shared = "" if row["sharing_back_s"] is None else f"{row['sharing_back_s']:.1f} s"
            counts = " | ".join(f"{row[name]:,}" for name in _FLEET_COLUMNS)
            lines.append(f"| {row['faults']} | {counts} | {shared} |")
    lines += [
        "| **all** | " + " | ".join(f"**{result[name]:,}**" for name in _FLEET_COLUMNS) + " | |",
        "",
        f"`python -m benchmarks.fleet_faults` on {result['date']}: {parameters['servers']} real servers of the bundled "
        f"model, a proxy between each and one Redis, two tenants, {environment['cpu']}, {environment['cores']} cores, "
        f"{parameters['rounds']} rounds from seed {parameters['seed']}. A round is over when what each server learned "
        "is drafted by all others. Closed in order afterwards, the servers' directories were searched for all "
        f"{result['promised']:,} notes that were promised: {result['lost']} lost, {result['twice']} twice, "
        f"{result['elsewhere']} in another tenant's cache.",
    ]
    if steps is not None:
        low, high = steps["interval"]
        lines[-1] += (
            f" With a healthy Redis, on which others write {steps['others_tokens_per_s']:,} tokens/s, an answer took "
            f"{steps['ratio']:.3f} times as long as without one ({low:.3f} ... {high:.3f}, {steps['pairs']} pairs)."
        )
    return "\n".join(lines)
