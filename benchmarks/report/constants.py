"""The tables of tuning constants, whose values are compared with the code: a choice speaks of the value it chose."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report.choices import CHOICES, Choice


def constants_section(root: Path, choices: Mapping[str, Sequence[Choice]] = CHOICES) -> str:
    """Every tuning constant with its value and what chose it, a table a subject, behind it those that nothing chose.

    Raises SystemExit where a constant is not what its choice speaks of: who changes one says what chose the new value.
    """
    lines: list[str] = []
    for subject, members in choices.items():
        for choice in members:
            _check(choice, root / "ssd" / choice.file)
        lines += [f"## {subject}", "", "| constant | value | decides | chosen by |", "|---|---|---|---|"]
        lines += [_row(choice) for choice in members if choice.chosen_by]
        guesses = [_guess(choice) for choice in members if not choice.chosen_by]
        lines += ["", *([f"Not measured: {'; '.join(guesses)}.", ""] if guesses else [])]
    return "\n".join(lines)


def _check(choice: Choice, path: Path) -> None:
    there = _values(path)
    for name, value in choice.values.items():
        if there.get(name) != value:
            raise SystemExit(
                f"{path}: {name} is {there.get(name)}, benchmarks/report/choices.py says what chose {value}"
            )


def _row(choice: Choice) -> str:
    values = ", ".join(f"`{value}`" for value in choice.values.values())
    where = "" if choice.file == "config.py" else f"<br>{choice.file}"
    return f"| {', '.join(map(_shown, choice.values))}{where} | {values} | {choice.decides} | {choice.chosen_by} |"


def _guess(choice: Choice) -> str:
    values = ", ".join(f"{_shown(name)} {value}" for name, value in choice.values.items())
    return f"{values} ({choice.file}: {choice.decides})"


def _shown(name: str) -> str:
    return f"`{name.rpartition('.')[2]}`"


def _values(path: Path) -> dict[str, str]:
    """The text of what a file assigns to names: of the module, and of its classes as ``Class.name``."""
    values: dict[str, str] = {}

    def collect(body: Sequence[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                collect(statement.body, f"{statement.name}.")
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        values[prefix + target.id] = ast.unparse(statement.value)

    collect(ast.parse(path.read_text()).body, "")
    return values
