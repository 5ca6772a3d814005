"""Nothing is lost or counted twice: over random histories with crashes, and when the disk refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.index.longest_match import longest_match
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.segment import SEPARATOR, Segment
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.suffix_array import build_segment
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


class Twin:
    """The index as lists: groups of sequences that were sealed together, and the tail."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.groups: list[list[Text]] = []
        self.tail: list[Text] = []

    def said(self) -> list[Text]:
        """Everything, oldest first."""
        return [sequence for group in [*self.groups, self.tail] for sequence in group]

    def evict(self, num_new_tokens: int) -> None:
        """Whole groups, oldest first, until there is room."""
        while self.groups and num_tokens(self.said()) + num_new_tokens > self.capacity:
            self.groups.pop(0)

    def append(self, piece: Text) -> None:
        """Evict, then drop the oldest of a tail that alone is too long."""
        self.evict(len(piece) + 1)
        self.tail.append(piece)
        while num_tokens(self.tail) > self.capacity:
            self.tail.pop(0)

    def seal(self, due: list[Text]) -> None:
        """``due``, taken from the tail earlier, is a group now; what of it is still in the tail leaves it."""
        self.tail = [piece for piece in self.tail if not any(piece is sealed for sealed in due)]
        self.groups.append(due)
        self.evict(0)

    def merge(self, inputs: list[list[Text]]) -> bool:
        """False if one of the groups is gone."""
        places = [place for place, group in enumerate(self.groups) if group is inputs[0]]
        if not places:
            return False
        first = places[0]
        self.groups[first : first + len(inputs)] = [[sequence for group in inputs for sequence in group]]
        return True


class Halves(RuleBasedStateMachine):
    """Index and directory, driven half a step at a time, dying anywhere, against the twin."""

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.num_segments = 0
        self.committed: list[tuple[str, list[Text]]] = []

    @initialize(capacity=st.sampled_from([16, 64, 200]), fanout=st.integers(2, 3))
    def create(self, capacity: int, fanout: int) -> None:
        self.config = IndexConfig(capacity_tokens=capacity, flush_tokens=8, merge_fanout=fanout, lead_in_tokens=1)
        self.open()

    def open(self) -> None:
        """As the last commit left it; groups by segment id, as both sides know them."""
        self.directory = SegmentDirectory(Path(self.home.name), fingerprint=FINGERPRINT, namespace="default")
        segments, failures = self.directory.load()
        assert failures == [] and [s.segment_id for s in segments] == [name for name, _ in self.committed]
        self.index = SuffixIndex(self.config, segments, self.directory.manifest.next_position)
        self.twin = Twin(self.config.capacity_tokens)
        self.twin.groups = [group for _, group in self.committed]
        self.groups = dict(self.committed)
        self.twin.evict(0)
        self.sealing: tuple[Segment, list[Text]] | None = None
        self.merging: tuple[tuple[Segment, ...], Segment] | None = None

    def build(self, tokens: np.ndarray, start: int | None) -> Segment:
        """A segment with a file."""
        self.num_segments += 1
        return self.directory.write(build_segment(tokens, start=start, segment_id=f"{self.num_segments:06d}"))

    @rule(sequence=_SEQUENCES)
    def append(self, sequence: Text) -> None:
        for piece in self.index.append(np.array(sequence, np.int32)):
            self.twin.append(piece.tolist())

    @precondition(lambda self: self.sealing is None and self.twin.tail)
    @rule()
    def begin_to_seal(self) -> None:
        due = self.index.memtable_to_flush()
        assert due is not None
        start, tokens = due
        num_due = tokens.tolist().count(SEPARATOR)
        assert sequences(tokens.tolist()) == self.twin.tail[:num_due]
        self.sealing = self.build(tokens, start), self.twin.tail[:num_due]

    @precondition(lambda self: self.sealing is not None)
    @rule()
    def finish_to_seal(self) -> None:
        assert self.sealing is not None
        segment, due = self.sealing
        self.sealing = None
        self.index.install_flushed(segment)
        self.twin.seal(due)
        self.groups[segment.segment_id] = due

    @precondition(lambda self: self.merging is None)
    @rule()
    def begin_to_merge(self) -> None:
        inputs = self.index.plan_merge()
        if inputs is not None:
            tokens = np.concatenate([segment.tokens for segment in inputs])
            self.merging = inputs, self.build(tokens, inputs[0].start)

    @precondition(lambda self: self.merging is not None)
    @rule()
    def finish_to_merge(self) -> None:
        assert self.merging is not None
        inputs, merged = self.merging
        self.merging = None
        groups = [self.groups[segment.segment_id] for segment in inputs]
        is_installed = self.index.install_merged(inputs, merged)
        assert is_installed == self.twin.merge(groups)
        if is_installed:
            self.groups[merged.segment_id] = next(g for g in self.twin.groups if g[0] is groups[0][0])

    @precondition(lambda self: self.merging is None and self.sealing is None)
    @rule()
    def commit(self) -> None:
        self.directory.commit(self.index.ring_segments, next_position=self.index.next_position)
        self.committed = [(s.segment_id, self.groups[s.segment_id]) for s in self.index.ring_segments]

    @rule()
    def die_and_reopen(self) -> None:
        self.directory.close()  # as the kernel does with the lock of a process that died
        self.open()

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        if hasattr(self, "twin"):
            snapshot, said = self.index.snapshot(), self.twin.said()
            assert sequences(snapshot_text(snapshot)) == said
            assert snapshot.num_tokens <= self.config.capacity_tokens
            check_counts(snapshot, said)

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            self.directory.close()
            self.open()
            self.nothing_is_lost_or_twice()
            files = {path.name for path in Path(self.home.name).glob("*.seg")}
            assert files == {f"{name}.seg" for name, _ in self.committed}
            self.directory.close()
        self.home.cleanup()


TestHalves = Halves.TestCase
TestHalves.settings = settings(max_examples=60, stateful_step_count=60)


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


_READ_ONLY = (
    _CHILD_SETUP
    + """
from ssd.retrieval import namespace_cache
namespace_cache.RETRY_S = 0.01

def mount(*arguments):
    subprocess.run(["mount", *arguments, str(home)], check=True)

result = {}
caches = opened()
learn(caches, 0, 20)
mount("--bind", str(home))
mount("-o", "remount,bind,ro")
caches.get().append([20] + [0] * 99)
caches.flush()
result["read_only"] = numbers(caches), failures(caches)
for _ in range(2):
    try:
        opened()
    except Exception as error:
        result[type(error).__name__] = str(error)
    if "writable" not in result:
        subprocess.run(["umount", str(home)], check=True)
        learn(caches, 21, 30)
        caches.flush()
        result["writable"] = numbers(caches)
        caches.close()
        del caches
        mount("--bind", str(home))
        mount("-o", "remount,bind,ro")
subprocess.run(["umount", str(home)], check=True)
result["reopened"] = numbers(opened())
print(json.dumps(result))
"""
)


def test_a_directory_that_becomes_read_only_and_writable_again_costs_nothing(tmp_path: Path) -> None:
    in_mounts = ("unshare", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*in_mounts, "true"], capture_output=True).returncode:
        pytest.skip("no mounts of our own here")
    result, log = run_child(_READ_ONLY, tmp_path, *in_mounts)
    said, num_failures = result["read_only"]
    assert said == list(range(21)) and num_failures > 0
    assert "another process writes" in result["CacheLocked"]  # the lock outlives it
    assert result["writable"] == result["reopened"] == list(range(30))
    assert "Read-only file system" in result["StoreUnavailable"]
    assert [line.split()[0] for line in log.splitlines()] == ["ERROR", "WARNING"]
