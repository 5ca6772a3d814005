"""A figure is of one commit: which of those that the pages show are older than the code under them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.run import git

_ALL: Final = ("ssd", "server", "cache_builder")
"""Under a result that does not say what lies under it."""


def old_figures(directory: Path, names: Iterable[str]) -> Iterator[str]:
    """A line for each of the results below ``directory`` that is not of this code, or of which git cannot tell."""
    if git("rev-parse", "HEAD") is None:
        yield "not in a git checkout: it cannot be told whether figures are of this code"
        return
    for name in names:
        path = directory / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else None
        if result is not None and (why := _why_old(result)):
            commit = result["environment"]["commit"]
            yield f"{name}: of {result.get('date', 'an unknown date')}, commit {commit}: {why}"


def _why_old(result: Mapping[str, Any]) -> str:
    under = result.get("under", _ALL)
    commit = result["environment"]["commit"].removesuffix("+")
    changes = git("log", "--oneline", f"{commit}..HEAD", "--", *under)
    if changes is None:
        return "this checkout does not know it, so it cannot be told what has changed since"
    return changes and f"{len(changes.splitlines())} commits since changed {', '.join(under)}"


def origins(results: Iterable[Mapping[str, Any]]) -> str:
    """Dates and commits of what was measured, for people."""
    by_date: dict[str, dict[str, None]] = {}
    for result in sorted(results, key=lambda each: str(each["date"])):
        by_date.setdefault(result["date"], {})[f"`{result['environment']['commit']}`"] = None
    return "; ".join(f"{date} at {', '.join(commits)}" for date, commits in by_date.items())
