"""Published figures become stale when the code that they depend on behaves differently, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report.staleness import changed_files, stale_figures
from benchmarks.run import git

SOURCE = '''"""Counts."""

import numpy as np


class Counter:
    """Counts tokens."""

    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, number: int) -> int:
        """Add."""
        self.total += number  # in place
        return np.minimum(self.total, 9)


def first(left: int, right: int) -> int:
    return left - right


def second(left: int, right: int) -> int:
    return first(left, right) + 1
'''


def test_figures_that_are_older_than_their_code_are_named(tmp_path: Path) -> None:
    first = (git("rev-list", "--max-parents=0", "HEAD") or "").split("\n")[0]
    head = git("rev-parse", "HEAD")
    for name, commit in (("new", head), ("old", first), ("strange", "0123456"), ("changed", f"{head}+")):
        # A file that is not code, so that uncommitted work in this checkout does not make figures stale.
        result = {"date": "2026-01-01", "environment": {"commit": commit}, "under": ["pyproject.toml"]}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found = list(stale_figures(tmp_path, ("new", "old", "strange", "changed", "absent")))
    if not first:
        assert len(found) == 1 and "cannot be told" in found[0]
    else:
        assert [line.split(":")[0] for line in found] == ["old", "strange", "changed"]
        assert "changed since: pyproject" in found[0] and "cannot be told" in found[1] and "not committed" in found[2]


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return list(changed_files(before, after))


def test_text_that_does_not_run_is_ignored() -> None:
    silent = (
        SOURCE.replace('"""Counts."""', '"""Other words."""\n\nimport json')
        .replace('        """Add."""\n', "")
        .replace("  # in place", "")
        .replace("left: int, right: int", "left: int,\n    right: int,\n")
    )
    assert silent != SOURCE
    assert changed({"a.py": SOURCE}, {"a.py": silent}) == []


def test_renamed_identifiers_are_ignored() -> None:
    renamed = SOURCE.replace("Counter", "TokenCounter").replace("total", "num_tokens").replace("left", "minuend")
    renamed = renamed.replace("second", "difference").replace("add", "append")
    assert changed({"a.py": SOURCE}, {"a.py": renamed}) == []


def test_one_word_may_become_two() -> None:
    before = "def keep(row):\n    row.kept = row\n\ndef keep_all(row):\n    keep(row.kept)\n\nkept = 1\n"
    after = "def save(entry):\n    entry.saved = entry\n\ndef keep_all(row):\n    save(row.saved)\n\npinned = 1\n"
    assert changed({"a.py": before}, {"a.py": after}) == []
    before, after = (
        "class A:\n    price: int\n\na.price, b.price = 1, 2\n",
        "class A:\n    cost: int\n\na.cost, b.price = 1, 2\n",
    )
    assert changed({"a.py": before}, {"a.py": after}) == []


def test_a_name_may_pass_on_to_another_thing() -> None:
    before = "def clear(x):\n    return 1\n\n\ndef leave(x):\n    return clear(x)\n"
    after = "def clear_draft(x):\n    return 1\n\n\ndef clear(x):\n    return clear_draft(x)\n"
    assert changed({"a.py": before}, {"a.py": after}) == []


def test_moved_and_split_files_are_ignored() -> None:
    head, rest = SOURCE.split("def first")
    split = {"b/counter.py": head, "b/functions.py": f"from b.counter import Counter\n\ndef first{rest}"}
    assert changed({"a.py": SOURCE}, split) == []


def test_strings_that_name_renamed_files_are_ignored() -> None:
    before = {"old/name.py": "a = 1", "b.py": 'paths = ("old", "old/name.py", "name.py", "b.py")'}
    after = {"new/other.py": "a = 1", "b.py": 'paths = ("new", "new/other.py", "other.py", "b.py")'}
    assert changed(before, after) == []
    assert changed(before, {**after, "b.py": 'paths = ("new", "new/other.py", "other.py", "c.py")'}) == ["b.py"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("left - right", "right - left"),
        ("np.minimum", "np.maximum"),
        ("return first(left", "return second(left"),
        ("self.total, 9", "self.total, 10"),
        ("self.total += number", "self.total -= number"),
        ("def add(self, number: int)", "def add(self, number: int = 1)"),
    ],
)
def test_other_behaviour_is_found(old: str, new: str) -> None:
    assert changed({"a.py": SOURCE}, {"a.py": SOURCE.replace(old, new)}) == ["a.py"]


def test_other_behaviour_is_found_among_renamed_identifiers() -> None:
    renamed = SOURCE.replace("left", "minuend").replace("right", "subtrahend")
    swapped = renamed.replace("minuend - subtrahend", "subtrahend - minuend")
    assert changed({"a.py": SOURCE}, {"b.py": swapped}) == ["a.py", "b.py"]


def test_new_deleted_and_foreign_files_are_found() -> None:
    assert changed({"a.py": ""}, {"a.py": SOURCE}) == ["a.py"]
    assert changed({"a.py": SOURCE}, {"a.py": ""}) == ["a.py"]
    assert changed({"a.toml": "x = 1\n"}, {"a.toml": "x = 2\n"}) == ["a.toml"]
    assert changed({"a.toml": "x = 1"}, {"b.toml": "x = 1\n"}) == []


def test_what_only_a_gpu_runs_makes_no_figure_of_a_cpu_stale() -> None:
    before = {"a.py": "if x.is_cuda:\n    wait(1)\nelse:\n    go()", "triton_a.py": "x = 1"}
    after = {"a.py": "if x.is_cuda:\n    wait(2)\nelse:\n    go()", "triton_a.py": "x = 2"}
    assert list(changed_files(before, after, has_cuda=False)) == []
    assert list(changed_files(before, after, has_cuda=True)) == ["a.py", "triton_a.py"]
    other = {"a.py": "if x.is_cuda:\n    wait(1)\nelse:\n    stay()"}
    assert list(changed_files({"a.py": before["a.py"]}, other, has_cuda=False)) == ["a.py"]
