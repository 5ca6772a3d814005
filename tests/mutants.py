"""Do the tests notice a fault? Small ones are put into the code, one at a time, and the tests that load it are run.

``python -m tests.mutants [--count N] [--first N] [--seed N] [--seconds N]``

Mutants are drawn at random from ``ssd/`` and ``server/``: a comparison turned or moved by one, a condition negated, a
sum for a difference, a number one more, a call left out, ``and`` for ``or``. Files that compiled kernels are made of
are left out: each mutant of theirs compiles for minutes, and slow twins look after them. Tests run file by file, first
those that name the module themselves, then those that load least, until one fails or the time is over; what a test only
starts as a program is not seen to be loaded. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.imports import ROOT, imports_of, loaded_by

PACKAGES: Final = "ssd", "server"
_OTHER: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """A fault: ``text`` in the place of columns ``begin`` to ``end`` (bytes) of a line, counted from 1."""

    file: Path
    line: int
    begin: int
    end: int
    text: str

    def __str__(self) -> str:
        was = self.file.read_bytes().splitlines()[self.line - 1][self.begin : self.end].decode()
        return f"{self.file.relative_to(ROOT)}:{self.line}: {was}  ->  {self.text}"


def module_of(file: Path) -> str:
    """The name that a file is imported by."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def files_without_kernels() -> list[Path]:
    """Those of the packages that no compiled function is made of."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    below = set[str]()
    for file in files:
        if "@kernel" in file.read_text():
            below |= loaded_by(file) | {module_of(file)}
    return [file for file in files if module_of(file) not in below and "bundled" not in file.parts]


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All there are, of nodes that stand in one line of a function."""
    tree = ast.parse(file.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                text = _changed(node)
                if text is not None and isinstance(node, ast.expr | ast.stmt) and node.lineno == node.end_lineno:
                    yield Mutant(file, node.lineno, node.col_offset, node.end_col_offset or 0, text)


def _changed(node: ast.AST) -> str | None:
    """What stands in the place of a node, None where nothing does."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in _OTHER:
        other.ops[0] = _OTHER[type(other.ops[0])]()
    elif isinstance(other, ast.BoolOp):
        other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
    elif isinstance(other, ast.BinOp) and isinstance(other.op, ast.Add | ast.Sub):
        other.op = ast.Sub() if isinstance(other.op, ast.Add) else ast.Add()
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        other = other.operand
    elif isinstance(other, ast.Constant) and type(other.value) is int:
        other.value += 1
    elif isinstance(other, ast.IfExp):
        other.test = ast.UnaryOp(ast.Not(), other.test)
    elif isinstance(other, ast.Expr) and isinstance(other.value, ast.Call):
        return "pass"
    else:
        return None
    return f"({ast.unparse(other)})"


def tests_of(module: str) -> list[Path]:
    """The test files that load a module, in the order in which they are run."""
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        loaded = loaded_by(file)
        if module in loaded:
            is_named = any(name == module or name.startswith(f"{module}.") for name in imports_of(file))
            found.append((not is_named, len(loaded), file))
    return [file for _, _, file in sorted(found)]


def killer_of(mutant: Mutant, checkout: Path, files: Sequence[Path], seconds: float) -> str | None:
    """The first test file that fails on a mutant, None where none does; "time" where it was over."""
    file = checkout / mutant.file.relative_to(ROOT)
    plain = file.read_bytes()
    lines = plain.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    lines[mutant.line - 1] = line[: mutant.begin] + mutant.text.encode() + line[mutant.end :]
    file.write_bytes(b"".join(lines))
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    ends = time.monotonic() + seconds
    try:
        for tests in files:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
            if (left := ends - time.monotonic()) <= 0:
                return "time"
            try:
                done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=left)
            except subprocess.TimeoutExpired:
                return "time"
            if done.returncode not in (0, 5):  # 5: all were left out
                return tests.name
        return None
    finally:
        file.write_bytes(plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first, of the same draw (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--seconds", type=float, default=300.0, help="most for a mutant (default: 300)")
    args = parser.parse_args(argv)
    every = [mutant for file in files_without_kernels() for mutant in mutants_of(file)]
    random.Random(args.seed).shuffle(every)
    drawn = every[args.first : args.first + args.count]
    found: dict[str, list[str]] = {"killed": [], "alive": [], "time": []}
    with tempfile.TemporaryDirectory(prefix="ssd-mutants-") as temporary:
        checkout = Path(temporary) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "*.egg-info"), symlinks=True)
        for number, mutant in enumerate(drawn):
            files = [checkout / file.relative_to(ROOT) for file in tests_of(module_of(mutant.file))]
            killer = killer_of(mutant, checkout, files, args.seconds)
            kind = "alive" if killer is None else killer if killer == "time" else "killed"
            found[kind].append(str(mutant))
            print(f"{args.first + number}: {kind} by {killer}: {mutant}", flush=True)
    counts = {kind: len(those) for kind, those in found.items()}
    print(
        json.dumps(
            {
                "seed": args.seed,
                "first": args.first,
                "mutants": len(every),
                **counts,
                "left": found["alive"] + found["time"],
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
