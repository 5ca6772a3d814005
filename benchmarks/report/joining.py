"""How fast a replica joins, and text is pushed and pulled."""

from __future__ import annotations

from typing import Any


def joining_section(result: dict[str, Any]) -> str:
    """A row a figure."""
    tokens = f"{result['namespace_tokens'] / 1e6:.0f}M tokens"
    rows = [
        (f"joining {tokens}: first useful draft", f"{result['first_draft_s']:.2f} s"),
        ("all of it", f"{result['all_s']:.1f} s"),
        ("accepted a step, of the oldest's", f"{result['accepted_joined'] / result['accepted_oldest']:.1%}"),
    ]
    if "push_s" in result:
        pushed = f"{result['pushed_tokens'] / 1e6:.0f}M tokens"
        rows += [
            (f"pushing {pushed}", f"{result['push_s']:.1f} s"),
            ("bytes sent a token", f"{result['pushed_bytes'] / result['pushed_tokens']:.2f}"),
            ("until a server searches them", f"{result['searched_s']:.1f} s"),
            ("pulling them", f"{result['pull_s']:.1f} s"),
        ]
    environment = result["environment"]
    lines = ["| what | here |", "|---|--:|", *(f"| {what} | {figure} |" for what, figure in rows), ""]
    lines.append(
        f"`python -m benchmarks.joining`, {environment['cpu']}, {environment['cores']} cores, made text, both replicas "
        "and Redis on this machine."
    )
    return "\n".join(lines)
