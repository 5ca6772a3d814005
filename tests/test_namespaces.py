"""Namespaces are opened and closed beside what uses them; those that are held stay open."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import SegmentCorrupt
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.namespace import HeldNamespace, Namespace
from ssd.retrieval.suffix_cache import SuffixCache
from tests.reference.retrieval import sequences, snapshot_text
from tests.waiting import PATIENCE_S, wait_until

FINGERPRINT = "0123456789abcdef" * 2
TEXT = np.array([1, 2, 3], np.int32)


class SlowSet(CacheSet):
    """Waits at ``gate`` before it opens or closes a namespace called "slow", and notes which thread comes by."""

    def __init__(self, directory: Path | None = None, *, max_namespaces: int = 256) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.opened: list[tuple[str, str]] = []
        self.closed: list[tuple[str, str]] = []
        super().__init__(CacheConfig(directory=directory), FINGERPRINT, max_namespaces=max_namespaces)

    def _open(self, namespace: Namespace) -> SuffixCache:
        if namespace.name == "slow":
            assert self.gate.wait(PATIENCE_S)
        if namespace.name == "broken":
            raise RuntimeError("injected")
        self.opened.append((namespace.name, threading.current_thread().name))
        return super()._open(namespace)

    def _close_one(self, cache: SuffixCache) -> None:
        if cache.name == "slow":
            assert self.gate.wait(PATIENCE_S)
        super()._close_one(cache)
        self.closed.append((cache.name, threading.current_thread().name))


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[SlowSet]:
    with SlowSet(tmp_path) as made:
        yield made
        made.gate.set()


def held(caches: CacheSet, name: str) -> HeldNamespace:
    found = caches.hold(name)
    assert found is not None
    return found


def said(cache: SuffixCache) -> list[list[int]]:
    return sequences(snapshot_text(cache.snapshot()))


def test_holding_a_namespace_waits_for_no_file(caches: SlowSet) -> None:
    caches.gate.clear()
    slow, other = held(caches, "slow"), held(caches, "other")
    wait_until(lambda: other.cache)
    assert slow.cache is None
    slow.append(TEXT, prompt_length=0)
    assert caches.names() == ["default", "other"]
    caches.gate.set()
    wait_until(lambda: slow.cache)
    assert said(caches.get("slow")) == [[1, 2, 3]]
    slow.append(TEXT + 3, prompt_length=0)
    assert said(caches.get("slow")) == [[1, 2, 3], [4, 5, 6]]
    here = threading.current_thread().name
    assert [name for name, thread in caches.opened if thread == here] == ["default"], "at the start"


def test_a_namespace_is_opened_once_however_many_ask(caches: SlowSet) -> None:
    caches.gate.clear()
    holders = [held(caches, "slow") for _ in range(20)]
    asking = [threading.Thread(target=caches.get, args=("slow",)) for _ in range(4)]
    for thread in asking:
        thread.start()
    caches.gate.set()
    for thread in asking:
        thread.join()
    assert [name for name, _ in caches.opened].count("slow") == 1
    assert {id(holder.cache) for holder in holders} == {id(caches.get("slow"))}


def test_what_waits_for_a_namespace_is_bounded_and_what_is_lost_is_counted(caches: SlowSet) -> None:
    caches.gate.clear()
    slow, long = held(caches, "slow"), np.arange(100_000, dtype=np.int32)
    for _ in range(4):
        slow.append(long, prompt_length=0)
    caches.gate.set()
    wait_until(lambda: slow.cache)
    stats = caches.get("slow").stats()
    assert (stats.num_appended_tokens, stats.num_failures) == (200_000, 1)


def test_what_cannot_be_opened_is_counted_logged_once_and_tried_again(
    caches: SlowSet, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 4):
        holder = held(caches, "broken")
        wait_until(lambda: caches.num_failed_openings == number)  # noqa: B023
        assert holder.cache is None
        wait_until(lambda: not caches._namespaces["broken"].is_opening)
    assert caches.hold("no/name") is None
    assert caches.num_failed_openings == 4
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    with pytest.raises(RuntimeError):
        caches.get("broken")


def test_what_is_held_is_not_closed_to_make_room(tmp_path: Path) -> None:
    with SlowSet(tmp_path, max_namespaces=2) as caches:
        first, second = held(caches, "a"), held(caches, "b")
        caches.get("a")
        caches.get("b")
        assert caches.names() == ["a", "b", "default"], "more than may be, as all are held"
        first.append(TEXT, prompt_length=0)
        del first
        gc.collect()
        caches.get("c")
        wait_until(lambda: caches.closed)
        assert caches.names() == ["b", "c", "default"]
        assert caches.closed == [("a", "ssd-close-a")]
        assert second.cache is caches.get("b")
        assert said(caches.get("a")) == [[1, 2, 3]], "sealed when it was closed, and read again"


def test_a_namespace_that_is_being_closed_is_opened_again_when_that_is_done(tmp_path: Path) -> None:
    with SlowSet(tmp_path, max_namespaces=2) as caches:
        caches.get("slow").append([1, 2, 3])
        caches.gate.clear()
        caches.get("b")  # takes the place of the slow one
        again = held(caches, "slow")
        again.append(TEXT + 3, prompt_length=0)
        assert again.cache is None
        caches.gate.set()
        wait_until(lambda: again.cache)
        assert said(caches.get("slow")) == [[1, 2, 3], [4, 5, 6]]
        assert caches.get("slow").stats().num_failures == 0, "its directory was free"


def test_closing_does_not_wait_for_a_directory(tmp_path: Path) -> None:
    caches = SlowSet(tmp_path)
    caches.gate.clear()
    slow = held(caches, "slow")
    slow.append(TEXT, prompt_length=0)
    caches.close()
    caches.gate.set()
    wait_until(lambda: all(thread.name != "ssd-open-slow" for thread in threading.enumerate()))
    with SlowSet(tmp_path) as again:
        assert said(again.get("slow")) == [[1, 2, 3]], "the thread that opened it closed it"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["hold", "drop", "say"])), max_size=40))
def test_only_the_least_used_that_nobody_holds_are_closed(operations: list[tuple[str, str]]) -> None:
    """Against a list in order of use."""
    config = CacheConfig(index=IndexConfig(capacity_tokens=4096))
    with CacheSet(config, FINGERPRINT, inline=True, max_namespaces=3) as caches:
        used, holders = ["default"], dict[str, HeldNamespace]()
        for name, what in operations:
            if what == "drop":
                holders.pop(name, None)
                continue
            used = [each for each in used if each != name] + [name]
            if what == "hold":
                holders[name] = held(caches, name)
            else:
                caches.get(name).append([1])
            free = [each for each in used if each not in ("default", name) and each not in holders]
            used = [each for each in used if each not in free[: max(0, len(used) - 3)]]
            assert caches.names() == sorted(used)
            assert set(holders) <= set(used)


def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe, for one: whoever opens it to read waits for a writer."""
    (tmp_path / "default").mkdir()
    os.mkfifo(tmp_path / "default" / "manifest.json")
    with pytest.raises(SegmentCorrupt, match="no regular file"):
        CacheSet(CacheConfig(directory=tmp_path), FINGERPRINT)
