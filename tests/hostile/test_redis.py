"""Redis emptied in the middle of what takes several commands: publishing a text, and joining by it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ssd.sharing.connection import connect
from ssd.sharing.published.store import RedisStore
from tests.redis_server import RedisServer, redis_server
from tests.sharing_replica import eventually
from tests.test_published import hurried, member, published, texts

__all__ = ["hurried", "redis_server"]  # fixtures


@pytest.mark.parametrize("call", ["put", "get"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_flush_in_the_middle_loses_and_doubles_nothing(
    redis_server: RedisServer, hurried: None, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    said = [text.tolist() for text in texts(6, 1000)]
    before = getattr(RedisStore, call)
    client, num_calls = connect(redis_server.url), 0

    def flushed(store: RedisStore, *arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            client.flushall()
        return before(store, *arguments)

    monkeypatch.setattr(RedisStore, call, flushed)
    with member(redis_server.url) as first:
        first.append(*said)
        first.caches.flush()
        eventually(lambda: (head := published(redis_server.url)) and head.num_tokens)
        with member(redis_server.url, publishes=False) as second:
            eventually(lambda: num_calls >= number)
            eventually(lambda: len(second.stored()) >= 1000, 60)
            time.sleep(0.5)
            assert sorted(second.stored()) == sorted(said) == sorted(first.stored())
            assert first.log.stats().num_heads >= 1
    client.close()
