"""A durable replica that shares: after a restart nothing is stored twice, and what a crash lost comes back."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.config import CacheConfig
from ssd.replication import subscriber as reader_module
from ssd.replication.offsets import ReplicaOffset
from ssd.replication.subscriber import Subscriber
from ssd.retrieval.cache_manager import CacheManager
from tests.redis_server import RedisServer, client, redis_server
from tests.sharing_replica import FINGERPRINT, KEY, VOCAB_SIZE, Replica, catch_up, eventually, foreign, replica, text_of

ROOT = Path(__file__).parent.parent

__all__ = ["client", "redis_server"]  # fixtures


def crash(directory: Path) -> Path:
    """The directory as a process killed now would leave it, its lock free; the original goes on undisturbed."""
    copy = directory.with_name(directory.name + "-after-crash")
    shutil.copytree(directory, copy)
    return copy


def say(client: Any, numbers: Iterable[int]) -> list[list[int]]:
    """Write what another replica says; its texts."""
    for number in numbers:
        client.xadd(KEY, foreign(number))
    return [[7, number] for number in numbers]


def assert_once(replica: Replica, texts: list[list[int]]) -> None:
    """``replica`` holds exactly ``texts``, in any order."""
    assert sorted(replica.stored()) == sorted(texts)


# Restarts


def test_a_copied_directory_and_its_original_learn_from_each_other(redis_server: RedisServer, tmp_path: Path) -> None:
    with replica(redis_server.url, tmp_path / "one") as one:
        one.append([1, 1])
        one.caches.flush()
        with replica(redis_server.url, crash(tmp_path / "one")) as copy:
            one.append([1, 2])
            copy.append([2, 2])
            texts = [[1, 1], [1, 2], [2, 2], catch_up(redis_server.url, one, copy)]
            assert_once(one, texts)
            assert_once(copy, texts)


def test_a_life_without_redis_is_no_harm(redis_server: RedisServer, tmp_path: Path) -> None:
    texts = [[1, 1]]
    with replica(redis_server.url, tmp_path / "one") as one:
        one.append([1, 1])
        texts.append(catch_up(redis_server.url, one))
        one.caches.flush()
        one.append([1, 2])
        texts.append([1, 2])
        texts.append(catch_up(redis_server.url, one))
        directory = crash(tmp_path / "one")
    with CacheManager(CacheConfig(directory=directory), FINGERPRINT, inline=True) as alone:
        for number in range(20):  # where the lost text was, and beyond
            alone.get().append([3, number])
            texts.append([3, number])
    with replica(redis_server.url, directory) as one:
        texts.append(catch_up(redis_server.url, one))
        assert_once(one, texts)


@pytest.mark.parametrize("is_lossy", [False, True], ids=["kept", "emptied and trimmed"])
@pytest.mark.parametrize("seed", range(3))
def test_after_any_order_of_events_each_shared_sequence_is_there_once(
    redis_server: RedisServer, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, is_lossy: bool
) -> None:
    """Appends here and there, seals, crashes and restarts, also in the middle of publishing and of catching up."""
    monkeypatch.setattr(reader_module, "_CHECK_S", 0.1)
    rng = np.random.default_rng(seed)
    directory, number = tmp_path / "one", 0
    events = ["here", "here", "here", "there", "there", "there", "seal", "wait", "crash", "restart", "new"]
    with ExitStack() as stack:
        lives = [stack.enter_context(ExitStack()) for _ in range(2)]
        one = lives[0].enter_context(replica(redis_server.url, directory))
        other = lives[1].enter_context(replica(redis_server.url))
        for event in rng.choice(events + ["flush", "trim"] * is_lossy, 60):
            number += 1
            if event == "here":
                one.append(text_of(1, number))
            elif event == "there":
                other.append(text_of(2, number))
            elif event == "seal":
                one.caches.flush()
            elif event == "wait":
                catch_up(redis_server.url, one, other)
            elif event == "flush":
                client.flushall()
            elif event == "trim":
                client.xtrim(KEY, maxlen=int(rng.integers(10)), approximate=False)
            elif event == "new":  # without a directory: all it begins with is the log
                lives[1].close()
                other = lives[1].enter_context(replica(redis_server.url))
            else:
                if event == "crash":
                    directory = crash(directory)
                lives[0].close()
                one = lives[0].enter_context(replica(redis_server.url, directory))
        catch_up(redis_server.url, one, other)
        assert max(Counter(map(tuple, one.stored())).values()) == 1
        assert max(Counter(map(tuple, other.stored())).values()) == 1
        if not is_lossy:
            assert {*map(tuple, other.stored())} == {*map(tuple, one.stored())}


@pytest.mark.parametrize("stopped_in", ["_client.execute_command", "_receive"])
def test_a_replica_stopped_while_it_catches_up_claims_no_more_than_it_stored(
    redis_server: RedisServer, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_in: str
) -> None:
    directory = tmp_path / "one"
    texts = say(client, range(100))
    with replica(redis_server.url, directory) as one:
        texts.append(catch_up(redis_server.url, one))
    texts += say(client, range(100, 300))
    with CacheManager(CacheConfig(directory=directory), FINGERPRINT, inline=True) as caches:
        reader = Subscriber(redis_server.url, vocab_size=VOCAB_SIZE, max_tokens=1 << 20)
        reader.subscribe(KEY, caches.get(), ReplicaOffset(b"replica.", caches.get().checkpoint))
        owner, name = (reader, stopped_in) if "." not in stopped_in else (reader._client, stopped_in.split(".")[1])
        step, num_steps = getattr(owner, name), 0

        def step_and_stop(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                reader.stop()
            return step(*args, **kwargs)

        monkeypatch.setattr(owner, name, step_and_stop)
        while not reader.loop.is_stopping:
            reader._exchange()
        reader.close(0)
        assert num_steps >= 3  # what is known of the log is found with some commands
    with replica(redis_server.url, directory) as one:
        assert_once(one, [*texts, catch_up(redis_server.url, one)])


# A log that is not what it was


@pytest.mark.parametrize(
    "ids", [(b"*", b"*"), (b"5-1", b"6-1"), (b"5-1", b"*")], ids=["all newer", "all older", "older and newer"]
)
def test_another_redis_or_an_emptied_one_is_read_whole(
    redis_server: RedisServer, client: Any, tmp_path: Path, ids: tuple[bytes, bytes]
) -> None:
    with replica(redis_server.url, tmp_path / "one") as one:
        one.append([1, 1])
        texts = [[1, 1], catch_up(redis_server.url, one)]
    client.flushall()
    for number, entry_id in enumerate(ids):
        client.xadd(KEY, foreign(number), id=entry_id)
    with replica(redis_server.url, tmp_path / "one") as one:
        texts += [[7, 0], [7, 1], catch_up(redis_server.url, one)]
        assert_once(one, texts)
    with replica(redis_server.url, tmp_path / "one") as one:
        assert_once(one, [*texts, catch_up(redis_server.url, one)])


def test_a_redis_that_lost_entries_while_we_run_costs_nothing(
    redis_server: RedisServer, client: Any, tmp_path: Path
) -> None:
    texts = say(client, range(50))
    with replica(redis_server.url, tmp_path / "one") as one:
        eventually(lambda: len(one.stored()) == 50)
        kept = client.xrange(KEY)[:30]
        redis_server.kill()
        eventually(lambda: not one.log.stats().is_connected)
        redis_server.start()
        for entry_id, fields in kept:
            client.xadd(KEY, fields, id=entry_id)
        one.append([1, 1])
        texts += [[1, 1], catch_up(redis_server.url, one)]
        assert_once(one, texts)
    with replica(redis_server.url, tmp_path / "one") as one:
        assert_once(one, [*texts, catch_up(redis_server.url, one)])


def test_a_restarted_replica_still_bounds_the_log(redis_server: RedisServer, client: Any, tmp_path: Path) -> None:
    for life in range(4):
        with replica(redis_server.url, tmp_path / "one", max_tokens=8192) as one:
            for number in range(10):
                one.append([life, number, *[5] * 398])
            eventually(lambda log=one.log: log.stats().num_published == 10)  # type: ignore[misc]
            eventually(lambda: client.xlen(KEY) * 400 <= 8192)


def run_until_killed(url: str, directory: Path, writer: int, first: int, num_appends: int, other: Replica) -> int:
    """Let a replica append until it has said so ``num_appends`` times, kill it, return the next number to use.

    ``other`` appends at the same time, one for one.
    """
    arguments = [sys.executable, "-m", "tests.sharing_replica", url, str(directory), str(writer), str(first)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        number = first
        for _ in range(num_appends):
            number = int(child.stdout.readline())
            other.append(text_of(writer + 1, number))
        child.kill()
        said = child.stdout.read().split("\n")[:-1]  # whole lines only
    return (int(said[-1]) if said else number) + 2  # one more may have been stored unsaid


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_replicas_hold_every_shared_sequence_exactly_once(
    redis_server: RedisServer, tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    directory = tmp_path / "one"
    number = 0
    with replica(redis_server.url) as other:
        for kill in range(6):
            num_appends = int(rng.integers(1, 200))
            number = run_until_killed(redis_server.url, directory, 1, number, num_appends, other)
            if kill % 2 == 0 and kill:
                continue  # two kills in a row
            with replica(redis_server.url, directory) as one:
                catch_up(redis_server.url, one, other)
                counts = Counter(map(tuple, one.stored()))
                assert max(counts.values()) == 1
                assert {*map(tuple, other.stored())} <= {
                    *counts
                }  # more than these: sealed, and killed before published
                assert one.caches.get().stats().num_dropped_tokens == one.caches.get().stats().num_failures == 0
        assert len(other.stored()) > number
