"""``ssd-cache redis-status``: what it says of a real server, of a hostile one and of a user without rights."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.__main__ import main
from cache_builder.commands.options import escape_value
from cache_builder.commands.push import push
from cache_builder.commands.redis_status import as_text, read_status
from ssd.errors import StoreUnavailable
from ssd.replication.connection import connect
from ssd.replication.entry import stream_key
from ssd.replication.redis_stream import FIELD
from tests.cache_files import write_cache
from tests.redis_server import RedisServer, redis_server
from tests.sharing_replica import FINGERPRINT, KEY, entry, eventually, replica
from tests.test_topologies import liar, nonsense

__all__ = ["redis_server"]  # the fixture


def test_it_says_what_is_there_and_changes_nothing(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(write_cache(tmp_path / "warm", [[1, 2, 3]] * 3), redis_server.url, "pushed")
    with closing(connect(redis_server.url)) as client, replica(redis_server.url) as one:
        for number in range(200):
            one.append([7, number])
        eventually(lambda: client.xlen(KEY) == 200)
        client.set(KEY + ":head", b"of a former version")
        client.hset("ssd:1:generations", "a", 3)
        before = {key: client.dump(key) for key in client.scan_iter()}
        assert main(["redis-status", "--redis", redis_server.url, "--json"]) == 0
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert {key: client.dump(key) for key in client.scan_iter()} == before
    spaces = {space["namespace"]: space for space in said["namespaces"]}
    default = spaces["default"]
    assert said["report"] == "redis-status" and set(spaces) == {"default", "pushed"}
    assert (default["entries"], default["tokens"], default["invalid_entries"]) == (200, 400, 0)
    assert [len(each) for each in default["writers"]] == [16] and 0 <= default["newest_age_s"] <= default[
        "oldest_age_s"
    ] < 60
    assert default["bytes"] > 200 and spaces["pushed"]["writers"] == ["ssd-cache push"]
    assert said["generations"] == 1
    assert said["servers"][0]["role"] == "master" and said["warnings"] == []
    text = as_text(said)
    assert "200 entries, about 400 tokens" in text


def test_what_a_user_may_not_ask_is_unknown(redis_server: RedisServer) -> None:
    with closing(connect(redis_server.url)) as client:
        client.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~ssd:*", "+ping")
    status = read_status(redis_server.url.replace("//", "//guest:pw@"))
    assert "+scan" in status["warnings"][0] and status["namespaces"] == [] and status["generations"] is None
    assert "unknown: NoPermissionError" in as_text(status)


def test_a_policy_that_drops_keys_is_warned_of(redis_server: RedisServer) -> None:
    with closing(connect(redis_server.url)) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert read_status(redis_server.url)["warnings"] == []
        client.config_set("maxmemory", "100mb")
        assert "allkeys-lru" in read_status(redis_server.url)["warnings"][0]


def test_hostile_keys_and_contents_are_shown_escaped_or_left_out(redis_server: RedisServer) -> None:
    with closing(connect(redis_server.url)) as client:
        client.set("ssd:1:{\x1b[31m}", "x")
        client.set(f"ssd:1:{{{FINGERPRINT}:../../etc}}", "x")
        client.set(stream_key(FINGERPRINT, "string"), "x")
        client.xadd(stream_key(FINGERPRINT, "junk"), {FIELD: b"\x1b[2J" * 9})
        client.xadd(stream_key(FINGERPRINT, "large"), {FIELD: bytes(20 << 20)})
        client.xadd(KEY, {FIELD: entry(1)}, id=b"18446744073709551615-1")
        client.set("ssd:1:generations", "no hash")
    status = read_status(redis_server.url)
    spaces = {space["namespace"]: space for space in status["namespaces"]}
    assert set(spaces) == {"string", "junk", "large", "default"}
    assert "WRONGTYPE" in spaces["string"]["error"]
    assert spaces["junk"]["invalid_entries"] == spaces["large"]["invalid_entries"] == 1
    assert status["generations"] is None
    assert as_text(status).replace("\n", "").isprintable()
    json.dumps(status)


@given(st.binary(max_size=150) | st.text(max_size=150))
def test_what_is_shown_is_short_and_printable(value: bytes | str) -> None:
    assert escape_value(value).isprintable() and len(escape_value(value)) <= 120


@pytest.mark.parametrize(
    "form", ["redis://127.0.0.1:{}", "redis-cluster://127.0.0.1:{}", "redis-sentinel://127.0.0.1:{}/s"]
)
def test_a_server_that_answers_nonsense_is_shown_escaped_or_told_in_one_line(form: str) -> None:
    with liar(nonsense()) as port:
        for _ in range(8):
            try:
                assert as_text(read_status(form.format(port))).replace("\n", "").isprintable()
            except StoreUnavailable as error:
                assert str(error).isprintable()
