"""What files import, read from their text: nothing is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("ssd", "cache_builder", "server", "benchmarks", "tests")


@cache
def imports_of(path: Path, *, at_load: bool = False) -> frozenset[str]:
    """Absolute names of everything a file imports; ``at_load``: without what it imports in functions and under ifs."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if at_load else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def loaded_by(path: Path) -> set[str]:
    """Names of everything that importing a file imports, directly or through other files of ours. O(their size)."""
    names: set[str] = set()
    waiting = [path]
    while waiting:
        new = imports_of(waiting.pop(), at_load=True) - names
        names |= new
        waiting += [file for name in new for file in _files_of(name)]
    return names


def _files_of(name: str) -> Iterator[Path]:
    """The file of a module of ours, and those of the packages that it is in."""
    parts = name.split(".")
    if parts[0] in TOPS:
        places = [ROOT.joinpath(*parts[: i + 1]) for i in range(len(parts))]
        yield from (file for place in places if (file := place / "__init__.py").is_file())
        if (file := places[-1].with_suffix(".py")).is_file():
            yield file
