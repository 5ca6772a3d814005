"""Replicas that share through a real Redis server, and what happens without it."""

from __future__ import annotations

import logging
import socket
import struct
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.__main__ import main
from ssd.config import CacheConfig
from ssd.replication.entry import (
    FORMAT_VERSION,
    MAX_ENTRY_TOKENS,
    Entry,
    InvalidEntryError,
    pack_entry,
    stream_key,
    unpack_entry,
    unverified_num_tokens,
)
from ssd.replication.redis_stream import FIELD
from ssd.replication.replication_log import ReplicationLog
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.namespace import NamespacePolicy
from tests.cache_files import read_cache, write_cache
from tests.redis_server import RedisServer, client, redis_server
from tests.sharing_replica import FINGERPRINT, KEY, VOCAB_SIZE, catch_up, entry, eventually, replica, stored

__all__ = ["client", "redis_server"]  # fixtures


# Entries


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=300), st.binary(min_size=24, max_size=24))
def test_an_entry_comes_back_as_it_was(tokens: list[int], ids: bytes) -> None:
    data = pack_entry(Entry(ids[:8], ids[8:], np.array(tokens, np.int32)), KEY)
    back = unpack_entry(data, KEY, vocab_size=VOCAB_SIZE)
    assert (back.replica_id, back.sequence_id, back.tokens.tolist()) == (ids[:8], ids[8:], tokens)
    assert back.tokens.dtype == np.int32
    assert unverified_num_tokens(data) == len(tokens)


@given(st.data())
def test_a_changed_entry_is_refused(data: st.DataObject) -> None:
    packed = bytearray(entry(*range(40)))
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] ^= data.draw(st.integers(1, 255))
    try:
        back = unpack_entry(bytes(packed), KEY, vocab_size=VOCAB_SIZE)
    except InvalidEntryError:
        return
    assert back.tokens.tolist() == list(range(40))  # only how it was compressed can differ


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidEntryError):
        unpack_entry(data, KEY, vocab_size=VOCAB_SIZE)
    assert 1 <= unverified_num_tokens(data) <= MAX_ENTRY_TOKENS


@given(
    st.binary(max_size=64),
    st.integers(0, 255),
    st.integers(0, 65535),
    st.booleans(),
    st.binary(max_size=400) | st.lists(st.integers(0, (1 << 32) - 1), max_size=99),
    st.binary(max_size=8),
)
def test_an_entry_forged_with_a_right_checksum_is_text_or_refused(
    ids: bytes, version: int, num_tokens: int, says_so: bool, content: bytes | list[int], rest: bytes
) -> None:
    """Whoever writes to Redis knows the format as well as we do."""
    tokens = np.array(content if isinstance(content, list) else list(content), np.uint32)
    header = struct.pack(
        "<B8s16sH", FORMAT_VERSION if says_so else version, ids[:8], ids[8:24], len(tokens) if says_so else num_tokens
    )
    digest = xxhash.xxh3_64_intdigest(header + KEY.encode() + tokens.tobytes())
    planes = zlib.compress(tokens.view(np.uint8).reshape(-1, 4).T.tobytes())
    try:
        back = unpack_entry(header + struct.pack("<Q", digest) + planes + rest, KEY, vocab_size=VOCAB_SIZE)
    except InvalidEntryError:
        assert rest or not says_so or not len(tokens) or int(tokens.max()) >= VOCAB_SIZE
        return
    assert back.tokens.tolist() == tokens.tolist()
    assert back.tokens.min() >= 0 and back.tokens.max() < VOCAB_SIZE and back.tokens.dtype == np.int32


# Two replicas


def test_the_log_is_bounded_in_tokens(redis_server: RedisServer, client: Any) -> None:
    with replica(redis_server.url, max_tokens=8192) as (one, _):
        for number in range(100):
            one.get().append([number] * 500)

        def newest() -> int | None:
            last: Any = client.xrevrange(KEY, count=1)
            return int(unpack_entry(last[0][1][FIELD], KEY, vocab_size=VOCAB_SIZE).tokens[0]) if last else None

        eventually(lambda: newest() == 99 and client.xlen(KEY) <= 16)
        entries: Any = client.xrange(KEY)
        kept = [unpack_entry(fields[FIELD], KEY, vocab_size=VOCAB_SIZE) for _, fields in entries]
        assert 7000 < sum(len(e.tokens) for e in kept) <= 8192
        assert kept[-1].tokens[0] == 99


def test_the_log_of_a_small_cache_is_no_larger_than_that(redis_server: RedisServer, client: Any) -> None:
    small = NamespacePolicy(capacity_tokens=70_000)
    with replica(redis_server.url) as (one, _):
        held = one.acquire("small", small)
        assert held is not None
        eventually(lambda: held.cache is not None)
        for number in range(40):
            held.append(np.full(4000, number, np.int32), prompt_length=0)
        eventually(lambda: 15 <= client.xlen(stream_key(FINGERPRINT, "small")) <= 17)


# What others may have put there


def test_bad_entries_are_counted_and_skipped(redis_server: RedisServer, client: Any) -> None:
    torn, another, beyond = bytearray(entry(1, 2, 3)), bytearray(entry(1, 2, 3)), entry(VOCAB_SIZE)
    torn[-1] ^= 1
    another[3] ^= 1
    bad = [b"", b"junk", entry(1) + b"x", bytes(torn), bytes(another), beyond, struct.pack("<B", 9) + entry(1)[1:]]
    bad += [entry(1, 2, key=KEY.replace(*names)) for names in (("default", "defaulu"), ("0123", "0124"))]
    bad.append(entry(*range(10))[:35] + zlib.compress(bytes(1 << 24)))  # inflates beyond its tokens
    for data in bad:
        client.xadd(KEY, {FIELD: data})
    client.xadd(KEY, {b"other": b"field"})
    good = entry(1, VOCAB_SIZE - 1, sequence_id=b"a" * 16)
    for _ in range(2):  # written twice
        client.xadd(KEY, {FIELD: good})
    with replica(redis_server.url) as one:
        eventually(lambda: one.stored() == [[1, VOCAB_SIZE - 1]])
        client.xadd(KEY, {FIELD: b"more junk"})
        client.xadd(KEY, {FIELD: good})
        client.xadd(KEY, {FIELD: entry(7, sequence_id=b"b" * 16)})
        eventually(lambda: one.stored() == [[1, VOCAB_SIZE - 1], [7]])
        eventually(lambda: one.log.stats().num_received == 2)
        stats = one.log.stats()
        assert stats.num_invalid == len(bad) + 2 and stats.num_known == 2


# Redis comes and goes


def test_sharing_survives_a_killed_server(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with replica(redis_server.url) as (one, one_log), replica(redis_server.url) as (two, two_log):
        one.get().append([1])
        eventually(lambda: stored(two) == [[1]])
        redis_server.kill()
        one.get().append([2])
        eventually(lambda: one_log.stats().num_failures and two_log.stats().num_failures)
        eventually(lambda: two_log.stats().streams["default"].lag_seconds > 0.3)
        assert not two_log.stats().is_connected
        redis_server.start()  # empty
        eventually(lambda: stored(two) == [[1], [2]])
        two.get().append([3])
        eventually(lambda: stored(one) == [[1], [2], [3]])
        eventually(lambda: two_log.stats().is_connected)
        eventually(lambda: two_log.stats().streams["default"].lag_seconds == 0)
        assert two_log.stats().num_reconnects >= 1
        assert one_log.stats().num_dropped == 0
    for each in ("is interrupted", "is resumed"):
        assert any(each in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)


def test_without_a_server_only_counters_move(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # bound and not listening: refuses
        with caplog.at_level(logging.WARNING), replica(f"redis://:hidden@127.0.0.1:{port}/0") as (one, log):
            started = time.monotonic()
            for _ in range(200):
                one.get().append([1, 2, 3])
            assert time.monotonic() - started < 2
            eventually(lambda: log.stats().num_failures >= 3)
            assert len(stored(one)) == 200
            assert not log.stats().is_connected
    assert log.stats().num_dropped == 200
    assert 1 <= len(caplog.records) <= 2  # one for each direction
    assert "hidden" not in caplog.text


def test_a_server_that_never_answers_delays_nothing() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        started = time.monotonic()
        with replica(f"redis://127.0.0.1:{deaf.getsockname()[1]}/0") as (one, _):
            one.get().append([1, 2, 3])
            assert time.monotonic() - started < 1
        assert time.monotonic() - started < 10


def test_a_full_queue_drops_the_oldest() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}/0"
        with ReplicationLog(url, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE, max_queued_tokens=4096) as log:
            with CacheManager(CacheConfig(), FINGERPRINT, inline=True, on_open=log.attach) as caches:
                for number in range(100):
                    caches.get().append([number] * 100)
            eventually(lambda: log.stats().num_queued == 40)
            assert log.stats().num_dropped == 60


# Directories into the log and out of it


def command(redis_server: RedisServer, *arguments: object) -> int:
    """The status of ``ssd-cache`` with these and the server."""
    return main([*map(str, arguments), "--redis", redis_server.url])


def test_a_replica_that_joins_begins_with_what_was_said_and_pushed_once(
    redis_server: RedisServer, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [[n, n + 1] for n in range(150)] + [[5, 6]]
    warm = write_cache(tmp_path / "warm", texts)
    with replica(redis_server.url) as running:
        assert command(redis_server, "push", warm) == 0
        assert capsys.readouterr().out == "pushed 302 tokens in 151 sequences to namespace default\n"
        assert client.xlen(KEY) == 151
        eventually(lambda: running.stored() == texts)
        running.append([7], [8])
        assert command(redis_server, "push", warm) == 0
        texts += [[7], [8], catch_up(redis_server.url, running)]
        assert running.stored() == texts
        with replica(redis_server.url) as joiner:
            texts.append(catch_up(redis_server.url, running, joiner))
            assert joiner.stored() == running.stored() == texts
            assert command(redis_server, "push", warm) == 0
            texts.append(catch_up(redis_server.url, running, joiner))
            assert joiner.stored() == running.stored() == texts


def test_what_was_pulled_is_the_log_once_and_can_be_pushed_elsewhere(
    redis_server: RedisServer, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [[1, 2], [1, 2], [3], list(range(900)) * 6]
    with replica(redis_server.url) as one:
        one.append(*said)
        eventually(lambda: one.log.stats().num_published == 5)  # the long one in two parts
        entries: Any = client.xrange(KEY)
        client.xadd(KEY, entries[0][1])  # written twice
        client.xadd(KEY, {FIELD: b"junk"})
        assert command(redis_server, "pull", "--namespace", "default", "--out", tmp_path / "out") == 0
        assert command(redis_server, "pull", "--namespace", "other", "--out", tmp_path / "out") == 2
        once = capsys.readouterr().out
        assert command(redis_server, "pull", "--namespace", "default", "--out", tmp_path / "out") == 2  # not twice
        assert "replace it with --force" in capsys.readouterr().err
        assert command(redis_server, "pull", "--namespace", "default", "--out", tmp_path / "out", "--force") == 0
    assert capsys.readouterr().out == once
    assert f"{5 + 5400 + 32:,} tokens in 5 sequences of default" in once
    assert "  1 entries of the stream were not written by SSD" in once
    assert read_cache(tmp_path / "out") == [*said[:3], said[3][:4096], said[3][4064:]]
    assert command(redis_server, "push", tmp_path / "out", "--namespace", "other") == 0
    with replica(redis_server.url) as two:
        two.caches.get("other")
        eventually(lambda: stored(two.caches, "other") == read_cache(tmp_path / "out"))
    assert command(redis_server, "pull", "--namespace", "other", "--out", tmp_path / "others") == 0
    capsys.readouterr()
    assert command(redis_server, "push", tmp_path / "others") == 0
    assert capsys.readouterr().out.endswith("to namespace other\n")  # whose it is


def test_a_push_says_what_the_bound_leaves_out(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = write_cache(tmp_path / "warm", [[n] * 1000 for n in range(10)], segment_tokens=1 << 20)
    assert command(redis_server, "push", warm, "--max-tokens", "4K") == 0
    pushed, left_out = capsys.readouterr().out.splitlines()
    assert pushed == "pushed 4,000 tokens in 4 sequences to namespace default"
    assert left_out.startswith("  6,000 tokens in the 6 oldest sequences were skipped")
    with replica(redis_server.url) as one:
        eventually(lambda: one.stored() == [[n] * 1000 for n in range(6, 10)])


def test_a_purge_leaves_nothing_in_redis_and_says_who_holds_what(
    redis_server: RedisServer, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ("", ":head", ":layer", ":chunks", ":member:0a")  # former versions kept more than the log
    for fingerprint in (FINGERPRINT, "f" * 32):
        for suffix in old:
            client.set(stream_key(fingerprint, "tenant") + suffix, "x")
    client.xadd(stream_key(FINGERPRINT, "tenant2"), {FIELD: b"x"})
    assert command(redis_server, "purge", "--namespace", "tenant") == 0
    said = capsys.readouterr().out
    assert "10 keys removed from Redis, nothing is left" in said and "DELETE /admin/tenants/NAME/cache" in said
    assert client.keys() == [stream_key(FINGERPRINT, "tenant2").encode()]
    assert command(redis_server, "purge", "--namespace", "tenant") == 0
    client.execute_command("ACL", "SETUSER", "default", "-del")
    assert command(redis_server, "purge", "--namespace", "tenant2") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_each_namespace_has_a_stream_and_one_that_is_forgotten_leaves_none(
    redis_server: RedisServer, client: Any
) -> None:
    with ExitStack() as stack:
        logs, sets = [], []
        for _ in range(2):
            log = stack.enter_context(ReplicationLog(redis_server.url, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE))
            caches = CacheManager(
                CacheConfig(), FINGERPRINT, inline=True, max_namespaces=3, on_open=log.attach, on_close=log.detach
            )
            logs.append(log)
            sets.append(stack.enter_context(caches))
        held = [[caches.acquire(name) for name in ("a", "b")] for caches in sets]
        stranger = stack.enter_context(replica(redis_server.url, fingerprint="f" * 32)).caches
        stranger.get("a")
        sets[0].get("a").append([1, 2, 3])
        sets[1].get("b").append([4, 5, 6])
        eventually(lambda: stored(sets[1], "a") == [[1, 2, 3]] and stored(sets[0], "b") == [[4, 5, 6]])
        assert stored(sets[0]) == stored(sets[1]) == stored(stranger, "a") == []
        for caches, log in zip(sets, logs, strict=True):
            caches.discard("a")
            log.delete_stream("a")
        assert client.exists(stream_key(FINGERPRINT, "a")) == 0
        assert client.exists(stream_key(FINGERPRINT, "b")) == 1
        assert held and all(len(log.subscriber._streams) == 2 for log in logs)
        brief = NamespacePolicy(is_durable=False)  # neither published nor read
        caches = sets[0]
        assert caches.acquire("c", brief) is not None
        caches.get("c").append([7, 8, 9])
        caches.acquire("d")
        caches.acquire("e")
        assert set(logs[0].subscriber._streams) == {
            stream_key(FINGERPRINT, name) for name in caches.names() if name != "c"
        }
        assert stored(sets[1], "c") == []
