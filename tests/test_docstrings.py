"""Docstrings name the arguments there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUOTED = re.compile(r"((?:``\w+``(?:, | and )?)+) :(?=\s)")
PLAIN = re.compile(r"(?:^|[.;:]\s+)(\w+(?:, \w+)*) :(?=\s)", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented(text: str) -> set[str]:
    """Names that a docstring explains, as ``name`` : or name : at the beginning of a line or sentence."""
    found = {name for group in QUOTED.findall(text) for name in re.findall(r"``(\w+)``", group)}
    return found | {name for group in PLAIN.findall(text) for name in group.split(", ")}


def arguments(function: Function) -> set[str]:
    given = function.args
    rest = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)}


def members(owner: ast.ClassDef) -> set[str]:
    """Fields, methods, arguments of ``__init__`` and attributes that methods set."""
    found: set[str] = set()
    for part in ast.walk(owner):
        if isinstance(part, Function):
            found.add(part.name)
            if part.name in ("__init__", "__new__"):
                found |= arguments(part)
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        found.add(name.id)
                    elif isinstance(name, ast.Attribute):
                        found.add(name.attr)
    return found


def wrong_names(source: str) -> Iterator[tuple[str, set[str]]]:
    """Of each docstring that explains a name its function or class has not: whose, and which names."""

    def visit(node: ast.AST, owner: set[str], prefix: str) -> Iterator[tuple[str, set[str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function):
                is_class = isinstance(child, ast.ClassDef)
                known = members(child) if isinstance(child, ast.ClassDef) else arguments(child) | owner
                if unknown := documented(ast.get_docstring(child) or "") - known:
                    yield f"{prefix}{child.name}", unknown
                yield from visit(child, known if is_class else set(), f"{prefix}{child.name}.")

    yield from visit(ast.parse(source), set(), "")


def test_docstrings_name_what_is_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}: {', '.join(sorted(unknown))}"
        for room in ("ssd", "server", "cache_builder", "benchmarks", "examples")
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, unknown in wrong_names(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_argument_that_is_not_there_is_found() -> None:
    quoted = 'def f(a: int) -> None:\n    """Does.\n\n    ``a`` : one. ``b``, ``c`` : others.\n    """\n'
    plain = 'def f(a: int) -> None:\n    """Does.\n\n    a : one. d : another.\n    """\n'
    fields = 'class C:\n    """Holds.\n\n    ``x`` : is there. ``y`` : is not.\n    """\n\n    x: int\n'
    assert list(wrong_names(quoted)) == [("f", {"b", "c"})]
    assert list(wrong_names(plain)) == [("f", {"d"})]
    assert list(wrong_names(fields)) == [("C", {"y"})]
