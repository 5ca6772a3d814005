"""Published text is cut where its content says, is what its name says, and joins a cache without a sequence twice."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder.__main__ import main
from ssd.config import CacheConfig
from ssd.errors import ConfigError
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.cache_state import Checkpoint
from ssd.retrieval.segment import Tokens
from ssd.sharing import reader
from ssd.sharing.connection import connect
from ssd.sharing.entry import all_keys, chunks_key, head_key, lease_key, stream_key
from ssd.sharing.published import published as published_module
from ssd.sharing.published import publisher
from ssd.sharing.published.commands import open_store, pull, push
from ssd.sharing.published.format import (
    LEAST_CHUNK_TOKENS,
    MAX_CHUNK_TOKENS,
    TAG_BYTES,
    ChunkRef,
    Head,
    InvalidChunkError,
    InvalidHeadError,
    cut,
    name_of,
    newest_within,
    owner_of,
    pack_chunk,
    unpack_chunk,
)
from ssd.sharing.published.published import Sharing
from ssd.sharing.published.publisher import Publisher
from ssd.sharing.published.store import open_place, store_at
from tests.redis_server import RedisServer, redis_server
from tests.redis_topologies import Cluster, Watched, started
from tests.reference.chunking import slow_cut
from tests.sharing_replica import FINGERPRINT, VOCAB_SIZE, Replica, eventually, stored

__all__ = ["redis_server"]  # a fixture

OWNER = owner_of(FINGERPRINT, "default")


def texts(seed: int, number: int, longest: int = 400) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, rng.integers(1, longest), np.int32) for _ in range(number)]


@contextmanager
def member(url: str, directory: Path | None = None, *, publishes: bool = True) -> Iterator[Replica]:
    """A replica that publishes from the first token on."""
    with (
        Sharing(url, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE, publishes=publishes, least_tokens=1) as log,
        CacheSet(CacheConfig(directory=directory), FINGERPRINT, inline=True, on_open=log.attach) as caches,
    ):
        yield Replica(caches, log)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is done every few seconds is done at once."""
    monkeypatch.setitem(Publisher.__init__.__kwdefaults__ or {}, "look_s", 0.05)
    monkeypatch.setattr(publisher, "PUBLISH_S", 0.1)
    for name in ("_IDLE_S", "_GAP_LOOK_S", "_LOOK_S"):
        monkeypatch.setattr(published_module, name, 0.1)
    monkeypatch.setattr(reader, "_COMPARE_S", 0.2)


def published(url: str) -> Head | None:
    client = connect(url)
    head = store_at(client, None, FINGERPRINT, "default").head()
    client.close()
    return head


# -- chunks ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(0, 1 << 16), st.integers(1, 60))
def test_a_chunk_is_read_back_as_it_was(seed: int, number: int) -> None:
    sequences = texts(seed, number)
    name, data = name_of(OWNER, sequences), pack_chunk(OWNER, sequences)
    found = unpack_chunk(data, owner=OWNER, name=name, vocab_size=VOCAB_SIZE)
    assert [each.tolist() for each in found] == [each.tolist() for each in sequences]


@settings(max_examples=150)
@given(st.data())
def test_bytes_that_are_no_chunk_are_refused(data: st.DataObject) -> None:
    sequences = texts(0, 3, longest=20)
    name, packed = name_of(OWNER, sequences), bytearray(pack_chunk(OWNER, sequences))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    try:
        found = unpack_chunk(bytes(packed), owner=OWNER, name=name, vocab_size=VOCAB_SIZE)
    except InvalidChunkError:
        return
    assert [each.tolist() for each in found] == [each.tolist() for each in sequences]  # zlib has bits of no meaning


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_whatever_bytes_come_nothing_but_a_refusal_does(data: bytes) -> None:
    for content in (data, pack_chunk(OWNER, texts(1, 2))[:29] + data):
        with pytest.raises(InvalidChunkError):
            unpack_chunk(content, owner=OWNER, name=b"n" * 16, vocab_size=VOCAB_SIZE)


def test_a_chunk_of_another_namespace_or_vocabulary_is_refused() -> None:
    sequences = texts(2, 4)
    data = pack_chunk(OWNER, sequences)
    other = owner_of(FINGERPRINT, "other")
    for owner, name, vocab_size in (
        (other, name_of(OWNER, sequences), VOCAB_SIZE),
        (other, name_of(other, sequences), VOCAB_SIZE),
        (OWNER, name_of(OWNER, sequences), 5),
    ):
        with pytest.raises(InvalidChunkError):
            unpack_chunk(data, owner=owner, name=name, vocab_size=vocab_size)


# -- cutting -----------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 16), st.integers(0, 300))
def test_text_is_cut_as_the_slow_twin_cuts_it(seed: int, number: int) -> None:
    parts = texts(seed, number, longest=4096)
    chunks = list(cut(parts))
    assert [[len(part) for part in chunk] for chunk in chunks] == slow_cut(parts)
    assert all(sum(map(len, chunk)) <= MAX_CHUNK_TOKENS for chunk in chunks)
    assert [part for chunk in chunks for part in chunk] == parts or not parts or len(chunks) > 0


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1 << 16), st.integers(1, 400))
def test_eviction_and_new_text_leave_most_chunks_what_they_were(seed: int, num_gone: int) -> None:
    parts = texts(seed, 6000)  # 1.2M tokens
    before = {name_of(OWNER, chunk) for chunk in cut(parts)}
    after = {name_of(OWNER, chunk) for chunk in cut(parts[num_gone:] + texts(seed + 1, 50))}
    assert len(before & after) >= len(before) - 6
    middle = parts[:3000] + texts(seed + 2, 20) + parts[3000:]
    assert len(before & {name_of(OWNER, chunk) for chunk in cut(middle)}) >= len(before) - 4


def test_text_that_is_said_again_and_again_is_not_cut_at_every_sequence() -> None:
    parts = texts(3, 1, longest=3) * 50_000
    chunks = list(cut(parts))
    assert len(chunks) <= 1 + sum(map(len, parts)) // LEAST_CHUNK_TOKENS


# -- heads -------------------------------------------------------------------------------------------------------------


def a_head() -> Head:
    chunks = tuple(ChunkRef(bytes([number]) * 16, 1000 + number, 500) for number in range(5))
    mark, recent = Checkpoint({"n": 1}, 7), (b"a" * 16, b"b" * 16)
    return Head(owner=OWNER, chunks=chunks, learned=b"l" * 16, mark=mark, recent=recent)


@pytest.mark.parametrize("recent", ["0", "g" * 32, " " * 32, "00" * 16 * 1025, None, 7])
def test_a_head_that_names_no_sequence_ids_is_refused(recent: object) -> None:
    data = a_head().to_bytes()
    body = json.dumps(json.loads(data[TAG_BYTES:]) | {"recent": recent}).encode()
    with pytest.raises(InvalidHeadError):
        Head.from_bytes(b"ssd1 %016x %016x\n" % (xxhash.xxh3_64_intdigest(body, seed=3), 3) + body, owner=OWNER)


def test_a_head_is_read_back_and_no_changed_byte_is() -> None:
    data = a_head().to_bytes()
    assert Head.from_bytes(data, owner=OWNER) == a_head()
    for place in range(0, len(data), 3):
        with pytest.raises(InvalidHeadError):
            Head.from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], owner=OWNER)
    with pytest.raises(InvalidHeadError):
        Head.from_bytes(data, owner=owner_of(FINGERPRINT, "other"))


@settings(max_examples=100)
@given(st.binary(max_size=100))
def test_no_bytes_make_a_head_but_a_heads(data: bytes) -> None:
    with pytest.raises(InvalidHeadError):
        Head.from_bytes(data, owner=OWNER)


def test_the_newest_chunks_that_fit_are_taken() -> None:
    chunks = a_head().chunks
    assert newest_within(chunks, 2008) == chunks[3:] and newest_within(chunks, 2006) == chunks[4:]
    assert newest_within(chunks, 1 << 30) == chunks and newest_within(chunks, 3) == ()


# -- joining -----------------------------------------------------------------------------------------------------------


def test_a_new_replica_joins_with_what_the_log_has_no_more(redis_server: RedisServer) -> None:
    said = [text.tolist() for text in texts(4, 300)]
    with member(redis_server.url) as first:
        first.append(*said[:200])
        first.caches.flush()
        eventually(lambda: published(redis_server.url))
        eventually(lambda: first.log.stats().num_published == 200)
        client = connect(redis_server.url)
        client.xtrim(all_keys(FINGERPRINT, "default")[0], maxlen=10, approximate=False)
        first.append(*said[200:])  # only in the log
        eventually(lambda: first.log.stats().num_published == 300)
        with member(redis_server.url) as second:
            eventually(lambda: len(second.stored()) >= 300)
            time.sleep(1.0)
            assert sorted(second.stored()) == sorted(said)
            eventually(lambda: second.log.stats().num_taken_tokens > 0)
        client.close()


def test_nothing_is_taken_twice_after_a_restart_a_flush_or_a_new_publisher(
    redis_server: RedisServer, tmp_path: Path, hurried: None
) -> None:
    said = [text.tolist() for text in texts(5, 120)]
    with member(redis_server.url, tmp_path / "a") as first:
        with member(redis_server.url, tmp_path / "b") as second:
            first.append(*said[:50])
            second.append(*said[50:100])
            eventually(lambda: len(first.stored()) == len(second.stored()) == 100)
            first.caches.flush()
            second.caches.flush()
            eventually(lambda: published(redis_server.url))
        client = connect(redis_server.url)
        client.flushall()
        first.append(*said[100:])  # the second one is away, and Redis forgets all
        first.caches.flush()
        eventually(lambda: (head := published(redis_server.url)) and head.num_tokens, 20)
        client.close()
        with member(redis_server.url, tmp_path / "b", publishes=False) as second:
            eventually(lambda: len(second.stored()) >= 120)
            time.sleep(1.0)
            assert sorted(second.stored()) == sorted(said)
            assert sorted(first.stored()) == sorted(said)


def test_a_damaged_store_costs_only_what_it_held(redis_server: RedisServer) -> None:
    said = [text.tolist() for text in texts(6, 1000)]
    with member(redis_server.url) as first:
        first.append(*said)
        first.caches.flush()
        eventually(lambda: (head := published(redis_server.url)) and len(head.chunks) > 2)
        client = connect(redis_server.url)
        chunks = chunks_key(FINGERPRINT, "default")
        names = sorted(client.hkeys(chunks))
        client.hset(chunks, names[0], b"garbage")
        client.hdel(chunks, names[1])
        with member(redis_server.url) as second:
            eventually(lambda: second.log.stats().num_taken_tokens)
            kept = second.stored()
            assert 0 < len(kept) < 1000 and all(text in said for text in kept)
        client.set(head_key(FINGERPRINT, "default"), b"ssd1 " + b"0" * 400)
        with member(redis_server.url, publishes=False) as third:
            eventually(lambda: len(third.stored()) == 1000)  # the log has it all
        client.close()


def test_one_publishes_until_it_is_gone_then_another(redis_server: RedisServer, hurried: None) -> None:
    client = connect(redis_server.url)
    with member(redis_server.url) as first, member(redis_server.url) as second:
        first.append([1, 2, 3])
        eventually(lambda: len(second.stored()) == 1)
        first.caches.flush()
        second.caches.flush()
        eventually(lambda: published(redis_server.url))
        eventually(lambda: first.log.stats().num_heads + second.log.stats().num_heads == 1)
        client.set(lease_key(FINGERPRINT, "default"), b"somebody", px=60_000)
        client.delete(head_key(FINGERPRINT, "default"))
        time.sleep(1.0)
        assert published(redis_server.url) is None  # whose lease was lost writes nothing
        client.delete(lease_key(FINGERPRINT, "default"))
        eventually(lambda: published(redis_server.url), 20)
    assert client.get(lease_key(FINGERPRINT, "default")) is None  # given back in order
    client.close()


def test_a_deleted_namespace_leaves_no_key(redis_server: RedisServer) -> None:
    client = connect(redis_server.url)
    keys = all_keys(FINGERPRINT, "tenant")
    with member(redis_server.url) as one:
        one.caches.get("tenant").append(list(range(50)))
        one.caches.flush()
        eventually(lambda: client.exists(*keys) >= 4)
        one.caches.discard("tenant")
        one.log.forget("tenant")
        assert client.exists(*keys) == 0
        time.sleep(2.0)
        assert client.exists(*keys) == 0
    client.close()


def test_what_was_stored_without_threads_is_stored_once(redis_server: RedisServer) -> None:
    with member(redis_server.url) as first:
        first.append(*([1, 2, 3, number] for number in range(40)))
        first.append([1, 2, 3, 0])  # said twice: how often ranks drafts
        first.caches.flush()
        eventually(lambda: published(redis_server.url))
        with member(redis_server.url) as second:
            eventually(lambda: len(second.stored()) >= 41)
            time.sleep(1.0)
            assert sorted(stored(second.caches)) == sorted(first.stored())


# -- purging -----------------------------------------------------------------------------------------------------------


def test_a_purge_is_obeyed_by_servers_that_have_it_open_and_leaves_nothing(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = all_keys(FINGERPRINT, "tenant")
    client = connect(redis_server.url)
    arguments = ["purge", "--namespace", "tenant", "--redis", redis_server.url, "--directory", str(tmp_path)]
    with member(redis_server.url, tmp_path) as one, member(redis_server.url) as other:
        for each in (one, other):
            each.log.obey(each.caches.discard)
            each.caches.get("tenant").append(list(range(each is one, 50)))
            each.caches.flush()
        eventually(lambda: client.exists(*keys) >= 4)
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert "2 servers were told, 0 left" in printed and "nothing is left" in printed
        assert client.exists(*keys) == 0 and not (tmp_path / "tenant").exists()
        assert all(stored(each.caches, "tenant") == [] for each in (one, other))
        assert main(["purge", "--namespace", "default", "--directory", str(tmp_path)]) == 1
        assert "stop that one" in capsys.readouterr().out.lower()
    client.close()


# -- a store without Redis ---------------------------------------------------------------------------------------------


@contextmanager
def store_member(url: str) -> Iterator[tuple[Sharing, CacheSet]]:
    with (
        Sharing(None, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE, publish_to=url, least_tokens=1) as share,
        CacheSet(CacheConfig(), FINGERPRINT, inline=True, on_open=share.attach) as caches,
    ):
        yield share, caches


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_servers_without_redis_begin_with_what_lies_on_a_store(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://{tmp_path}/store"
    said = [text.tolist() for text in texts(8, 100)]
    with store_member(url) as (share, caches):
        for text in said:
            caches.get().append(text)
        caches.flush()
        eventually(lambda: share.stats().num_heads == 1)
    with store_member(url) as (share, caches):
        eventually(lambda: stored(caches) == said)
    with open_store(None, url, FINGERPRINT, "default") as store:
        assert pull(store, tmp_path / "out", fingerprint=FINGERPRINT, namespace="default").num_sequences == 100
        assert push(tmp_path / "out", store, fingerprint=FINGERPRINT).num_sent_bytes == 0  # the same chunks
    with store_member(url) as (_, caches):
        eventually(lambda: sorted(stored(caches)) == sorted(2 * said))
    assert main(["purge", "--namespace", "default", "--store", url]) == 0
    with open_store(None, url, FINGERPRINT, "default") as store:
        assert store.head() is None and not store.names()
    with pytest.raises(ConfigError):
        open_place("nothing-like-this://place")


def test_heads_in_redis_name_chunks_on_a_store(redis_server: RedisServer, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with (
        Sharing(
            redis_server.url, fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE, publish_to=url, least_tokens=1
        ) as log,
        CacheSet(CacheConfig(), FINGERPRINT, inline=True, on_open=log.attach) as caches,
    ):
        caches.get().append([1, 2, 3])
        caches.flush()
        eventually(lambda: published(redis_server.url))
        with open_store(redis_server.url, url, FINGERPRINT, "default") as store:
            assert len(store.names()) == 1
            assert pull(store, tmp_path / "out", fingerprint=FINGERPRINT, namespace="default").num_tokens == 3


def test_a_second_copy_written_after_a_flush_is_known_to_who_joined_by_a_head(
    redis_server: RedisServer, hurried: None
) -> None:
    """A writer that was not told that its entries were taken writes them again; Redis forgot the first copies."""
    client: Any = connect(redis_server.url)
    key = stream_key(FINGERPRINT, "default")
    said = [text.tolist() for text in texts(9, 20)]
    with member(redis_server.url) as second:
        with member(redis_server.url, publishes=False) as first:
            first.append(*said)
            eventually(lambda: len(second.stored()) == 20)
            second.caches.flush()
            eventually(lambda: published(redis_server.url))
            copies = [fields for _, fields in client.xrange(key)]
        client.flushall()
        eventually(lambda: (head := published(redis_server.url)) and head.num_tokens)
        with member(redis_server.url, publishes=False) as third:
            eventually(lambda: third.log.stats().num_taken_tokens)
            for fields in copies:
                client.xadd(key, fields)
            second.append([1, 2, 3])
            eventually(lambda: [1, 2, 3] in third.stored())
            assert sorted(third.stored()) == sorted([*said, [1, 2, 3]])
            with member(redis_server.url, publishes=False) as fourth:
                eventually(lambda: [1, 2, 3] in fourth.stored())
                assert sorted(fourth.stored()) == sorted([*said, [1, 2, 3]])
        assert sorted(second.stored()) == sorted([*said, [1, 2, 3]])
    client.close()


@pytest.mark.parametrize("seed", [3, 4, 8])
def test_second_copies_are_stored_once_whoever_comes_goes_and_forgets(
    redis_server: RedisServer, hurried: None, seed: int
) -> None:
    """Replicas that begin without a directory, a Redis that forgets everything, and entries that are written again."""
    random = np.random.default_rng(seed)
    client: Any = connect(redis_server.url)
    key = stream_key(FINGERPRINT, "default")
    written: list[dict[bytes, bytes]] = []
    with ExitStack() as stack:
        lives = [ExitStack() for _ in range(3)]
        for life in lives:
            stack.callback(life.close)
        replicas = [life.enter_context(member(redis_server.url)) for life in lives]
        for step in range(30):
            number = int(random.integers(3))
            event = random.choice(["say", "say", "again", "again", "seal", "wait", "flush", "restart"])
            if event == "say":
                replicas[number].append(*([10 * step + n, step, number] for n in range(10)))
                eventually(lambda: all(one.log.stats().num_queued == 0 for one in replicas))
                written += [fields for _, fields in client.xrange(key) if fields not in written]
            elif event == "again":
                for fields in written[-int(random.integers(1, 30)) :]:
                    client.xadd(key, fields)
            elif event == "seal":
                replicas[number].caches.flush()
            elif event == "wait":
                time.sleep(float(random.uniform(0, 0.6)))
            elif event == "flush":
                client.flushall()
            else:
                lives[number].close()
                replicas[number] = lives[number].enter_context(member(redis_server.url))
            for one in replicas:
                assert max(Counter(map(tuple, one.stored())).values(), default=1) == 1, (seed, step)
        replicas[0].append([999, 999])
        eventually(lambda: all([999, 999] in one.stored() for one in replicas))
        for one in replicas:
            assert max(Counter(map(tuple, one.stored())).values()) == 1
    client.close()


# -- in any order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_after_any_order_of_events_no_sequence_is_there_twice(
    redis_server: RedisServer, tmp_path: Path, hurried: None, seed: int
) -> None:
    """Two replicas that come, go, crash and fall behind, and a Redis that forgets its log, its heads or everything."""
    random = np.random.default_rng(seed)
    client = connect(redis_server.url)
    keys = all_keys(FINGERPRINT, "default")
    said = 0

    def check(one: Replica) -> None:
        counts = Counter(map(tuple, one.stored()))
        assert not counts or max(counts.values()) == 1

    with ExitStack() as stack:
        lives = [ExitStack(), ExitStack()]
        for life in lives:
            stack.callback(life.close)
        directories = [tmp_path / "0", tmp_path / "1"]
        replicas = [
            life.enter_context(member(redis_server.url, directory))
            for life, directory in zip(lives, directories, strict=True)
        ]
        for _ in range(25):
            number = int(random.integers(2))
            event = random.choice(["say", "say", "say", "seal", "wait", "restart", "crash", "trim", "flush", "heads"])
            if event == "say":
                replicas[number].append(*([said + n, *[7] * int(random.integers(1, 60))] for n in range(10)))
                said += 10
            elif event == "seal":
                replicas[number].caches.flush()
            elif event == "wait":
                time.sleep(float(random.uniform(0, 0.8)))
            elif event in ("restart", "crash"):
                if event == "crash":
                    crashed = directories[number].with_name(f"{directories[number].name}x")
                    shutil.copytree(directories[number], crashed)
                    directories[number] = crashed
                lives[number].close()
                lives[number] = life = ExitStack()
                stack.callback(life.close)
                replicas[number] = life.enter_context(member(redis_server.url, directories[number]))
            elif event == "trim":
                client.xtrim(keys[0], maxlen=int(random.integers(10)), approximate=False)
            elif event == "flush":
                client.flushall()
            else:
                client.delete(*random.choice(keys[1:], 2).tolist())
            for one in replicas:
                check(one)
        for one in replicas:
            one.append([999 - replicas.index(one), 5, 5])
            one.caches.flush()
        eventually(lambda: all([999, 5, 5] in one.stored() and [998, 5, 5] in one.stored() for one in replicas))
        time.sleep(1.0)
        for one in replicas:
            check(one)
            assert one.log.stats().num_invalid == 0
    client.close()


@pytest.mark.parametrize("form", ["cluster", "sentinels"])
def test_a_replica_joins_through_a_cluster_and_through_sentinels(tmp_path: Path, form: str) -> None:
    servers = Cluster(tmp_path, has_replicas=False) if form == "cluster" else Watched(tmp_path)
    said = [text.tolist() for text in texts(9, 60)]
    with started(servers), member(servers.url) as first:
        first.append(*said)
        first.caches.flush()
        eventually(lambda: published(servers.url), 30)
        with member(servers.url) as second:
            eventually(lambda: second.log.stats().num_taken_tokens and sorted(second.stored()) == sorted(said))
