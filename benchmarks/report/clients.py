"""The table of other people's clients, for docs/clients.md."""

from __future__ import annotations

from typing import Any


def clients_section(result: dict[str, Any]) -> str:
    """A line a client: what it is made of, and every claim about it."""
    lines = ["| client | versions | what it did | claims that hold |", "|---|---|---|--:|"]
    for name, found in result["clients"].items():
        versions = ", ".join(f"{package} {number}" for package, number in found["versions"].items())
        failed = [f"**not**: {claim}" for claim in found["failed"]]
        claims = len(found["passed"])
        lines.append(
            f"| {name} | {versions} | {'; '.join([*found['passed'], *failed])} | {claims} of {claims + len(failed)} |"
        )
    environment = result["environment"]
    lines += [
        "",
        f"`make bench-clients` on {result['date']}, {environment['cpu']}, {environment['cores']} cores: one server of "
        "the bundled model with an API key, all clients as they are published.",
    ]
    return "\n".join(lines)
