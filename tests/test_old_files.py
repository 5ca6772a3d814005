"""What an earlier commit wrote is read as before: a cache directory with its learned state, and entries in Redis.

`data/cache_of_1d07dee0.tar.xz` was written by that commit (2026-11-28, before most classes were renamed): its engine
completed one prompt twice with the bundled model, with a cache directory and a Redis server.
"""

from __future__ import annotations

import base64
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest
import redis

from cache_builder.__main__ import main
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, SamplingParams
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.engine import Engine
from ssd.replication.replication_log import ReplicationLog
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests.redis_server import RedisServer, redis_server
from tests.sharing_replica import stored
from tests.waiting import wait_until

__all__ = ["redis_server"]

FILES = Path(__file__).parent / "data" / "cache_of_1d07dee0.tar.xz"
PROMPT = "import threading\n\n\nclass Worker"
NUM_OUTPUT = 48
CODEC = TextCodec.load(str(MODEL_PATH))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with tarfile.open(FILES) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def is_the_text(text: list[int]) -> bool:
    prompt = CODEC.encode_prompt(PROMPT)
    return text[: len(prompt)] == prompt and len(text) == len(prompt) + NUM_OUTPUT


def test_a_cache_directory(written: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    config = CacheConfig(directory=written / "cache")
    with caplog.at_level(logging.WARNING), CacheManager(config, CODEC.fingerprint) as caches:
        texts = stored(caches)
        assert len(texts) == 2 and texts[0] == texts[1] and is_the_text(texts[0])
        assert AcceptanceModel.load(caches.get().learned).num_learned > 0
        engine = Engine.from_pretrained(MODEL_PATH, caches=caches, codec=CODEC)
        params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0)
        *_, last = engine.generate([CODEC.encode_prompt(PROMPT)], params)
        assert last.stats.num_verify_steps < NUM_OUTPUT / 3
    assert not caplog.records
    assert main(["inspect", str(written / "cache" / "default"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_entries_in_redis(written: Path, redis_server: RedisServer) -> None:
    streams: dict[str, Any] = json.loads((written / "redis.json").read_text())
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        for key, (_, entries) in streams.items():
            for number, fields in entries:
                client.xadd(key, {name: base64.b64decode(value) for name, value in fields.items()}, number)
    with (
        ReplicationLog(redis_server.url, fingerprint=CODEC.fingerprint, vocab_size=CODEC.vocab_size) as log,
        CacheManager(CacheConfig(), CODEC.fingerprint, on_open=log.attach) as caches,
    ):
        caches.get()
        wait_until(lambda: log.stats().num_received == 2)
        assert log.stats().num_invalid == 0
        texts = stored(caches)
        assert texts and all(map(is_the_text, texts))
