"""Find the published results that were measured with code that behaves differently from the code of this checkout.

A result names the paths that its figures depend on (``under``) and the commit at which it was measured. It is stale if
the code below these paths has changed since that commit in a way that a computer could notice.

The comparison therefore ignores comments, docstrings, formatting and import statements, and it survives refactoring:
files may be renamed, definitions may move to another file, and identifiers may be renamed. It works on *statements*:
every statement of a module, and every statement in the body of a class. A result is fresh if both versions consist of
the same statements, in any order, and the identifiers of each statement were renamed consistently.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from operator import eq
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.child import ROOT
from benchmarks.run import git

Result = Mapping[str, Any]

_ALL: Final = ("ssd", "server", "cache_builder")
"""The paths that a result depends on if it does not name any."""

_EXPORTS: Final = {"__all__", "__slots__"}
"""Assignments that are ignored, because they list identifiers in alphabetical order."""


def stale_figures(directory: Path, names: Iterable[str]) -> Iterator[str]:
    """Describe each stale result in one line: its name, date, commit and the reason.

    Args:
        directory: The directory with the results.
        names: The file names of the results, without ``.json``. Names without a file are skipped.

    Yields:
        A line for each stale result, and for each result that git cannot compare.
    """
    if git("rev-parse", "HEAD") is None:
        yield "not in a git checkout, so it cannot be told whether the figures were measured with this code"
        return
    for name in names:
        path = directory / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else None
        if result is not None and (why := _why_stale(result)):
            commit = result["environment"]["commit"]
            yield f"{name}: measured on {result.get('date', 'an unknown date')} at commit {commit}: {why}"


def _why_stale(result: Result) -> str:
    """Return the reason why a result is stale; an empty string if it is fresh."""
    environment, under = result["environment"], result.get("under", _ALL)
    commit = environment["commit"]
    if commit.endswith("+"):
        return "the code that it depends on was not committed"
    renames = _renames_since(commit)
    if renames is None:
        return "this checkout does not know the commit, so it cannot be told what has changed since"
    pairs = [pair for pair in renames if any(_is_below(path, under) for path in pair)]
    # What only CUDA devices run does not influence figures that a build of torch for CPUs produced.
    has_cuda = not str(environment.get("versions", {}).get("torch")).endswith("+cpu")
    before = {old: text for old, _ in pairs if (text := _text_at(commit, old)) is not None}
    after = {new: path.read_text() for _, new in pairs if (path := ROOT / new).is_file()}
    changed = list(islice(changed_files(before, after, has_cuda=has_cuda), 4))
    return f"changed since: {', '.join(changed[:3])}{', ...' * (len(changed) > 3)}" if changed else ""


def _is_below(path: str, directories: Collection[str]) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in directories)


@cache
def _renames_since(commit: str) -> list[tuple[str, str]] | None:
    """Return the old and new path of each file that changed since ``commit``; None if git does not know the commit."""
    listed = git("diff", "--name-status", "-M40%", "-l0", commit)
    if listed is None:
        return None
    paths = [line.split("\t")[1:] for line in listed.splitlines()]
    return [(each[0], each[-1]) for each in paths]


@cache
def _text_at(commit: str, path: str) -> str | None:
    """Return the text of a file in a commit; None if it is not there."""
    return git("show", f"{commit}:{path}")


class _Statement(NamedTuple):
    """A statement of a module or of the body of a class.

    Attributes:
        text: The syntax tree as a text.
        node: The syntax tree.
        bound: The identifiers that it binds, once for each place.
    """

    text: str
    node: ast.AST
    bound: tuple[str, ...]


class _Unmatched(NamedTuple):
    """A statement of one version that has no identical statement in the other version.

    Attributes:
        path: The path of its file.
        shape: Its text without names, see `_shape`.
        names: The names, in order.
    """

    path: str
    shape: str
    names: list[str]


def changed_files(before: Mapping[str, str], after: Mapping[str, str], *, has_cuda: bool = True) -> Iterator[str]:
    """Compare two versions of some files.

    Args:
        before: The texts of the older version by path.
        after: The texts of the newer version by path.
        has_cuda: Whether to compare Triton kernels and the bodies of ``if tensor.is_cuda:`` too.

    Yields:
        The paths of files with a statement that the other version does not have.
    """
    versions = [
        [(path, each) for path, text in texts.items() for each in _statements(path, text, has_cuda)]
        for texts in (before, after)
    ]
    old, new = (
        Counter([*_path_names(texts), *(name for _, statement in version for name in statement.bound)])
        for texts, version in zip((before, after), versions, strict=True)
    )
    identical = Counter(each.text for _, each in versions[0]) & Counter(each.text for _, each in versions[1])
    left: tuple[list[_Unmatched], list[_Unmatched]] = [], []
    for version, remaining in zip(versions, left, strict=True):
        seen = identical.copy()
        for path, statement in version:
            seen[statement.text] -= 1
            if seen[statement.text] < 0 and not isinstance(statement.node, ast.Import | ast.ImportFrom):
                names: list[str] = []
                shape = _shape(statement.node, old.keys() | new.keys(), names)
                remaining.append(_Unmatched(path, shape, names))
    pairs = [
        (sum(map(eq, one.names, other.names)), i, j)
        for i, one in enumerate(left[0])
        for j, other in enumerate(left[1])
        if one.shape == other.shape and _is_renaming(one.names, other.names, old, new)
    ]
    matched: tuple[set[int], set[int]] = set(), set()
    for _, i, j in sorted(pairs, reverse=True):  # the most similar first
        if i not in matched[0] and j not in matched[1]:
            matched[0].add(i)
            matched[1].add(j)
    rest = (each.path for side, done in zip(left, matched, strict=True) for i, each in enumerate(side) if i not in done)
    yield from dict.fromkeys(rest)


def _path_names(paths: Iterable[str]) -> set[str]:
    """Return the strings by which code may name files: their paths, their directories and their names."""
    known = [Path(path) for path in paths]
    return {str(each) for path in known for each in (path, *path.parents)} | {path.name for path in known}


def _is_renaming(words: Sequence[str], others: Sequence[str], old: Counter[str], new: Counter[str]) -> bool:
    """Return whether one statement becomes the other by renaming identifiers consistently.

    Two different names count as a renaming only if the number of places that bind one of them has changed between the
    versions. Otherwise the difference is rather, for example, a call of another function. One name may have become
    several, or several names one, but not both at once, because then operands may have changed places.

    Args:
        words: The names of the older statement, in order.
        others: The names of the newer statement, in order.
        old: The number of places where the older version binds a name.
        new: The number of places where the newer version binds a name.
    """
    pairs = set(zip(words, others, strict=True))
    before, after = Counter(name for name, _ in pairs), Counter(name for _, name in pairs)
    return all(
        (before[one] == 1 or after[other] == 1)
        and (one == other or (old[one] and new[other] and (old[one] != new[one] or old[other] != new[other])))
        for one, other in pairs
    )


@cache
def _statements(path: str, text: str, has_cuda: bool) -> list[_Statement]:
    """Split a file into its statements, without those that cannot change what the program does.

    The body of a class is split too. A file in another language than Python is one statement.
    """
    if not has_cuda and Path(path).name.startswith("triton_"):
        return []
    if not path.endswith(".py"):
        return [_Statement(text.rstrip("\n"), ast.Constant(text.rstrip("\n")), ())] if text else []
    module = ast.parse(text)
    for node in ast.walk(module):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                is_module = node is module  # whose imports bind names
                setattr(node, field, [each for each in value if not _is_irrelevant(each, keep_imports=is_module)])
        if not has_cuda and isinstance(node, ast.If) and getattr(node.test, "attr", "") == "is_cuda":
            node.body = []
    found: list[_Statement] = []
    waiting: list[ast.AST] = [*module.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef):
            waiting += node.body
            node.body = []
        found.append(_Statement(ast.dump(node), node, tuple(_bound_names(node))))
    return found


def _is_irrelevant(node: object, *, keep_imports: bool) -> bool:
    """Return whether a statement is a docstring, an import, ``pass``, or a list of exported identifiers."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in _EXPORTS for target in node.targets)
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    return is_constant or isinstance(node, ast.Pass) or (is_import and not keep_imports)


def _bound_names(statement: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a statement defines, assigns or takes as parameters, once for each place."""
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.asname
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _shape(node: object, known: Collection[str], names: list[str]) -> str:
    """Return a syntax tree as text with "#" in place of known names, and append these names to ``names`` in order.

    A string that equals a known name counts as one, because it probably names an identifier or a file.
    """
    if isinstance(node, str) and node in known:
        names.append(node)
        return "#"
    if isinstance(node, list):
        return f"[{', '.join(_shape(each, known, names) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    return f"{type(node).__name__}({', '.join(_shape(value, known, names) for _, value in ast.iter_fields(node))})"
