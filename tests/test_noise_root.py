"""What coupled noise is made of: given, kept, shared, and never told."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import ConfigError
from ssd.replication.connection import connect
from ssd.replication.noise_secret import KEY, SECRET_BYTES, NoiseSecret, ReplicatedSecret
from tests.redis_server import RedisServer, redis_server
from tests.sharing_replica import eventually
from tests.waiting import PATIENCE_S

__all__ = ["redis_server"]  # the fixture


def test_a_root_of_a_secret_or_a_seed_is_that_of_no_other() -> None:
    def roots() -> list[NoiseSecret]:
        secrets, seeds = (b"a" * 16, b"b" * 16), (0, -1)
        return [*map(NoiseSecret.from_secret, secrets), *map(NoiseSecret.from_seed, seeds)]

    assert [root() for root in roots()] == [root() for root in roots()]
    assert len({root() for root in roots()}) == 4
    assert [root.source for root in roots()] == ["secret", "secret", "seed", "seed"]
    assert NoiseSecret.load_or_create(None)() != NoiseSecret.load_or_create(None)()


def test_a_root_is_kept_for_its_owner_alone_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "cache" / ".ssd" / "noise"
    made = NoiseSecret.load_or_create(path)
    assert (
        made.source == "directory"
        and NoiseSecret.load_or_create(path)() == made() != NoiseSecret.load_or_create(tmp_path / "other")()
    )
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    made.adopt(b"r" * SECRET_BYTES)
    assert NoiseSecret.load_or_create(path)() == made() == b"r" * SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [*path.parent.iterdir()] == [path]


def test_processes_that_begin_at_once_keep_one_root(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(NoiseSecret.load_or_create(tmp_path / ".ssd" / "noise")()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


@given(content=st.binary(max_size=80) | st.binary(min_size=64, max_size=64))
def test_a_file_of_any_bytes_is_a_root_or_one_line(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("noise") / "noise"
    path.write_bytes(content)
    path.chmod(0o600)
    is_root = len(content) == 64 and not set(content) - set(b"0123456789abcdef")
    try:
        assert NoiseSecret.load_or_create(path)() == bytes.fromhex(content.decode()) and is_root
    except ConfigError as error:
        assert not is_root
        assert str(path) in str(error) and "remove it" in str(error) and "\n" not in str(error)


def test_what_is_no_file_is_said_and_never_waited_for(tmp_path: Path) -> None:
    for path in (tmp_path / "pipe", tmp_path / "directory"):
        os.mkfifo(path) if path.name == "pipe" else path.mkdir()
        with pytest.raises(ConfigError, match="remove it"):
            NoiseSecret.load_or_create(path)


def test_where_nothing_can_be_kept_the_root_is_of_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    root = NoiseSecret.load_or_create(tmp_path / "file" / "noise")
    assert root.source == "memory" and "cannot be stored" in caplog.text


def test_a_root_is_told_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "noise"
    root = NoiseSecret.load_or_create(path)
    path.chmod(0o644)
    with caplog.at_level(logging.DEBUG):
        root = NoiseSecret.load_or_create(path)
        first = root()
        root.adopt(b"s" * SECRET_BYTES)
    assert "chmod 600" in caplog.text
    for secret in (first, root()):
        for said in (caplog.text, repr(root), str(root)):
            assert secret.hex() not in said and repr(secret)[2:-1] not in said
    path.write_text(first.hex() + "!")
    with pytest.raises(ConfigError) as caught:
        NoiseSecret.load_or_create(path)
    assert first.hex() not in str(caught.value)


# -- shared ------------------------------------------------------------------------------------------------------------


@contextmanager
def sharing(server: RedisServer, path: Path | None = None) -> Iterator[tuple[NoiseSecret, ReplicatedSecret]]:
    root = NoiseSecret.load_or_create(path)
    shared = ReplicatedSecret(server.url, root)
    try:
        yield root, shared
    finally:
        shared.close()


def test_replicas_agree_and_a_directory_keeps_what_they_agree_on(redis_server: RedisServer, tmp_path: Path) -> None:
    with sharing(redis_server, tmp_path / "one") as (one, a), sharing(redis_server, tmp_path / "two") as (two, b):
        a.wait(PATIENCE_S)
        b.wait(PATIENCE_S)
        assert one() == two() and one.source == two.source == "replicas"
        assert NoiseSecret.load_or_create(tmp_path / "one")() == NoiseSecret.load_or_create(tmp_path / "two")() == one()
    redis_server.kill()
    with sharing(redis_server, tmp_path / "two") as (two, b):
        b.wait(PATIENCE_S)
        assert two() == one() and two.source == "directory" and b.loop.num_failures
    redis_server.start()  # an empty one
    with sharing(redis_server, tmp_path / "one") as (again, a), sharing(redis_server) as (new, b):
        a.wait(PATIENCE_S)
        b.wait(PATIENCE_S)
        eventually(lambda: new() == again())


def test_a_redis_that_comes_later_is_asked_until_it_answers(redis_server: RedisServer) -> None:
    redis_server.kill()
    with sharing(redis_server) as (one, a), sharing(redis_server) as (two, _):
        a.wait(PATIENCE_S)
        own = one()
        assert one.source == "memory" and own != two()
        redis_server.start()
        eventually(lambda: one() == two() and one.source == two.source == "replicas")


def test_a_root_that_redis_lost_is_written_again(redis_server: RedisServer) -> None:
    with sharing(redis_server) as (one, a), closing(connect(redis_server.url)) as client:
        a.wait(PATIENCE_S)
        client.flushall()
        eventually(lambda: client.get(KEY) == one())
        assert not a.loop.num_failures


@pytest.mark.parametrize("hostile", [b"", b"short", b"x" * (SECRET_BYTES + 1), bytes(1 << 24), ["a", "list"]])
def test_whatever_else_is_under_the_key_costs_the_agreement_alone(
    redis_server: RedisServer, hostile: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(connect(redis_server.url)) as client:
        client.rpush(KEY, *hostile) if isinstance(hostile, list) else client.set(KEY, hostile)
        with sharing(redis_server) as (one, a):
            own = one()
            a.wait(PATIENCE_S)
            eventually(lambda: "ssd-share-noise interrupted" in caplog.text)
            assert a.loop.num_failures and one() == own and one.source == "memory" and own.hex() not in caplog.text
            client.delete(KEY)
            eventually(lambda: one.source == "replicas" and client.get(KEY) == own)
