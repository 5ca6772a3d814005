"""A log that somebody else writes to as well: whatever he puts there costs an entry, never the sharing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ssd.sharing.stream import FIELD
from tests.redis_server import RedisServer, client, redis_server
from tests.sharing_replica import KEY, Replica, entry, eventually, foreign, replica, stored

__all__ = ["client", "redis_server"]  # fixtures

ROOT = Path(__file__).parent.parent
LAST_ID = b"18446744073709551615-18446744073709551615"
FUTURE_ID = b"18446744073709551000-7"
OTHER_KEY = KEY.replace("default", "other")

Client = Any


def settled(one: Replica) -> None:
    """``one`` is connected and has found its place in the log."""
    eventually(lambda: one.log.stats().is_connected)


# Ids


@pytest.mark.parametrize("lost_by", ["flushall", "delete", "nothing"])
@pytest.mark.parametrize("hostile_id", [FUTURE_ID, LAST_ID], ids=["far ahead", "last possible"])
def test_a_hostile_id_does_not_end_sharing(
    redis_server: RedisServer, client: Client, hostile_id: bytes, lost_by: str
) -> None:
    with replica(redis_server.url) as one, replica(redis_server.url) as two:
        one.append([1])
        eventually(lambda: two.stored() == [[1]])
        client.xadd(KEY, foreign(1), id=hostile_id)
        eventually(lambda: [7, 1] in one.stored() and [7, 1] in two.stored())
        if lost_by == "flushall":
            client.flushall()
        elif lost_by == "delete":
            client.delete(KEY)
        one.append([2])
        eventually(lambda: [2] in two.stored())
        two.append([3])
        eventually(lambda: [3] in one.stored())
        assert sorted(two.stored()) == sorted(one.stored()) == [[1], [2], [3], [7, 1]]
        eventually(lambda: one.log.stats().is_connected and two.log.stats().is_connected)


def test_replicas_that_begin_a_new_log_at_once_lose_nothing(redis_server: RedisServer, client: Client) -> None:
    replicas = [replica(redis_server.url) for _ in range(4)]
    with replicas[0] as a, replicas[1] as b, replicas[2] as c, replicas[3] as d:
        for one in (a, b, c, d):
            settled(one)
        for attack in range(3):
            client.xadd(KEY, foreign(attack), id=LAST_ID)
            for number, one in enumerate((a, b, c, d)):
                one.append([10 * attack + number + 10])
            expected = {10 * past + number + 10 for past in range(attack + 1) for number in range(4)}
            eventually(
                lambda expected=expected: all(  # type: ignore[misc]
                    expected <= {text[0] for text in one.stored()} for one in (a, b, c, d)
                )
            )
        for one in (a, b, c, d):
            own = [text for text in one.stored() if text[0] >= 10]
            assert len(own) == 12  # nothing twice


def test_a_clock_that_steps_back_changes_nothing(redis_server: RedisServer, client: Client, tmp_path: Path) -> None:
    """Redis gives ids after its newest one then; a day ahead looks the same."""
    milliseconds = int(time.time() * 1000) + 86_400_000
    with replica(redis_server.url, tmp_path / "one") as one, replica(redis_server.url) as two:
        client.xadd(KEY, foreign(1), id=b"%d-0" % milliseconds)
        eventually(lambda: one.stored() == two.stored() == [[7, 1]])
        one.append([1])
        eventually(lambda: [1] in two.stored())
        two.append([2])
        eventually(lambda: [2] in one.stored())
        assert client.xlen(KEY) == 3
    with replica(redis_server.url, tmp_path / "one") as one:
        settled(one)
        client.xadd(KEY, foreign(2))
        eventually(lambda: [7, 2] in one.stored())
        assert sorted(one.stored()) == [[1], [2], [7, 1], [7, 2]]


# Sizes

_READER = """
import sys, time
from tests.sharing_replica import replica
from tests.test_sharing_hostile import peak_memory
with replica(sys.argv[1]) as one:
    while not one.log.stats().is_connected: time.sleep(0.01)
    before = peak_memory()
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while one.stored()[-1:] != [[7, 99]] and time.monotonic() < deadline: time.sleep(0.01)
    print(peak_memory() - before, one.stored() == [[7, n] for n in (0, 1, 98, 99)], one.log.stats().num_invalid)
"""


def peak_memory() -> int:
    """Most bytes this process ever had in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("is_there_before", [True, False], ids=["paged through", "followed"])
@pytest.mark.parametrize("kind", ["large values", "many fields"])
def test_what_an_entry_takes_is_known_before_it_is_fetched(
    redis_server: RedisServer, client: Client, is_there_before: bool, kind: str
) -> None:
    def write() -> None:
        client.xadd(KEY, foreign(0))
        client.xadd(KEY, foreign(1))
        for _ in range(6):
            if kind == "large values":
                client.xadd(KEY, {FIELD: bytes(24 << 20)})
            else:
                client.xadd(KEY, {b"%d" % number: b"" for number in range(200_000)})
        client.xadd(KEY, foreign(98))
        client.xadd(KEY, foreign(99))

    if is_there_before:
        write()
    with subprocess.Popen(
        [sys.executable, "-c", _READER, redis_server.url], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        if not is_there_before:
            write()
        num_bytes, is_right, num_invalid = child.stdout.read().split()
    assert is_right == "True"
    assert int(num_bytes) < 40 << 20
    assert int(num_invalid) == 6


def test_many_tiny_entries_are_few_to_a_reader(redis_server: RedisServer, client: Client) -> None:
    """A log is bounded in entries as well as in tokens, for whoever reads it."""
    pipeline = client.pipeline(transaction=False)
    for number in range(3000):
        pipeline.xadd(KEY, foreign(number % 900))
    pipeline.execute()
    with replica(redis_server.url, max_tokens=64_000) as one:  # 1,000 entries
        eventually(lambda: client.xlen(KEY) <= 1000)
        settled(one)
        client.xadd(KEY, {FIELD: entry(1, 2, 3)})
        eventually(lambda: [1, 2, 3] in one.stored())
        assert (
            one.log.stats().num_received + one.log.stats().num_known <= 1002
        )  # one beyond the bound shows that it is one


# Entries and keys that are not ours


def test_a_namespace_whose_key_is_of_another_kind_holds_up_no_other(redis_server: RedisServer, client: Client) -> None:
    client.set(KEY, "a string")
    with replica(redis_server.url) as (one, one_log), replica(redis_server.url) as (two, two_log):
        one.get(), two.get()
        for caches in (one, two):
            caches.get("other")
        for number in range(200):
            one.get().append([5, number])  # refused
            one.get("other").append([6, number])
        eventually(lambda: len(stored(two, "other")) == 200)
        assert stored(two) == []
        assert not one_log.stats().is_connected and not two_log.stats().is_connected
        client.delete(KEY)
        eventually(lambda: len(stored(two)) == 200)
        assert one_log.stats().num_dropped == 0
        eventually(lambda: one_log.stats().is_connected and two_log.stats().is_connected)


def test_texts_queued_at_a_refusal_are_written_when_it_ends(redis_server: RedisServer, client: Client) -> None:
    with replica(redis_server.url) as one, replica(redis_server.url) as two:
        settled(one)
        settled(two)
        client.config_set("maxmemory", 1)
        for number in range(272):
            one.append([1 + number // 900, number % 900])
        eventually(lambda: one.log.stats().num_failures > 0)
        client.config_set("maxmemory", 0)
        eventually(lambda: len(two.stored()) == 272)  # and nothing new was appended
        eventually(lambda: one.log.stats().num_dropped == one.log.stats().num_queued == 0)


def test_a_slow_namespace_holds_up_no_other(
    redis_server: RedisServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica(redis_server.url) as (one, log):
        slow, _ = one.get(), one.get("other")
        eventually(lambda: log.stats().is_connected)
        append = slow.append_all_shared

        def wait_for_room(*arguments: Any, **settings: Any) -> None:
            time.sleep(0.5)
            append(*arguments, **settings)

        monkeypatch.setattr(slow, "append_all_shared", wait_for_room)
        for number in range(90):
            client.xadd(KEY, foreign(number))
        for number in range(300):
            client.xadd(OTHER_KEY, foreign(number, OTHER_KEY))
        eventually(lambda: len(stored(one, "other")) == 300)
        assert 0 < len(stored(one)) < 90
