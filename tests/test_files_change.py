"""Segment files that somebody cuts, overwrites or exchanges while they are searched: nothing ends, little is lost."""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.search import longest_match
from ssd.retrieval.static import StaticWriter, load_static_directory
from ssd.retrieval.suffix_cache import SuffixCache
from tests.reference.retrieval import sequences, snapshot_text

FINGERPRINT = "0123456789abcdef" * 2
ROOT = Path(__file__).resolve().parents[1]


def config(path: Path | None, memory_bytes: int = 1 << 30, **settings: Any) -> CacheConfig:
    index = {"capacity_tokens": 1 << 16, "seal_tokens": 64, "merge_fanout": 8, "dedup_block_tokens": 0, **settings}
    return CacheConfig(index=IndexConfig(**index), directory=path, memory_bytes=memory_bytes)


def said(cache: SuffixCache) -> list[int]:
    """The first token of every sequence of the ring."""
    return [sequence[0] for sequence in sequences(snapshot_text(cache.snapshot()))]


def learn(caches: CacheSet, numbers: range) -> None:
    for number in numbers:
        caches.get().append([number] + [number % 5] * 99)
        caches.maintain()


# A process of its own, for it may be killed by a signal. It looks up without pause while its files are changed.
_SEARCHER = """
import json, os, sys, threading
from pathlib import Path
import numpy as np
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.drafting import DraftRequest, make_drafter
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.search import longest_match

home, kind, damage, memory_bytes = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
index = IndexConfig(capacity_tokens=1 << 18, seal_tokens=1024, dedup_block_tokens=0)
config = CacheConfig(
    index=index, directory=home / "cache" if kind == "ring" else None, memory_bytes=memory_bytes
)
caches = CacheSet(config, "0123456789abcdef" * 2, inline=True)
cache = caches.get()
texts = [[i] + [(i * j) % 997 for j in range(1, 400)] for i in range(1000, 1100)]
if kind == "static":
    cache.add_static_directory(home / "static")
    files = sorted((home / "static").glob("*.seg"))
else:
    for text in texts:
        cache.append(text)
    cache.flush()
    files = sorted((home / "cache").glob("default/*.seg"))
assert files

def num_found():
    snapshot = cache.snapshot()
    return sum(longest_match(snapshot, np.array(text[:32]), 32).length == 32 for text in texts)

def look_up(drafter):
    for text in texts:
        for stop in (3, 40, 200):
            context = np.array(text[:stop], np.int32)
            drafter.propose([DraftRequest("a", context, 0, cache.snapshot(), 16)])
            longest_match(cache.snapshot(), context, 32)

drafter = make_drafter("ssd", DraftConfig())
result = {"before": num_found()}
look_up(drafter)
stop = threading.Event()
def without_pause():
    own = make_drafter("ssd", DraftConfig())  # a drafter has one owner
    while not stop.is_set():
        look_up(own)
thread = threading.Thread(target=without_pause)
thread.start()
held = cache.snapshot()  # somebody still has it when the segments are given up
random = np.random.default_rng(0)
for path in files:
    size = path.stat().st_size
    if damage == "truncate":
        os.truncate(path, 0)
    elif damage == "cut":
        os.truncate(path, size // 3)
    else:
        with path.open("r+b") as file:
            file.seek(256 if damage == "garbage" else size // 2)
            num_bytes = size - file.tell()
            file.write(b"\\xff" * num_bytes if damage == "ones" else random.bytes(num_bytes))
look_up(drafter)
result["at_once"] = num_found()
for text in texts[:20]:
    longest_match(held, np.array(text[:32]), 32)
cache.maintain()
result["maintained"] = num_found()
stop.set()
thread.join()
stats = cache.stats()
result["damaged"], result["segments"] = stats.num_damaged_segments, stats.num_segments
print(json.dumps(result))
del held
caches.close()
"""


def search_while_changed(home: Path, kind: str, damage: str, memory_bytes: int) -> tuple[dict[str, int], str]:
    command = [sys.executable, "-c", _SEARCHER, str(home), kind, damage, str(memory_bytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return json.loads(done.stdout), done.stderr


def make_static(home: Path) -> None:
    with StaticWriter(home / "static", fingerprint=FINGERPRINT, segment_tokens=10_000) as writer:
        for i in range(1000, 1100):
            writer.append([i] + [(i * j) % 997 for j in range(1, 400)])


@pytest.mark.parametrize("damage", ["truncate", "garbage"])
@pytest.mark.parametrize("kind", ["ring", "static"])
def test_what_is_copied_is_found_whatever_becomes_of_the_files(tmp_path: Path, kind: str, damage: str) -> None:
    make_static(tmp_path)
    result, _ = search_while_changed(tmp_path, kind, damage, 1 << 30)
    assert result["before"] == result["at_once"] == result["maintained"] == 100
    assert result["damaged"] == 0


@pytest.mark.parametrize("damage", ["truncate", "cut", "ones", "garbage"])
@pytest.mark.parametrize("kind", ["ring", "static"])
def test_what_is_mapped_is_given_up_when_its_file_changes_and_lookups_go_on(
    tmp_path: Path, kind: str, damage: str
) -> None:
    make_static(tmp_path)
    result, log = search_while_changed(tmp_path, kind, damage, 0)
    assert result["before"] == 100 and result["maintained"] == result["segments"] == 0
    assert result["damaged"] > 0 and "no longer searched" in log


def test_a_file_that_is_written_again_with_what_it_held_is_searched_on(tmp_path: Path) -> None:
    make_static(tmp_path)
    with CacheSet(config(None, memory_bytes=0), FINGERPRINT, inline=True) as caches:
        cache = caches.get()
        cache.add_static_directory(tmp_path / "static")
        segments = cache.snapshot().segments
        assert all(segment.shared is not None for segment in segments)
        for path in (tmp_path / "static").glob("*.seg"):
            path.write_bytes(path.read_bytes())  # in place, as a restore does
        cache.maintain()
        stats = cache.stats()
        assert (stats.num_damaged_segments, stats.num_segments) == (0, len(segments))
        assert not any(segment in segments for segment in cache.snapshot().segments)


def test_an_exchanged_or_removed_file_does_not_end_the_use_of_the_old_one(tmp_path: Path) -> None:
    make_static(tmp_path)
    with CacheSet(config(None, memory_bytes=0), FINGERPRINT, inline=True) as caches:
        cache = caches.get()
        cache.add_static_directory(tmp_path / "static")
        segments = cache.snapshot().segments
        first, *others = sorted((tmp_path / "static").glob("*.seg"))
        (tmp_path / "new").write_bytes(b"something else")
        (tmp_path / "new").replace(first)
        for path in others:
            path.unlink()
        cache.maintain()
        assert cache.snapshot().segments == segments
        for number in (1000, 1050, 1099):
            assert longest_match(cache.snapshot(), np.array([number, number % 997]), 32).length == 2


def free_bytes_are(budget: CopyBudget, num_bytes: int) -> bool:
    return budget.take(0, leaving=num_bytes) and not budget.take(0, leaving=num_bytes + 1)


def test_copies_take_the_budget_and_give_it_back(tmp_path: Path) -> None:
    make_static(tmp_path)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "static").glob("*.seg"))
    budget = CopyBudget(sizes[-1] + sizes[-2])
    segments = load_static_directory(tmp_path / "static", fingerprint=FINGERPRINT, budget=budget)
    assert sum(segment.shared is None for segment in segments) >= 2
    assert any(segment.shared is not None for segment in segments)
    assert not budget.take(0, leaving=sizes[0] + sizes[1])
    del segments
    assert free_bytes_are(budget, sizes[-1] + sizes[-2])
    left = load_static_directory(tmp_path / "static", fingerprint=FINGERPRINT, budget=budget, leaving=sizes[-1])
    assert [segment.shared is None for segment in left].count(True) == 1
    with pytest.raises(ConfigError):
        CacheConfig(memory_bytes=-1)


@pytest.mark.timeout(300)
def test_memory_may_be_given_back_in_the_middle_of_anything() -> None:
    """The garbage collector does so on the thread that happens to run, also on one that is taking some."""
    from ssd.retrieval import bus_guard

    budget, slot = CopyBudget(10), bus_guard.watch(1 << 50, 4096)
    assert budget.take(8) and not budget.take(8)
    with budget._lock, bus_guard._lock:
        budget.give_back(8)
        bus_guard.forget(slot)
    assert free_bytes_are(budget, 10) and bus_guard.watch(1 << 50, 4096) == slot
    bus_guard.forget(slot)


_FOREIGN_MAP = """
import mmap, os, sys
from pathlib import Path
from ssd.retrieval.static import load_static_directory
segments = load_static_directory(Path(sys.argv[1]), fingerprint="0123456789abcdef" * 2)
path = Path(sys.argv[1]) / "foreign"
path.write_bytes(bytes(1 << 16))
with path.open("rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(path, 0)
print(mapped[5000])
"""


def test_a_map_that_is_not_ours_ends_the_process_as_before(tmp_path: Path) -> None:
    make_static(tmp_path)
    command = [sys.executable, "-c", _FOREIGN_MAP, str(tmp_path / "static")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGBUS


# What is merged is what was checked


def flip(cache: SuffixCache, number: int) -> None:
    """A bit of the text of one segment in memory, as bad memory does."""
    segment = cache.snapshot().segments[number]
    ctypes.memset(segment.text.ctypes.data + 70, int(segment.text[70]) ^ 4, 1)


def test_a_bit_that_flips_in_memory_does_not_reach_a_merged_file(tmp_path: Path) -> None:
    with CacheSet(config(tmp_path), FINGERPRINT, inline=True) as caches:
        learn(caches, range(5))
        flip(caches.get(), 2)
        learn(caches, range(5, 12))
        caches.flush()
        stats = caches.get().stats()
        assert stats.num_merged > 0 and said(caches.get()) == list(range(12))
        assert stats.num_damaged_segments == 0  # its file had the right text
    with CacheSet(config(tmp_path), FINGERPRINT, inline=True) as caches:
        assert said(caches.get()) == list(range(12)) and caches.get().stats().num_failures == 0


def test_a_damaged_text_without_a_good_copy_is_left_out_of_what_is_merged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CacheSet(config(tmp_path), FINGERPRINT, inline=True) as caches:
        learn(caches, range(5))
        flip(caches.get(), 2)
        (tmp_path / "default" / f"{caches.get().snapshot().segments[2].segment_id}.seg").write_bytes(b"gone too")
        learn(caches, range(5, 20))
        caches.flush()
        expected = [number for number in range(20) if number != 2]
        assert said(caches.get()) == expected and caches.get().stats().num_damaged_segments == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    with CacheSet(config(tmp_path), FINGERPRINT, inline=True) as caches:
        assert said(caches.get()) == expected


@pytest.mark.timeout(300)
def test_damaged_files_of_a_running_cache_are_written_anew_by_merges(tmp_path: Path) -> None:
    """The rebuild process refuses them; the copies in memory are right, and what is merged from them is as well."""
    settings = {"capacity_tokens": 1 << 20, "seal_tokens": 1 << 14, "merge_fanout": 3}
    with CacheSet(config(tmp_path, **settings), FINGERPRINT) as caches:
        cache = caches.get()
        for number in range(2):
            cache.append([number] + [number] * 17_000)
            cache.flush()
        for path in (tmp_path / "default").glob("*.seg"):
            path.write_bytes(b"overwritten")
        cache.append([2] + [2] * 17_000)
        cache.flush()
        assert cache.stats().num_merged == 1 and said(cache) == [0, 1, 2]
    with CacheSet(config(tmp_path, **settings), FINGERPRINT, inline=True) as caches:
        assert said(caches.get()) == [0, 1, 2]


_AND_THEN = """\
import faulthandler
import numpy as np
faulthandler.enable()
files = sorted(Path(sys.argv[1]).glob("*.seg"))
again = load_static_directory(Path(sys.argv[1]), fingerprint="0123456789abcdef" * 2)
for file in files:
    os.truncate(file, 0)
print(sum(int(segment.order.sum()) for segment in again))
print(mapped[5000])
"""


def test_a_handler_that_others_put_since_does_not_stay_in_the_way(tmp_path: Path) -> None:
    make_static(tmp_path)
    code = _FOREIGN_MAP.replace("print(mapped[5000])", _AND_THEN)
    command = [sys.executable, "-c", code, str(tmp_path / "static")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n" and done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr  # by the handler that was there


# Sharing memory


_MAPPER = """
import sys
from pathlib import Path
from ssd.retrieval.static import load_static_directory
segments = load_static_directory(Path(sys.argv[1]), fingerprint="0123456789abcdef" * 2)
total = sum(int(segment.tokens.sum()) for segment in segments)
print("ready", flush=True)
sys.stdin.read()
"""


def mapped_kilobytes(process_id: int, directory: Path) -> tuple[int, int]:
    """(Rss, Pss) of all of a process's maps of files in ``directory``: Pss is its fair share."""
    rss = pss = 0
    is_ours = False
    for line in Path(f"/proc/{process_id}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_ours = rest[-1].startswith(str(directory))
        elif is_ours and name == "Rss:":
            rss += int(rest[0])
        elif is_ours and name == "Pss:":
            pss += int(rest[0])
    return rss, pss


def test_processes_that_map_one_directory_share_one_copy(tmp_path: Path) -> None:
    with StaticWriter(tmp_path, fingerprint=FINGERPRINT) as writer:
        writer.append(np.random.default_rng(0).integers(0, 1000, 1 << 18))
    size_kb = sum(path.stat().st_size for path in tmp_path.glob("*.seg")) // 1024
    command = [sys.executable, "-c", _MAPPER, str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            rss, pss = mapped_kilobytes(process.pid, tmp_path)
            assert rss > 0.9 * size_kb  # all of it was looked at
            assert pss < 0.6 * rss
    finally:
        for process in processes:
            process.communicate()
