"""Nothing is lost or counted twice: over random histories with crashes, and when the disk refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.index.longest_match import longest_match
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot
from tests.reference.retrieval import naive_count, sequences, snapshot_text

FINGERPRINT = "0123456789abcdef" * 2
ROOT = Path(__file__).resolve().parents[1]

Text = list[int]  # one sequence, no separator

_PATTERNS = [list(pattern) for length in (1, 2, 3) for pattern in product((0, 1), repeat=length)]
_SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def check_counts(snapshot: Snapshot, said: list[Text]) -> None:
    """Every short pattern is found as often as it stands in ``said``."""
    text = [token for sequence in said for token in [*sequence, SEPARATOR]]
    for pattern in _PATTERNS:
        match = longest_match(snapshot, np.array(pattern, np.int32), len(pattern))
        found = match.support if match.length == len(pattern) else 0
        assert found == naive_count(text, pattern), (pattern, said)


def num_tokens(said: list[Text]) -> int:
    """With separators."""
    return sum(len(sequence) + 1 for sequence in said)


@settings(max_examples=40)
@given(
    st.sampled_from([16, 64, 400]),
    st.lists(
        st.one_of(_SEQUENCES, _SEQUENCES, st.sampled_from(["maintain", "flush", "die", "close"])),
        min_size=5,
        max_size=40,
    ),
)
def test_a_cache_that_dies_anywhere_has_what_it_had_maintained(capacity: int, operations: list[Text | str]) -> None:
    index = IndexConfig(
        capacity_tokens=capacity, flush_tokens=8, merge_fanout=2, dedup_block_tokens=0, lead_in_tokens=1
    )
    with tempfile.TemporaryDirectory() as directory:
        config = CacheConfig(index=index, directory=Path(directory))
        caches = CacheManager(config, FINGERPRINT, inline=True)
        said: list[Text] = []
        on_disk: list[Text] = []
        for operation in operations:
            if operation == "die":
                die(caches)
                caches = CacheManager(config, FINGERPRINT, inline=True)
                said = on_disk
            elif operation == "close":
                caches.close()
                caches = CacheManager(config, FINGERPRINT, inline=True)
            elif operation == "maintain":
                caches.maintain()
            elif operation == "flush":
                caches.flush()
            else:
                assert isinstance(operation, list)
                caches.get().append(operation)
                pieces = SuffixIndex(index).append(np.array(operation, np.int32))
                said = said + [piece.tolist() for piece in pieces]
            snapshot = caches.get().snapshot()
            found = sequences(snapshot_text(snapshot))
            assert found == said[len(said) - len(found) :]
            if len(found) < len(said):  # evicted by age: the oldest, and at most an eighth more than had to go
                assert num_tokens(found) > capacity - max(2, capacity // 8) - 16
            said = found
            check_counts(snapshot, said)
            if isinstance(operation, str):
                tail = num_tokens(said) - (snapshot.memtable_stop - snapshot.memtable_start)
                on_disk = [s for i, s in enumerate(said) if num_tokens(said[: i + 1]) <= tail]
                assert operation == "maintain" or on_disk == said
        assert caches.get().stats().num_failures == 0
        caches.close()


def die(caches: CacheManager) -> None:
    """Let go of an inline set as the end of its process would: nothing is sealed or written, the locks are free."""
    for name in caches.names():
        files = caches.get(name)._files
        assert files is not None
        files.close()


# The disk refuses


_CHILD_SETUP = """
import json, logging, os, resource, shutil, subprocess, sys
from pathlib import Path
from ssd.config import CacheConfig, IndexConfig
from ssd.errors import StoreUnavailable
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.segment import SEPARATOR

home = Path(sys.argv[1])
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
index = IndexConfig(capacity_tokens=1 << 16, flush_tokens=64, merge_fanout=2, dedup_block_tokens=0)

def opened():
    return CacheManager(CacheConfig(index=index, directory=home), "0123456789abcdef" * 2, inline=True)

def numbers(caches):
    snapshot = caches.get().snapshot()
    text = [int(t) for s in snapshot.segments for t in s.tokens]
    memtable = range(snapshot.memtable_start, snapshot.memtable_stop)
    text += [int(snapshot.ring[p & (len(snapshot.ring) - 1)]) for p in memtable]
    return [b for a, b in zip([SEPARATOR] + text, text) if a == SEPARATOR]

def learn(caches, first, stop):
    for number in range(first, stop):
        caches.get().append([number] + [number % 5] * 99)
        caches.maintain()

def die(caches):
    caches.get()._files.close()

def failures(caches):
    return caches.get().stats().num_failures

def temporaries():
    return [path.name for path in home.rglob("*.tmp")]
"""

_FULL = (
    _CHILD_SETUP
    + """
home.mkdir(exist_ok=True)

def leave(num_bytes):
    # From now on no file may be longer.
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

result = {}
caches = opened()
learn(caches, 0, 40)
caches.flush()
result["failures_before"] = failures(caches)

# Room for a manifest, not for what a merge writes.
leave(16 << 10)
learn(caches, 40, 80)
result["nearly_full"] = {"said": numbers(caches), "failures": failures(caches), "left": temporaries()}
die(caches)
caches = opened()
result["nearly_full_reopened"] = numbers(caches)
leave(resource.RLIM_INFINITY)
caches.flush()

# Room for nothing.
first = 80
known = numbers(caches)
leave(0)
learn(caches, first, 120)
result["full"] = {"said": numbers(caches), "failures": failures(caches), "left": temporaries()}
result["full_known"] = known
die(caches)
caches = opened()
result["full_reopened"] = numbers(caches)

# Room again, for the one that went on through it.
learn(caches, 120, 130)
leave(resource.RLIM_INFINITY)
learn(caches, 130, 200)
caches.flush()
result["room"] = {"said": numbers(caches), "left": temporaries()}
die(caches)
caches = opened()
result["room_reopened"] = numbers(caches)
result["failures_after"] = failures(caches)
print(json.dumps(result))
"""
)


def run_child(code: str, home: Path, *before: str) -> tuple[dict[str, Any], str]:
    """What the code printed as JSON, and its log; ``before`` : the command that runs it."""
    done = subprocess.run(
        [*before, sys.executable, "-c", code, str(home)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_full_disk_costs_no_text_that_was_on_it_and_nothing_is_left_half_written(tmp_path: Path) -> None:
    result, log = run_child(_FULL, tmp_path / "cache")
    assert result["failures_before"] == result["failures_after"] == 0
    nearly, full, room = result["nearly_full"], result["full"], result["room"]
    assert nearly["said"] == list(range(80)) and nearly["failures"] > 0 and nearly["left"] == []
    on_disk = result["nearly_full_reopened"]
    assert on_disk[:40] == list(range(40)) and on_disk == sorted(set(on_disk))
    assert full["said"] == [*result["full_known"], *range(80, 120)] and full["failures"] > 0 and full["left"] == []
    assert result["full_reopened"] == result["full_known"] == on_disk
    assert room["said"] == [*on_disk, *range(120, 200)] and room["left"] == []
    back = result["room_reopened"]
    assert [n for n in back if n < 80 or n >= 130] == [*on_disk, *range(130, 200)] and back == sorted(set(back))
    warnings = [line for line in log.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert warnings and all("namespace=default" in line for line in warnings)
    assert any("File too large" in line for line in warnings)
    assert len(warnings) < 12  # once for each kind and each opening, not for each failure


_TOO_FEW_FILES = (
    _CHILD_SETUP
    + """
caches = opened()
learn(caches, 0, 40)
caches.close()
names = sorted(p.name for p in (home / "default").glob("*.seg"))
del caches
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
# Enough for the lock (the directory and its file), not to read a file as well.
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, limits[1]))
result = {"refused": ""}
try:
    opened()
except StoreUnavailable as error:
    result["refused"] = str(error)
# Enough for that: segments that are in use keep no file open.
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, limits[1]))
caches = opened()
result["read"] = numbers(caches)
caches.get()._files.close()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
result["unchanged"] = names == sorted(p.name for p in (home / "default").glob("*.seg"))
caches = opened()
result["reopened"] = numbers(caches)
print(json.dumps(result))
"""
)


def test_segments_that_cannot_be_read_for_now_are_not_removed(tmp_path: Path) -> None:
    result, log = run_child(_TOO_FEW_FILES, tmp_path)
    assert "Too many open files" in result["refused"] and result["unchanged"] and log == ""
    assert result["read"] == result["reopened"] == list(range(40))
