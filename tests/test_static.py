from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.commands.push import push
from ssd.config import CacheConfig
from ssd.errors import CacheError
from ssd.retrieval import ring as module
from ssd.retrieval import segment as segment_module
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.prebuilt import PrebuiltWriter, load_prebuilt_directory
from ssd.retrieval.segment import unpack
from tests.cache_files import FINGERPRINT, read_cache, write_cache
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture
from tests.reference.retrieval import naive_order


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12), st.integers(40, 60), st.integers(1, 40))
def test_what_is_appended_is_found_in_order_read_in_blocks_of_any_length(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], segment_tokens: int, block_tokens: int
) -> None:
    path = write_cache(tmp_path_factory.mktemp("static"), texts, segment_tokens=segment_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_TOKENS", block_tokens)
        assert read_cache(path) == [text for text in texts if text]
    for segment in load_prebuilt_directory(path, fingerprint=FINGERPRINT):
        assert segment.start is None and len(segment) <= segment_tokens
        assert segment.order.tolist() == naive_order(segment.tokens.tolist())


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_added_to_a_servers_directory_leaves_all_that_it_learned(tmp_path: Path, fails: bool) -> None:
    def served() -> CacheManager:
        return CacheManager(CacheConfig(directory=tmp_path), FINGERPRINT, inline=True)

    path, own = tmp_path / "default", [[1, 2, 3] * 5, [4] * 9]
    with served() as caches:
        for number, text in enumerate(own):
            caches.get().append_replicated([np.array(text, np.int32)], source={"n": number})
            caches.flush()
    with suppress(CacheError), PrebuiltWriter(path, fingerprint=FINGERPRINT) as writer:
        writer.append([7, 8])
        writer.append([-5] if fails else [9])
    texts = [*([] if fails else [[7, 8], [9]]), *own]
    assert read_cache(path) == texts
    for said in ([5] * 9, [6] * 9):
        with served() as caches:
            cache = caches.get()
            assert cache.checkpoint is not None and cache.checkpoint.source == {"n": 1}
            cache.append(said)
        assert cache.stats().num_failures == 0
        texts.append(said)
        assert read_cache(path) == texts


def test_a_push_unpacks_each_token_a_few_times_and_never_many_at_once(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unpacked: list[int] = []

    def counting(packed: Any, num_tokens: int, *more: Any, **options: Any) -> Any:
        unpacked.append(num_tokens)
        return unpack(packed, num_tokens, *more, **options)

    for place in (module, segment_module):
        monkeypatch.setattr(place, "unpack", counting)
    write_cache(tmp_path / "warm", ([number] * 200 for number in range(1000)), segment_tokens=1 << 20)
    push(tmp_path / "warm", redis_server.url, "default")
    assert "pushed 200,000 tokens in 1,000 sequences" in capsys.readouterr().out
    assert sum(unpacked) <= 3 * 201_000
    assert max(unpacked) <= 1 << 16
