"""Tables made from the code itself: the flags of the server."""

from __future__ import annotations

import argparse

from server.command.arguments import build_parser


def flags_section() -> str:
    """Every flag of ``ssd-serve``, a table a group, with its default."""
    parser = build_parser()
    formatter = argparse.HelpFormatter("ssd-serve")
    lines: list[str] = []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help not in (None, argparse.SUPPRESS)]
        if not shown:
            continue
        lines += [f"**{group.title}**", "", "| flag | meaning |", "|---|---|"]
        for action in shown:
            names = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
            choices = f" {' / '.join(map(str, action.choices))}." if action.choices else ""
            lines.append(f"| {names} |{choices} {cell(formatter._expand_help(action))} |")
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """``text`` as it stands in a table, on one line."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")
