"""The build of the kernels that checks addresses: it finds wrong ones, and none where kernels search and draft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

WRONG = """
import numpy as np
from ssd.compiled.addresses import Int64s, address, int64_array, kernel, load_uint32, load_uint64
from ssd.compiled.addresses import Int64, Record, Records, view_of, views_of

class Pair(Record):
    one: Int64
    other: Int64

pair_at, pairs_at = view_of(Pair), views_of(Pair)

@kernel
def load(at: int) -> int:
    return load_uint64(at)

@kernel
def load_half(at: int) -> int:
    return load_uint32(at)

@kernel
def item(at: int, length: int, index: int) -> int:
    return int64_array(at, length)[index]

@kernel
def other(at: int) -> int:
    return pair_at(at).other

@kernel
def other_of(at: int, length: int, index: int) -> int:
    return pairs_at(at, length)[index].other

def is_refused(kernel, *arguments):
    try:
        kernel(*arguments)
    except IndexError:
        return True
    return False

numbers, pairs = np.arange(10), Records(Pair, 3)
begin, first = address(numbers[2:]) - 16, pairs.address
assert [load(begin), load(begin + 72), item(begin, 10, 9), other(first), other_of(first, 3, 2)] == [0, 9, 9, 0, 0]
assert load_half(begin + 76) == 0
for refused in (
    (load, begin - 1), (load, begin + 73), (load, 0), (load_half, begin + 77), (item, begin, 11, 0),
    (item, begin, 9, 9), (item, begin, -1, 0), (other, first + 40), (other_of, first, 4, 0), (other_of, first, 3, 3),
):
    assert is_refused(*refused), refused
mapped = np.frombuffer(bytearray(64), np.uint8)[8:16]
assert load(address(mapped) - 8) == 0 and is_refused(load, address(mapped) + 49)
del numbers
assert is_refused(load, begin), "it is freed"
"""

KERNELS = (
    "tests/test_search.py",
    "tests/test_rows.py",
    "tests/test_follow.py",
    "tests/test_acceptance.py",
    "tests/test_drafting.py",
    "tests/test_keyed_choices.py",
)


def run_checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SSD_CHECK_ADDRESSES": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_wrong_addresses_and_indices_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    done = run_checked(str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kernels_that_search_and_draft_stay_within_what_they_were_given() -> None:
    done = run_checked("-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNELS)
    assert done.returncode == 0, done.stdout[-3000:]
