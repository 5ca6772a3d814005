"""``ssd-cache follow``: texts come out of KV events as they went in, whatever else is published."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder.__main__ import main
from cache_builder.commands.follow import namespace_of
from cache_builder.following.block_chains import LEAD_IN_TOKENS, MAX_TEXT_TOKENS, BlockChains, FollowedText
from cache_builder.following.follower import FollowCounts, Follower
from cache_builder.following.kv_events import AllCleared, InvalidEvents, StoredBlocks, decode_batch
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, SamplingParams
from ssd.engine import Engine
from ssd.errors import ConfigError
from ssd.replication.replication_log import ReplicationLog
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests import vllm_publisher
from tests.redis_server import RedisServer, redis_server
from tests.sharing_replica import stored
from tests.waiting import PATIENCE_S, wait_until

__all__ = ["redis_server"]

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 4096
BLOCK = 4
CODEC = TextCodec.load(str(MODEL_PATH))


def stored_blocks(text: list[int], begin: int, end: int, **fields: Any) -> dict[str, Any]:
    """Blocks ``begin`` to ``end`` of a text as vLLM publishes them, with hashes of all tokens up to each block."""
    hashes = [hash(tuple(text[: BLOCK * (i + 1)])) & (2**63 - 1) for i in range(-1, end)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes[begin + 1 :],
        "parent_block_hash": hashes[begin] if begin else None,
        "token_ids": text[BLOCK * begin : BLOCK * end],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | fields


def packed(*events: Any) -> bytes:
    return bytes(msgspec.msgpack.encode({"ts": 0.0, "events": list(events)}))


def text_of(seed: int, num_blocks: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, BLOCK * num_blocks).tolist()


# -- messages --------------------------------------------------------------------------------------------------------


def test_maps_and_arrays_say_the_same() -> None:
    text = text_of(1, 6)
    event = stored_blocks(text, 2, 5, lora_name="sql", extra_keys=[["sql", "a salt", ["image", 3]], None, None])
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    names: list[Any] = ["AllBlocksCleared"]
    as_arrays = msgspec.msgpack.encode([0.0, [list(event.values()), list(removed.values()), names], 0])
    for payload in (packed(event, removed, {"type": "AllBlocksCleared"}), as_arrays):
        (blocks, cleared), num_invalid = decode_batch(payload, VOCAB_SIZE)
        assert isinstance(blocks, StoredBlocks) and isinstance(cleared, AllCleared) and num_invalid == 0
        assert blocks.tokens.ravel().tolist() == text[2 * BLOCK : 5 * BLOCK] and len(blocks.hashes) == 3
        assert (blocks.lora, blocks.cache_salt) == ("sql", "a salt") and blocks.parent is not None


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, 3]},
        {"token_ids": [0, 1, 2, VOCAB_SIZE]},
        {"token_ids": [0, 1, 2, -1]},
        {"token_ids": [0, 1, 2, True]},
        {"token_ids": [0, 1, 2, "3"]},
        {"token_ids": "text"},
        {"block_size": 5},
        {"block_hashes": []},
        {"block_hashes": [[1]]},
        {"block_hashes": 7},
        {"block_hashes": [b"x" * 65]},
        {"parent_block_hash": 0.5},
        {"lora_name": "x" * 1000},
        {"extra_keys": [["x" * 1000]]},
        {"type": 3},
    ],
)
def test_what_contradicts_itself_is_counted_and_left_out(change: dict[str, Any]) -> None:
    good = stored_blocks(text_of(1, 1), 0, 1)
    events, num_invalid = decode_batch(packed(good, good | change, good), VOCAB_SIZE)
    assert len(events) == 2 and num_invalid == 1


def test_copies_on_another_medium_and_further_groups_are_left_out() -> None:
    good = stored_blocks(text_of(1, 1), 0, 1)
    assert decode_batch(packed(good | {"token_ids": []}, good | {"group_idx": 1}, {"type": "New"}), VOCAB_SIZE) == (
        [],
        0,
    )


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["BlockStored", "events", "token_ids"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | JUNK.map(msgspec.msgpack.encode) | st.lists(JUNK, max_size=3).map(lambda x: packed(*x)))
def test_any_bytes_are_events_or_invalid(payload: bytes) -> None:
    with suppress(InvalidEvents):
        decode_batch(payload, VOCAB_SIZE)


# -- chains ----------------------------------------------------------------------------------------------------------


def new_part(text: FollowedText, known: int) -> list[int]:
    return text.tokens[known:].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_every_block_is_returned_once_in_its_text(seed: int, num_texts: int) -> None:
    """Conversations that branch off each other, published block by block in any order of requests."""
    choose = random.Random(seed)
    texts: list[list[int]] = []
    for number in range(num_texts):
        shared = choose.choice(texts)[: BLOCK * choose.randint(0, 6)] if texts and choose.random() < 0.6 else []
        texts.append(shared + text_of(seed + number, choose.randint(1, 8)))
    chains, found, now = BlockChains(max_tokens=1 << 20, idle_s=5.0), list[FollowedText](), 0.0
    progress: list[int] = [0] * num_texts
    while any(done < len(text) // BLOCK for done, text in zip(progress, texts, strict=True)):
        number = choose.randrange(num_texts)
        begin = progress[number]
        end = min(len(texts[number]) // BLOCK, begin + choose.choice([1, 1, 3]))
        if end > begin:
            (blocks,), _ = decode_batch(packed(stored_blocks(texts[number], begin, end)), VOCAB_SIZE)
            assert isinstance(blocks, StoredBlocks)
            found += chains.store("p", blocks, now)
            progress[number] = end
        if choose.random() < 0.1:
            now += 6
            found += chains.finished(now)
    found += chains.close()
    assert chains.num_tokens == 0 and chains.num_orphans == 0
    prefixes = {tuple(text[: BLOCK * (i + 1)]) for text in texts for i in range(len(text) // BLOCK)}
    returned = list[tuple[int, ...]]()
    for text in found:
        tokens = text.tokens.tolist()
        (whole,) = {t for t in prefixes if t[-len(tokens) :] == tuple(tokens)} or [()]
        num_new = next(
            n for n in range(BLOCK, len(tokens) + 1, BLOCK) if n == len(tokens) or whole[:-n] in set(returned)
        )
        assert len(tokens) - num_new <= LEAD_IN_TOKENS
        returned += [whole[: len(whole) - num_new + BLOCK * (i + 1)] for i in range(num_new // BLOCK)]
        assert 0 <= text.prompt_length <= len(tokens)
    assert sorted(returned) == sorted(prefixes), "each block of each text, and none twice"


def test_memory_is_bounded_and_endless_texts_are_returned_in_parts() -> None:
    chains, text, num_new = BlockChains(max_tokens=20_000, idle_s=1e9), text_of(3, 10_000), 0
    for number in range(10_000):
        (blocks,), _ = decode_batch(packed(stored_blocks_at(text, number)), VOCAB_SIZE)
        assert isinstance(blocks, StoredBlocks)
        for part in chains.store("p", blocks, 0.0):
            assert len(part.tokens) <= MAX_TEXT_TOKENS + LEAD_IN_TOKENS
            num_new += MAX_TEXT_TOKENS
        assert chains.num_tokens <= 20_000
    (rest,) = chains.close()
    assert num_new + len(rest.tokens) - LEAD_IN_TOKENS == len(text)
    for number in range(10_000):  # many texts that never end
        (blocks,), _ = decode_batch(packed(stored_blocks(text_of(number, 2), 0, 2)), VOCAB_SIZE)
        assert isinstance(blocks, StoredBlocks)
        list(chains.store("p", blocks, 0.0))
        assert chains.num_tokens <= 20_000


def stored_blocks_at(text: list[int], number: int) -> dict[str, Any]:
    """One block with cheap hashes."""
    event = stored_blocks(text[BLOCK * number : BLOCK * (number + 1)], 0, 1)
    return event | {"block_hashes": [number + 1], "parent_block_hash": number or None}


def test_what_follows_a_lost_block_is_dropped_because_its_salt_is_unknown() -> None:
    """Only the first block names the salt, so the rest of a salted text must not become text of the base model."""
    chains, text = BlockChains(max_tokens=1 << 20, idle_s=1.0), text_of(1, 6)
    salted = stored_blocks(text, 0, 1, extra_keys=[["a salt"]])
    found = list[FollowedText]()
    for event in (stored_blocks(text, 1, 2), stored_blocks(text, 2, 3), salted, stored_blocks(text, 1, 2)):
        (blocks,), _ = decode_batch(packed(event), VOCAB_SIZE)
        assert isinstance(blocks, StoredBlocks)
        found += chains.store("p", blocks, 0.0)
    found += chains.close()
    assert [(each.tokens.tolist(), each.cache_salt) for each in found] == [(text[: 2 * BLOCK], "a salt")]
    assert chains.num_orphans == 2


# -- publishers ------------------------------------------------------------------------------------------------------


class Publisher:
    """As vLLM's: three frames a message, and a socket that sends past messages again."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.socket, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        while True:
            self.port = random.randint(20000, 60000)
            with suppress(zmq.ZMQError):
                self.socket.bind(f"tcp://127.0.0.1:{self.port}")
                self.replay.bind(f"tcp://127.0.0.1:{self.port + 1}")
                break
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.past: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, payload: bytes, *, lost: bool = False) -> None:
        if not lost:
            self.socket.send_multipart([b"kv", len(self.past).to_bytes(8, "big"), payload])
        self.past.append(payload)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self.replay.poll(20):
                name, _, first = self.replay.recv_multipart()
                for number in range(int.from_bytes(first, "big"), len(self.past)):
                    self.replay.send_multipart([name, b"", b"kv", number.to_bytes(8, "big"), self.past[number]])
                self.replay.send_multipart([name, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.socket.close(linger=0)
        self.replay.close(linger=0)


@contextmanager
def publishing(count: int = 1) -> Iterator[list[Publisher]]:
    with ExitStack() as resources:
        context = zmq.Context()
        resources.callback(context.destroy, linger=0)
        publishers = [Publisher(context) for _ in range(count)]
        for publisher in publishers:
            resources.callback(publisher.close)
        yield publishers


def follow_until(follower: Follower, is_done: Any) -> FollowCounts:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not is_done(follower.counts):
        follower.run(time.monotonic() + 0.05)
    assert is_done(follower.counts), follower.counts
    return follower.counts


def connected(follower: Follower, publishers: list[Publisher]) -> None:
    """Wait until a message of each publisher has arrived: a subscription takes a moment."""
    seen = -1
    while follower.counts.messages < len(publishers):
        if follower.counts.messages != seen:
            seen = follower.counts.messages
        for publisher in publishers:
            publisher.publish(packed())
        follower.run(time.monotonic() + 0.1)


def test_several_publishers_gaps_garbage_and_a_restart() -> None:
    texts, learned = [text_of(n, 8) for n in range(4)], list[FollowedText]()
    with publishing(2) as publishers:
        endpoints = [publisher.endpoint for publisher in publishers]
        with Follower(endpoints, learned.append, vocab_size=VOCAB_SIZE, idle_s=0.2) as follower:
            connected(follower, publishers)
            for publisher, text in zip(publishers, texts, strict=False):
                publisher.publish(packed(stored_blocks(text, 0, 5)))
                publisher.publish(b"junk")
                publisher.publish(packed(stored_blocks(text, 5, 6), stored_blocks(text, 0, 1) | {"block_size": 9}))
            follow_until(follower, lambda counts: counts.texts == 2)
            publishers[0].publish(packed(stored_blocks(texts[0], 6, 7)), lost=True)
            publishers[0].publish(packed(stored_blocks(texts[0], 7, 8)))
            counts = follow_until(follower, lambda counts: counts.orphaned_events == 1)
            assert counts.lost_messages == 1 and counts.invalid_events == 4
            publishers[1].past.clear()  # it is started again
            publishers[1].publish(packed(stored_blocks(texts[2], 0, 8), {"type": "AllBlocksCleared"}))
            counts = follow_until(follower, lambda counts: counts.texts == 3)
            assert counts.pending_tokens == 6 * BLOCK, "those of the first publisher"
    assert sorted(text.tokens.tolist() for text in learned) == sorted(
        [texts[0][: 6 * BLOCK], texts[1][: 6 * BLOCK], texts[2]]
    )


def test_messages_that_were_missed_are_fetched_again() -> None:
    text, learned = text_of(1, 8), list[FollowedText]()
    with publishing() as (publisher,):
        publisher.publish(packed(stored_blocks(text, 0, 3)))  # before anybody listens
        with Follower(
            [publisher.endpoint], learned.append, vocab_size=VOCAB_SIZE, idle_s=1e9, replay_port=publisher.port + 1
        ) as follower:
            connected(follower, [publisher])
            publisher.publish(packed(stored_blocks(text, 3, 5)), lost=True)
            publisher.publish(packed(stored_blocks(text, 5, 8)))
            counts = follow_until(follower, lambda counts: counts.pending_tokens == len(text))
            assert counts.lost_messages == 0 and counts.replayed_messages >= 2
    assert [each.tokens.tolist() for each in learned] == [text]


@pytest.mark.parametrize(
    "endpoint", ["localhost:5557", "tcp://localhost", "tcp://*:5557", "tcp://a:0", "tcp://a:99999", "ipc://x"]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        Follower([endpoint], lambda _: None, vocab_size=VOCAB_SIZE)


# -- the command -----------------------------------------------------------------------------------------------------


def test_text_arrives_in_directory_and_redis_and_sigterm_ends_it(tmp_path: Path, redis_server: RedisServer) -> None:
    texts = [text_of(n, 10) for n in range(3)]
    with publishing() as (publisher,):
        command = [
            sys.executable,
            "-m",
            "cache_builder",
            "follow",
            publisher.endpoint,
            "--out",
            str(tmp_path / "cache"),
            "--redis",
            redis_server.url,
            "--json",
            "--replay-port",
            str(publisher.port + 1),
        ]
        salt: dict[str, Any] = {"extra_keys": [["secret"], *[None] * 9]}
        adapter: dict[str, Any] = {"lora_name": "sql"}
        for text, fields in zip(texts, (dict[str, Any](), adapter, salt), strict=True):
            publisher.publish(packed(stored_blocks(text, 0, 10, **fields)))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        while "receiving events" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "Traceback" not in log, log
    counts = json.loads(out)
    assert counts["texts"] == 3 and counts["tokens"] == 30 * BLOCK
    names = ["default", namespace_of("default", "sql", None), namespace_of("default", None, "secret")]
    with CacheManager(CacheConfig(directory=tmp_path / "cache"), CODEC.fingerprint) as caches:
        for name, text in zip(names, texts, strict=True):
            assert stored(caches, name) == [text]
    with (
        ReplicationLog(redis_server.url, fingerprint=CODEC.fingerprint, vocab_size=CODEC.vocab_size) as log_of_others,
        CacheManager(CacheConfig(), CODEC.fingerprint, on_open=log_of_others.attach) as caches,
    ):
        caches.get()
        wait_until(lambda: stored(caches) == [texts[0]])


def test_a_command_that_would_store_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["follow", "tcp://localhost:5557"]) == 2
    assert "give --out DIR, --redis URL" in capsys.readouterr().err


# -- vLLM ------------------------------------------------------------------------------------------------------------


RECORDED = Path(__file__).parent / "data" / "vllm_kv_events.json"
"""What vLLM 0.32 published for four requests on a CPU with the bundled model, see `vllm_publisher.py`."""


def whole_blocks(text: list[int]) -> list[int]:
    """What is published of a text: the last token is not computed, and so no block is full with it."""
    return text[: (len(text) - 1) // vllm_publisher.BLOCK * vllm_publisher.BLOCK]


def test_a_recorded_stream_of_vllm_and_an_engine_that_drafts_from_it(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    chains, found = BlockChains(max_tokens=1 << 20, idle_s=1.0), list[FollowedText]()
    for _, payload in recorded["messages"]:
        events, num_invalid = decode_batch(bytes.fromhex(payload), CODEC.vocab_size)
        assert num_invalid == 0
        for event in events:
            assert isinstance(event, StoredBlocks)
            found += chains.store("vllm", event, 0.0)
    found += chains.close()
    *plain, salted = recorded["texts"]
    assert sorted(each.tokens.tolist() for each in found if not each.cache_salt) == sorted(map(whole_blocks, plain))
    assert [(each.tokens.tolist(), each.cache_salt) for each in found if each.cache_salt] == [
        (whole_blocks(salted), "a salt")
    ]
    params = SamplingParams(max_tokens=vllm_publisher.NUM_OUTPUT, temperature=0, ignore_eos=True)
    num_steps = []
    for texts in ([], found):
        with CacheManager(CacheConfig(), CODEC.fingerprint) as caches:
            for text in texts:
                caches.get().append(text.tokens, prompt_length=text.prompt_length)
            engine = Engine.from_pretrained(MODEL_PATH, caches=caches, codec=CODEC)
            steps = 0
            for prompt in vllm_publisher.PROMPTS:
                *_, last = engine.generate([CODEC.encode_prompt(prompt)], params)
                steps += last.stats.num_verify_steps
            num_steps.append(steps)
    assert num_steps[1] < num_steps[0] / 2


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv-vllm").is_dir(), reason="vLLM is not installed: run `make bench-vllm`")
def test_vllm_is_followed_and_evaluated(tmp_path: Path) -> None:
    """Its environment names this process's commands' environment: both read the same events."""
    with publishing() as (free,):
        port = free.port
    written = tmp_path / "texts.json"
    vllm = subprocess.Popen(
        [str(ROOT / ".venv-vllm/bin/python"), "-m", "tests.vllm_publisher", str(MODEL_PATH), str(port), str(written)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = [f"tcp://127.0.0.1:{port}", "--replay-port", str(port + 1), "--minutes", "0.1"]
    try:
        assert vllm.stdout is not None and any("published" in line for line in vllm.stdout)
        assert main(["follow", *address, "--out", str(tmp_path / "cache")]) == 0
        assert main(["evaluate", *address[1:], "--kv-events", address[0], "--json"]) == 0
    finally:
        vllm.communicate("")
    *plain, _ = json.loads(written.read_text())["texts"]
    with CacheManager(CacheConfig(directory=tmp_path / "cache"), CODEC.fingerprint) as caches:
        assert sorted(stored(caches)) == sorted(map(whole_blocks, plain))


def test_live_traffic_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(1, 20)
    with publishing() as (publisher,):
        for number in range(3):
            asked = text_of(number + 10, 2) + text
            publisher.publish(packed(stored_blocks(asked, 0, 2)))
            for begin in range(2, 22):
                publisher.publish(packed(stored_blocks(asked, begin, begin + 1)))
        options = ["evaluate", "--kv-events", publisher.endpoint, "--replay-port", str(publisher.port + 1)]
        assert main([*options, "--minutes", "0.05", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["requests"] == 3 and report["inputs"] == [publisher.endpoint]
    assert main(["evaluate", "log.jsonl", "--kv-events", "tcp://localhost:1"]) == 2
    assert main(["evaluate"]) == 2
    assert capsys.readouterr().err.count("give log files or --kv-events") == 2
