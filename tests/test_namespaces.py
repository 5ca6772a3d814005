"""Namespaces are opened and closed beside what uses them; those that are held stay open."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, IndexConfig
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.errors import ConfigError
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.namespace import NamespaceEntry, NamespaceLease, NamespacePolicy
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.retrieval.prebuilt import PrebuiltWriter
from ssd.retrieval.snapshot import Snapshot
from tests.reference.retrieval import sequences, snapshot_text
from tests.waiting import PATIENCE_S, wait_until

FINGERPRINT = "0123456789abcdef" * 2
TEXT = np.array([1, 2, 3], np.int32)


class Panic(BaseException):
    """As a library written in Rust raises it: no Exception."""


class SlowSet(CacheManager):
    """Waits at ``gate`` before it opens or closes a namespace called "slow", and notes which thread comes by."""

    error: type[BaseException] = RuntimeError

    def __init__(
        self, directory: Path | None = None, *, max_namespaces: int = 256, fingerprint: str = FINGERPRINT
    ) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.opened: list[tuple[str, str]] = []
        self.closed: list[tuple[str, str]] = []
        super().__init__(CacheConfig(directory=directory), fingerprint, max_namespaces=max_namespaces)

    def _open(self, namespace: NamespaceEntry) -> NamespaceCache:
        if namespace.name == "slow":
            assert self.gate.wait(PATIENCE_S)
        if namespace.name == "broken":
            raise self.error("injected")
        self.opened.append((namespace.name, threading.current_thread().name))
        return super()._open(namespace)

    def _close_one(self, cache: NamespaceCache) -> None:
        if cache.name == "slow":
            assert self.gate.wait(PATIENCE_S)
        super()._close_one(cache)
        self.closed.append((cache.name, threading.current_thread().name))


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[SlowSet]:
    with SlowSet(tmp_path) as made:
        yield made
        made.gate.set()


def held(caches: CacheManager, name: str) -> NamespaceLease:
    found = caches.acquire(name)
    assert found is not None
    return found


def said(cache: NamespaceCache) -> list[list[int]]:
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


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_what_cannot_be_opened_is_counted_logged_once_and_tried_again(
    error: type[BaseException], caches: SlowSet, caplog: pytest.LogCaptureFixture
) -> None:
    caches.error = error
    for number in range(1, 4):
        holder = held(caches, "broken")
        wait_until(lambda: caches.num_failed_openings == number)  # noqa: B023
        assert holder.cache is None
        wait_until(lambda: not caches._namespaces["broken"].is_opening)
    assert caches.acquire("no/name") is None
    assert caches.num_failed_openings == 4
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    with pytest.raises(error):
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
    with CacheManager(config, FINGERPRINT, inline=True, max_namespaces=3) as caches:
        used, holders = ["default"], dict[str, NamespaceLease]()
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


# Terms: what is lent to others, what is not, how many there are, and that one can be forgotten


READER = NamespacePolicy(reads_shared=True)
OWNERS = ("default", "a", "b", "c")
"""The shared namespace, two that read it, and one that does not."""
TERMS = {"default": NamespacePolicy(), "a": READER, "b": READER, "c": NamespacePolicy()}


def holder(caches: CacheManager, name: str, terms: NamespacePolicy | None = None) -> NamespaceLease:
    found = caches.acquire(name, terms or TERMS.get(name, NamespacePolicy()))
    assert found is not None
    wait_until(lambda: found.cache)
    return found


def seen(snapshot: Snapshot) -> set[int]:
    """Every token that a lookup in the snapshot may come by."""
    tail = [
        int(snapshot.ring[p & (len(snapshot.ring) - 1)]) for p in range(snapshot.memtable_start, snapshot.memtable_stop)
    ]
    return {int(token) for segment in snapshot.segments for token in segment.tokens} | set(tail)


def words(owner: str, draw: int) -> list[int]:
    """A text of words that nobody else uses, after a lead-in that everybody says."""
    own = 100 * (1 + OWNERS.index(owner))
    return [1, 2, 3, 4, 5, 6, 7, 8, *(own + (draw + i) % 7 for i in range(12))]


def inline_set(capacity: int = 256, directory: Path | None = None) -> CacheManager:
    index = IndexConfig(capacity_tokens=capacity, flush_tokens=16, merge_fanout=2)
    return CacheManager(CacheConfig(index=index, directory=directory), FINGERPRINT, inline=True)


steps = st.lists(st.tuples(st.sampled_from([*OWNERS, "maintain", "flush", "revoke", "grant"]), st.integers(0, 6)))


@settings(max_examples=60)
@given(steps)
def test_nothing_that_only_one_tenant_said_is_drafted_for_another(given_steps: list[tuple[str, int]]) -> None:
    """Whatever is said, sealed, merged, evicted, granted and revoked, in any order."""
    drafter = SuffixDrafter()
    with inline_set() as caches:
        may_read = {"a", "b"}
        for what, number in given_steps:
            if what in OWNERS:
                for _ in range(1 + number):
                    holder(caches, what, NamespacePolicy(reads_shared=what in may_read)).append(
                        np.array(words(what, number), np.int32), prompt_length=0
                    )
            elif what == "maintain":
                caches.maintain()
            elif what == "flush":
                caches.flush()
            else:
                may_read = may_read - {"a"} if what == "revoke" else may_read | {"a"}
            for name in OWNERS:
                cache = holder(caches, name, NamespacePolicy(reads_shared=name in may_read)).cache
                assert cache is not None
                snapshot = cache.snapshot()
                readable = {name} | ({"default"} if name in may_read else set())
                allowed = {token for owner in readable for n in range(7) for token in words(owner, n)}
                assert seen(snapshot) <= allowed | {-1}
                request = DraftRequest(name, np.arange(1, 9, dtype=np.int32), 8, snapshot, 8, learned=cache.learned)
                assert set(drafter.propose([request])[0].token_ids.tolist()) <= allowed
                drafter.finish(name)


def test_readers_search_what_is_sealed_of_the_shared_namespace_in_the_same_memory() -> None:
    with inline_set() as caches:
        caches.get().append(words("default", 0))
        reader, other = holder(caches, "a"), holder(caches, "c")
        assert reader.cache is not None and other.cache is not None
        assert seen(reader.cache.snapshot()) == set()  # a tail is not lent
        caches.flush()
        assert seen(reader.cache.snapshot()) - {-1} == set(words("default", 0))
        assert seen(other.cache.snapshot()) == set()
        (lent,), (own,) = reader.cache.snapshot().segments, caches.get().snapshot().segments
        assert lent.text is own.text and lent.order is own.order and lent.start is None
        stats = reader.cache.stats()
        assert (stats.num_tokens, stats.num_prebuilt_tokens, stats.num_shared_tokens) == (0, 0, len(own))
        table = reader.cache.snapshot().segment_table.number
        caches.maintain()
        assert reader.cache.snapshot().segment_table.number == table  # nothing new: nothing published


def test_warm_up_directories_are_read_by_every_namespace_and_loaded_once(tmp_path: Path) -> None:
    with PrebuiltWriter(tmp_path / "warm", fingerprint=FINGERPRINT) as writer:
        writer.append([9, 8, 7])
    with inline_set() as caches:
        before = holder(caches, "a")
        caches.add_prebuilt_directory(tmp_path / "warm")
        caches.get().append([5, 5, 5])
        caches.flush()
        after = holder(caches, "c")
        for found, expected in ((before, {9, 8, 7, 5}), (after, {9, 8, 7})):
            assert found.cache is not None
            assert seen(found.cache.snapshot()) - {-1} == expected
        texts = {id(each.text) for name in ("default", "a", "c") for each in caches.get(name).snapshot().segments[:1]}
        assert len(texts) == 1


# -- forgetting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [True, False])
def test_a_namespace_that_is_forgotten_is_gone_from_memory_and_disk_and_takes_nothing_more(
    tmp_path: Path, inline: bool
) -> None:
    index = IndexConfig(capacity_tokens=1 << 16, flush_tokens=64)
    closed: list[str] = []
    with CacheManager(
        CacheConfig(index=index, directory=tmp_path),
        FINGERPRINT,
        inline=inline,
        on_close=lambda c: closed.append(c.name),
    ) as caches:
        mine, other = holder(caches, "a"), holder(caches, "c")
        group = holder(caches, "salted", NamespacePolicy(group="a", is_durable=False))
        for each in (mine, other, group):
            for number in range(40):
                each.append(np.array(words("a", number), np.int32), prompt_length=0)
        caches.flush()
        assert list((tmp_path / "a").glob("*.seg")) and not (tmp_path / "salted").exists()
        caches.discard("a")
        for each in (mine, group):
            assert each.cache is not None
            each.append(np.array(words("a", 0), np.int32), prompt_length=0)
            each.cache.append_replicated([np.array([1, 2], np.int32)])
            assert seen(each.cache.snapshot()) == set()
        assert not (tmp_path / "a").exists() and sorted(closed) == ["a", "salted"]
        assert other.cache is not None and len(seen(other.cache.snapshot())) > 7
        again = holder(caches, "a").cache
        assert again is not None and again is not mine.cache and seen(again.snapshot()) == set()
        again.append([1, 2])
        assert caches.get("a").stats().num_memtable_tokens == 3
        with pytest.raises(ConfigError):
            caches.discard("default")


def test_what_is_not_open_is_removed_by_its_files_names(tmp_path: Path) -> None:
    with inline_set(directory=tmp_path) as caches:
        holder(caches, "a").append(np.array(words("a", 1), np.int32), prompt_length=0)
    path = tmp_path / "a"
    (path / "learned.bin").write_bytes(b"x")
    (path / f"{next(path.glob('*.seg')).name}.left-out").write_bytes(b"torn")
    (path / "somebodys.txt").write_text("kept")
    with inline_set(directory=tmp_path) as caches:
        caches.discard("a")
        caches.discard("never-there")
        assert [file.name for file in path.iterdir()] == ["somebodys.txt"]


@pytest.mark.parametrize("where", ["_open", "_open_directory"])
def test_forgetting_and_an_opening_that_is_under_way_wait_for_each_other_only_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    opened = getattr(CacheManager, where)

    def slow(caches: CacheManager, namespace: NamespaceEntry) -> NamespaceCache:
        if namespace.name == "a":
            assert gate.wait(PATIENCE_S)
        found: NamespaceCache = opened(caches, namespace)
        return found

    monkeypatch.setattr(CacheManager, where, slow)
    with CacheManager(CacheConfig(directory=tmp_path), FINGERPRINT) as caches:
        mine = caches.acquire("a")
        assert mine is not None
        mine.append(np.array([1, 2, 3], np.int32), prompt_length=0)
        forgetting = threading.Thread(target=caches.discard, args=("a",))
        forgetting.start()
        wait_until(lambda: "a" in caches._closing)
        gate.set()
        forgetting.join(PATIENCE_S)
        assert not forgetting.is_alive()
        wait_until(lambda: not any(thread.name == "ssd-open-a" for thread in threading.enumerate()))
        assert (mine.cache is None) == (where == "_open")  # what is not open yet is not opened any more
        assert mine.cache is None or seen(mine.cache.snapshot()) == set()
        assert not (tmp_path / "a").exists()


# -- how many ----------------------------------------------------------------------------------------------------------


def test_of_a_group_few_are_open_and_none_is_taken_from_who_holds_it() -> None:
    terms = NamespacePolicy(group="a", max_in_group=2, is_durable=False, capacity_tokens=1024)
    with inline_set() as caches:
        main = holder(caches, "a")
        holders = [holder(caches, f"s{number}", terms) for number in range(2)]
        assert caches.acquire("s2", terms) is None  # both are holder
        assert caches.acquire("s1", terms) is not None
        holders.pop(0)
        gc.collect()
        assert caches.acquire("s2", terms) is not None
        assert caches.names() == ["a", "default", "s1", "s2"]
        assert set(caches.stats()) == {"a", "default"}
        assert main.cache is caches.get("a")


def test_what_is_kept_stays_open_longer_than_what_is_not() -> None:
    brief = NamespacePolicy(is_durable=False, group="x")
    config = CacheConfig(index=IndexConfig(capacity_tokens=256))
    with CacheManager(config, FINGERPRINT, inline=True, max_namespaces=3) as caches:
        for name, terms in (("a", TERMS["a"]), ("brief", brief), ("b", TERMS["b"])):
            holder(caches, name, terms)
            gc.collect()
        assert caches.names() == ["a", "b", "default"]


def test_the_capacity_is_the_one_of_the_terms() -> None:
    with inline_set(capacity=1 << 12) as caches:
        small = holder(caches, "a", NamespacePolicy(capacity_tokens=64))
        for number in range(40):
            small.append(np.array(words("a", number), np.int32), prompt_length=0)
        caches.flush()
        assert small.cache is not None and small.cache.stats().num_tokens <= 64
