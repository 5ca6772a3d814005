"""Replicas that share through a real Redis server, and what happens without it."""

from __future__ import annotations

import logging
import socket
import struct
import time
import zlib
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ssd.config import CacheConfig
from ssd.errors import ConfigError, StoreUnavailable, TokenizerMismatch
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.namespace import NamespaceTerms
from ssd.retrieval.static import StaticWriter
from ssd.sharing.connection import address_of, connect, hide_password
from ssd.sharing.entry import (
    FORMAT_VERSION,
    MAX_ENTRY_TOKENS,
    Entry,
    InvalidEntryError,
    join_planes,
    num_tokens_of,
    pack_entry,
    stream_key,
    unpack_entry,
)
from ssd.sharing.published.commands import push_segments
from ssd.sharing.redis_log import RedisLog
from ssd.sharing.stream import FIELD
from tests.redis_server import RedisServer, redis_server
from tests.reference.sharing import slow_tokens
from tests.sharing_replica import FINGERPRINT, KEY, VOCAB_SIZE, catch_up, entry, eventually, replica, stored

__all__ = ["redis_server"]  # the fixture


# Entries


@given(st.binary(min_size=4, max_size=200).map(lambda planes: planes[: len(planes) // 4 * 4]))
def test_planes_are_joined_as_a_plain_loop_does(planes: bytes) -> None:
    tokens = np.empty(len(planes) // 4, np.uint32)
    largest = join_planes(np.frombuffer(planes, np.uint8), tokens)
    assert tokens.tolist() == slow_tokens(planes) and largest == max(slow_tokens(planes))


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=300), st.binary(min_size=24, max_size=24))
def test_an_entry_comes_back_as_it_was(tokens: list[int], ids: bytes) -> None:
    data = pack_entry(Entry(ids[:8], ids[8:], np.array(tokens, np.int32)), KEY)
    back = unpack_entry(data, KEY, vocab_size=VOCAB_SIZE)
    assert (back.replica_id, back.sequence_id, back.tokens.tolist()) == (ids[:8], ids[8:], tokens)
    assert back.tokens.dtype == np.int32
    assert num_tokens_of(data) == len(tokens)


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
    assert 1 <= num_tokens_of(data) <= MAX_ENTRY_TOKENS


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


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    assert unpack_entry(entry(VOCAB_SIZE - 1), KEY, vocab_size=VOCAB_SIZE).tokens.tolist() == [VOCAB_SIZE - 1]
    with pytest.raises(InvalidEntryError, match="vocabulary"):
        unpack_entry(entry(VOCAB_SIZE), KEY, vocab_size=VOCAB_SIZE)


def test_an_entry_is_one_in_its_own_stream_alone() -> None:
    for other in (KEY.replace("default", "defaulu"), KEY.replace("0123", "0124"), ""):
        with pytest.raises(InvalidEntryError, match="checksum"):
            unpack_entry(entry(1, 2), other, vocab_size=VOCAB_SIZE)


def test_an_entry_that_inflates_beyond_its_tokens_is_refused() -> None:
    packed = entry(*range(10))
    bomb = packed[:35] + zlib.compress(bytes(1 << 24))
    with pytest.raises(InvalidEntryError):
        unpack_entry(bomb, KEY, vocab_size=VOCAB_SIZE)


# URLs


def test_no_message_shows_a_password() -> None:
    for url in ("redis://user:s3cr%40t@host:6379/0", "rediss://:s3cr%40t@host", "redis://h/0?password=s3cr%40t"):
        assert "s3cr" not in hide_password(f"{url} s3cr@t", url)
        assert "s3cr" not in address_of(url)
    for url in ("http://user:s3cret@host", "redis://user:s3cret@host:port/0"):
        with pytest.raises(ConfigError) as caught:
            connect(url)
        assert "s3cret" not in str(caught.value)
        assert "redis://" in str(caught.value)


def test_tls_urls_and_time_outs() -> None:
    client = connect("rediss://user:pw@host:7000/3?socket_timeout=99")
    kwargs = client.connection_pool.connection_kwargs
    assert client.connection_pool.connection_class.__name__ == "SSLConnection"
    assert (kwargs["host"], kwargs["port"], kwargs["db"], kwargs["username"]) == ("host", 7000, 3, "user")
    assert kwargs["socket_timeout"] < 5
    client.close()


# Two replicas


def test_what_one_replica_learns_the_other_stores(redis_server: RedisServer) -> None:
    with replica(redis_server.url) as (one, one_log), replica(redis_server.url) as (two, two_log):
        one.get().append([1, 2, 3])
        eventually(lambda: stored(two) == [[1, 2, 3]])
        two.get().append([4, 5])
        eventually(lambda: stored(one) == [[1, 2, 3], [4, 5]])
        assert stored(two) == [[1, 2, 3], [4, 5]]  # nothing came back to where it was from
        eventually(lambda: one_log.stats().num_published == two_log.stats().num_received == 1)
        eventually(lambda: one_log.stats().num_published_tokens == 3)
        eventually(lambda: one_log.stats().is_connected)


def test_namespaces_and_tokenizers_are_apart(redis_server: RedisServer) -> None:
    with (
        replica(redis_server.url) as (one, _),
        replica(redis_server.url) as (two, _),
        replica(redis_server.url, fingerprint="f" * 32) as (other, _),
    ):
        two.get("a"), two.get("b"), other.get("a")
        one.get("a").append([1, 2])
        one.get("b").append([3])
        eventually(lambda: stored(two, "a") == [[1, 2]] and stored(two, "b") == [[3]])
        assert stored(two) == stored(other, "a") == stored(other) == []


def test_a_long_sequence_arrives_in_overlapping_parts(redis_server: RedisServer) -> None:
    text = np.random.default_rng(1).integers(0, VOCAB_SIZE, 10_000).tolist()
    with replica(redis_server.url) as (one, _), replica(redis_server.url) as (two, _):
        one.get().append(text)
        eventually(lambda: len(stored(two)) == 3)
        first, second, third = stored(two)
        assert first == text[:4096]
        assert second[:32] == first[-32:]
        assert third[:32] == second[-32:]
        assert first + second[32:] + third[32:] == text


def test_the_log_is_bounded_in_tokens(redis_server: RedisServer) -> None:
    client = connect(redis_server.url)
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
    client.close()


# What others may have put there


def test_bad_entries_are_counted_and_skipped(redis_server: RedisServer) -> None:
    client = connect(redis_server.url)
    torn = bytearray(entry(1, 2, 3))
    torn[-1] ^= 1
    bad = [b"", b"junk", bytes(torn), entry(VOCAB_SIZE), struct.pack("<B", 9) + entry(1)[1:]]
    for data in bad:
        client.xadd(KEY, {FIELD: data})
    client.xadd(KEY, {b"other": b"field"})
    client.xadd(KEY, {FIELD: entry(1, 2, sequence_id=b"a" * 16)})
    client.xadd(KEY, {FIELD: entry(1, 2, sequence_id=b"a" * 16)})  # written twice
    with replica(redis_server.url) as (one, log):
        eventually(lambda: stored(one) == [[1, 2]])
        client.xadd(KEY, {FIELD: b"more junk"})
        client.xadd(KEY, {FIELD: entry(1, 2, sequence_id=b"a" * 16)})
        client.xadd(KEY, {FIELD: entry(7, sequence_id=b"b" * 16)})
        eventually(lambda: stored(one) == [[1, 2], [7]])
        assert log.stats().num_invalid == len(bad) + 2
        eventually(lambda: log.stats().num_received == 2)
    client.close()


def test_a_key_of_another_kind_only_counts(redis_server: RedisServer) -> None:
    client = connect(redis_server.url)
    client.set(KEY, "a string")
    with replica(redis_server.url) as (one, log):
        one.get().append([1, 2, 3])
        eventually(lambda: log.stats().num_failures > 1 and not log.stats().is_connected)
        client.delete(KEY)
        one.get().append([4])
        eventually(lambda: log.stats().num_published == 2 and log.stats().is_connected)
        assert log.stats().num_dropped == 0
        assert stored(one) == [[1, 2, 3], [4]]
    client.close()


# Redis comes and goes


def test_sharing_survives_a_killed_server(redis_server: RedisServer) -> None:
    with replica(redis_server.url) as (one, one_log), replica(redis_server.url) as (two, two_log):
        one.get().append([1])
        eventually(lambda: stored(two) == [[1]])
        redis_server.kill()
        one.get().append([2])
        eventually(lambda: one_log.stats().num_failures and two_log.stats().num_failures)
        assert not two_log.stats().is_connected
        redis_server.start()  # empty
        eventually(lambda: stored(two) == [[1], [2]])
        two.get().append([3])
        eventually(lambda: stored(one) == [[1], [2], [3]])
        eventually(lambda: two_log.stats().is_connected)
        assert two_log.stats().num_reconnects >= 1
        assert one_log.stats().num_dropped == 0


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
        with RedisLog(url, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE, max_queued_tokens=4096) as log:
            with CacheSet(CacheConfig(), FINGERPRINT, inline=True, on_open=log.attach) as caches:
                for number in range(100):
                    caches.get().append([number] * 100)
            eventually(lambda: log.stats().num_queued == 40)
            assert log.stats().num_dropped == 60


# Pushing a directory


def write_directory(path: Path, texts: list[list[int]]) -> None:
    with StaticWriter(path, fingerprint=FINGERPRINT) as writer:
        for text in texts:
            writer.append(text)


def test_a_pushed_directory_reaches_a_running_replica_once(redis_server: RedisServer, tmp_path: Path) -> None:
    texts = [[n, n + 1] for n in range(150)] + [[5, 6]]
    write_directory(tmp_path / "warm", texts)
    with replica(redis_server.url) as running:
        result = push_segments(tmp_path / "warm", redis_server.url, "default", fingerprint=FINGERPRINT)
        assert (result.num_sequences, result.num_entries, result.num_left_out_tokens) == (151, 151, 0)
        eventually(lambda: running.stored() == texts)
        push_segments(tmp_path / "warm", redis_server.url, "default", fingerprint=FINGERPRINT)
        end = catch_up(redis_server.url, running)
        assert running.stored() == [*texts, end]


def test_a_directory_can_be_pushed_to_two_namespaces_of_a_replica(redis_server: RedisServer, tmp_path: Path) -> None:
    write_directory(tmp_path / "warm", [[1, 2], [3]])
    with replica(redis_server.url) as (one, _):
        for namespace in ("default", "other"):
            one.get(namespace)
            push_segments(tmp_path / "warm", redis_server.url, namespace, fingerprint=FINGERPRINT)
        eventually(lambda: stored(one) == stored(one, "other") == [[1, 2], [3]])


def test_a_push_says_what_the_bound_leaves_out(redis_server: RedisServer, tmp_path: Path) -> None:
    write_directory(tmp_path / "warm", [[n] * 1000 for n in range(10)])
    result = push_segments(tmp_path / "warm", redis_server.url, "default", fingerprint=FINGERPRINT, max_tokens=4096)
    assert (result.num_sequences, result.num_tokens) == (4, 4000)
    assert (result.num_left_out_sequences, result.num_left_out_tokens) == (6, 6000)
    with replica(redis_server.url) as (one, _):
        eventually(lambda: stored(one) == [[n] * 1000 for n in range(6, 10)])


def test_a_push_that_cannot_work_says_why(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="ssd-cache build"):
        push_segments(tmp_path / "none", "redis://127.0.0.1:1/0", "default", fingerprint=FINGERPRINT)
    write_directory(tmp_path / "warm", [[1]])
    with pytest.raises(TokenizerMismatch):
        push_segments(tmp_path / "warm", "redis://127.0.0.1:1/0", "default", fingerprint="f" * 32)
    with pytest.raises(StoreUnavailable, match="did not take the push: it failed at the first entries") as caught:
        push_segments(tmp_path / "warm", "redis://:hidden@127.0.0.1:1/0", "default", fingerprint=FINGERPRINT)
    assert "hidden" not in str(caught.value)


def test_each_namespace_has_a_stream_and_one_that_is_forgotten_leaves_none(redis_server: RedisServer) -> None:
    with ExitStack() as stack:
        logs, sets = [], []
        for _ in range(2):
            log = stack.enter_context(RedisLog(redis_server.url, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE))
            caches = CacheSet(
                CacheConfig(), FINGERPRINT, inline=True, max_namespaces=3, on_open=log.attach, on_close=log.detach
            )
            logs.append(log)
            sets.append(stack.enter_context(caches))
        held = [[caches.hold(name) for name in ("a", "b")] for caches in sets]
        sets[0].get("a").append([1, 2, 3])
        sets[1].get("b").append([4, 5, 6])
        eventually(lambda: stored(sets[1], "a") == [[1, 2, 3]] and stored(sets[0], "b") == [[4, 5, 6]])
        assert stored(sets[0]) == stored(sets[1]) == []
        with closing(connect(redis_server.url)) as client:
            for caches, log in zip(sets, logs, strict=True):
                caches.discard("a")
                log.forget("a")
            assert client.exists(stream_key(FINGERPRINT, "a")) == 0
            assert client.exists(stream_key(FINGERPRINT, "b")) == 1
        assert held and all(len(log.reader._streams) == 2 for log in logs)
        brief = NamespaceTerms(is_kept=False)  # neither published nor read
        caches = sets[0]
        assert caches.hold("c", brief) is not None
        caches.get("c").append([7, 8, 9])
        caches.hold("d")
        caches.hold("e")
        assert set(logs[0].reader._streams) == {stream_key(FINGERPRINT, name) for name in caches.names() if name != "c"}
        assert stored(sets[1], "c") == []
