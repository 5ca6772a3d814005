"""The table of faults, for SECURITY.md."""

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
