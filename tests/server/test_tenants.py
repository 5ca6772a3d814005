"""Tenants over HTTP: caches apart, quotas that come back, operators, and replicas that forget together."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from server.admission.registry import Tenants
from server.admission.tenant_loader import open_tenants
from server.base.settings import ServerSettings
from ssd.config import IndexConfig
from ssd.engine import Engine
from ssd.replication.connection import connect
from ssd.replication.replication_log import COUNTERS_KEY as COUNTERS
from ssd.retrieval.cache_manager import CacheManager
from tests.redis_server import RedisServer, redis_server
from tests.server.bundled_engine import load_bundled
from tests.server.client import Answer, ask, bearer, get, metric, official_client, post, until_ready, wait_until
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.server.test_process import SMALL, running
from tests.server.test_tenant_rules import SECRET, account_of
from tests.waiting import PATIENCE_S

__all__ = ["redis_server"]  # the fixture

RULES = """
[tenants.alice]
keys = ["alices-key"]
reads_shared = true
cache_tokens = 65536

[tenants.bob]
keys = ["bobs-key"]

[tenants.slow]
keys = ["slow-key"]
max_running = 1
max_waiting = 1

[tenants.rated]
keys = ["rated-key"]
requests_per_minute = 2
tokens_per_minute = 1000

[tenants.ops]
keys = ["ops-key"]
operator = true
"""
PROMPT = "class Queue:\n    def __init__(self):\n"


def write_rules(directory: Path, text: str = RULES) -> Path:
    path = directory / "tenants.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def tenants_in(directory: Path) -> Tenants:
    settings = ServerSettings(model_names=("m",), model="m")
    return open_tenants(settings, SECRET, path=write_rules(directory))


# -- quotas ------------------------------------------------------------------------------------------------------------


@contextmanager
def quota_server(directory: Path, **engine: Any) -> Iterator[tuple[RunningServer, Tenants]]:
    tenants = tenants_in(directory)
    with serving(lambda _: FailingEngine(**engine), tenants=tenants) as server:
        yield server, tenants


def complete(server: RunningServer, key: str, **fields: Any) -> Answer:
    body = {"prompt": "abc", "max_tokens": 2, **fields}
    return post(server.port, "/v1/completions", body, headers=bearer(key))


def test_what_a_tenant_has_used_up_is_its_own_429_and_nobody_elses(tmp_path: Path) -> None:
    with quota_server(tmp_path) as (server, _):
        first = complete(server, "rated-key")
        assert first.status == 200 and first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        assert complete(server, "rated-key").status == 200
        third = complete(server, "rated-key")
        assert (third.status, third.error["code"], third.error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert 1 <= int(third.headers["retry-after"]) <= 31 and third.headers["x-ratelimit-remaining-requests"] == "0"
        assert [complete(server, "bobs-key").status for _ in range(5)] == [200] * 5
        with official_client(server.port, "rated-key") as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="test-model", prompt="abc")
        assert metric(server.port, "ssd:tenant_requests_rejected_total", tenant="rated", reason="requests") == 2
        assert metric(server.port, "ssd:tenant_requests_total", tenant="bob") == 5
        assert metric(server.port, "ssd:tenant_output_tokens_total", tenant="bob") == 10


def test_requests_beyond_a_tenants_slots_and_queue_are_refused_and_others_come_in(tmp_path: Path) -> None:
    with quota_server(tmp_path, step_s=0.02) as (server, tenants):
        account = account_of(tenants, "slow-key")
        options: dict[str, Any] = {"args": (server, "slow-key"), "kwargs": {"max_tokens": 60}}
        several = [threading.Thread(target=complete, **options) for _ in range(2)]
        for thread in several:
            thread.start()
        wait_until(lambda: account.num_in_flight == 2)
        refused_one = complete(server, "slow-key")
        assert (refused_one.status, refused_one.headers["retry-after"]) == (429, "1")
        assert complete(server, "bobs-key").status == 200
        for thread in several:
            thread.join()
        assert account.num_in_flight == 0 and complete(server, "slow-key").status == 200
        too_many = complete(server, "slow-key", n=3)
        assert (too_many.status, too_many.error["param"]) == (400, "n")


def test_every_way_a_request_ends_gives_its_quota_back(tmp_path: Path) -> None:
    with quota_server(tmp_path, step_s=0.005, max_waiting=3) as (server, tenants):
        account = account_of(tenants, "bobs-key")
        assert complete(server, "bobs-key", prompt="x" * 600).status == 400  # too long
        assert complete(server, "bobs-key", n=9).status == 503  # the server is full; nothing is counted
        assert (account.num_in_flight, account.num_requests) == (0, 0)
        wait_until(lambda: complete(server, "bobs-key").status == 200)  # those that were refused have left
        for stream in (True, False):
            with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
                body = {"prompt": "abc", "max_tokens": 500, "stream": stream}
                headers = {"content-type": "application/json", **bearer("bobs-key")}
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                wait_until(lambda: account.num_in_flight == 1)
                if stream:
                    connection.getresponse().read(10)
            wait_until(lambda: account.num_in_flight == 0)
        assert account.num_output_tokens > 0  # what was made for who went away counts too
        complete(server, "bobs-key", stream=True)
        wait_until(lambda: account.num_in_flight == 0)
    with quota_server(tmp_path, fail_at_step=2) as (server, tenants):
        account = account_of(tenants, "bobs-key")
        assert complete(server, "bobs-key").status == 500
        wait_until(lambda: account.num_in_flight == 0)


# -- operators ---------------------------------------------------------------------------------------------------------


def test_only_operators_manage_and_nobody_sees_a_key(tmp_path: Path) -> None:
    with quota_server(tmp_path) as (server, _):
        for method, path in (
            ("GET", "/admin/tenants"),
            ("POST", "/admin/reload"),
            ("DELETE", "/admin/tenants/bob/cache"),
        ):
            assert ask(server.port, method, path).status == 401
            for key in ("alices-key", "bobs-key"):
                answer = ask(server.port, method, path, headers=bearer(key))
                assert (answer.status, answer.error["code"]) == (403, "not_an_operator")
        listed = get(server.port, "/admin/tenants", headers=bearer("ops-key"))
        assert [each["name"] for each in listed.json["data"]] == ["alice", "bob", "ops", "rated", "slow"]
        assert b"-key" not in listed.content
        assert b"-key" not in get(server.port, "/metrics").content
        text = RULES.replace("bobs-key", "bobs-new-key")
        write_rules(tmp_path, text)
        assert ask(server.port, "POST", "/admin/reload", headers=bearer("ops-key")).json["tenants"] == 5
        assert [complete(server, key).status for key in ("bobs-key", "bobs-new-key")] == [401, 200]
        write_rules(tmp_path, text + "[tenants.eve]")
        broken = ask(server.port, "POST", "/admin/reload", headers=bearer("ops-key"))
        assert broken.status == 409 and "tenants.eve.keys" in broken.error["message"]
        assert complete(server, "bobs-new-key").status == 200
    with serving(lambda _: FailingEngine()) as server:  # without keys there are no operators
        for method, path in (("GET", "/admin/tenants"), ("DELETE", "/v1/cache")):
            assert ask(server.port, method, path).status == 403


# -- caches ------------------------------------------------------------------------------------------------------------


def load(resources: ExitStack) -> Engine:
    index = IndexConfig(capacity_tokens=1 << 18, rebuild_interval_s=0.05)
    return load_bundled(resources, index=index, max_num_seqs=3, max_model_len=256)


@pytest.fixture(scope="module")
def cached_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(load, tenants=tenants_in(tmp_path_factory.mktemp("tenants"))) as server:
        yield server


def say(port: int, key: str, **fields: Any) -> None:
    """A request of 60 tokens."""
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
    answer = post(port, "/v1/completions", body, headers=bearer(key))
    assert answer.status == 200, answer.content


def drafted(server: RunningServer, key: str, **fields: Any) -> float:
    """Tokens that were drafted from caches for a request."""
    before = num_drafted(server)
    say(server.port, key, **fields)
    return num_drafted(server) - before


def num_drafted(server: RunningServer) -> float:
    return sum(
        metric(server.port, "ssd:source_draft_tokens_total", source=each) for each in ("prebuilt", "cache", "recent")
    )


def drafts_soon(server: RunningServer, key: str, **fields: Any) -> None:
    """Asks until something is drafted: a cache is opened, and prices are learned, beside the requests."""
    wait_until(lambda: drafted(server, key, **fields) > 0)


def caches_of(server: RunningServer) -> CacheManager:
    caches = server.engine_thread.engine.caches
    assert caches is not None
    return caches


def test_what_one_key_said_is_not_drafted_for_another(cached_server: RunningServer) -> None:
    drafts_soon(cached_server, "bobs-key")
    for key, salt in (("alices-key", "s"), ("bobs-key", "s"), ("bobs-key", "t"), ("ops-key", "s")):
        assert drafted(cached_server, key, cache_salt=salt, ignore_eos=False, max_tokens=8) == 0
    for key in ("alices-key", "slow-key"):
        assert drafted(cached_server, key, max_tokens=8) == 0
    drafts_soon(cached_server, "bobs-key", cache_salt="s")
    assert metric(cached_server.port, "ssd:cache_tokens", namespace="bob") > 60
    assert metric(cached_server.port, "ssd:cache_tokens", namespace="default") == 0


def test_readers_draft_from_what_an_operator_said_and_others_do_not(cached_server: RunningServer) -> None:
    fields = {"prompt": "def mean(values):\n"}
    drafts_soon(cached_server, "ops-key", **fields)
    caches_of(cached_server).flush()
    assert metric(cached_server.port, "ssd:cache_tokens", namespace="default") > 60
    assert metric(cached_server.port, "ssd:cache_shared_tokens", namespace="alice") > 60
    assert metric(cached_server.port, "ssd:cache_shared_tokens", namespace="bob") == 0
    assert drafted(cached_server, "slow-key", **fields, max_tokens=2) == 0
    drafts_soon(cached_server, "alices-key", **fields)


def test_a_deleted_cache_is_drafted_from_no_more(cached_server: RunningServer) -> None:
    fields = {"prompt": "import socket\n\n"}
    for path, key in (("/admin/tenants/bob/cache", "ops-key"), ("/v1/cache", "bobs-key")):
        drafts_soon(cached_server, "bobs-key", **fields)
        drafts_soon(cached_server, "bobs-key", **fields, cache_salt="s")
        answer = ask(cached_server.port, "DELETE", path, headers=bearer(key))
        assert (answer.status, answer.json["deleted"], answer.json["replicas_notified"]) == (200, True, True)
        assert metric(cached_server.port, "ssd:cache_tokens", namespace="bob") == 0
        assert (
            drafted(cached_server, "bobs-key", **fields)
            == drafted(cached_server, "bobs-key", **fields, cache_salt="s")
            == 0
        )


def test_all_keys_share_a_cache_where_the_operator_says_so() -> None:
    with serving(load, api_keys=("a", "b"), share_cache_across_keys=True) as server:
        drafted(server, "a")
        drafts_soon(server, "b")
        assert ask(server.port, "DELETE", "/v1/cache", headers=bearer("a")).status == 409


# -- processes ---------------------------------------------------------------------------------------------------------


def tokens(port: int, tenant: str) -> float:
    """What the cache of a server process holds for a tenant."""
    return metric(port, "ssd:cache_tokens", namespace=tenant)


@pytest.mark.slow
def test_replicas_share_tenant_by_tenant_and_forget_together(tmp_path: Path, redis_server: RedisServer) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    common = ["--redis", redis_server.url, "--secret-file", str(secret), "--tenants", str(write_rules(tmp_path))]
    with ExitStack() as stack:
        started = [
            stack.enter_context(running(*SMALL, *common, "--cache-dir", str(tmp_path / name)))
            for name in ("one", "two")
        ]
        for _, port in started:
            until_ready(port)
        one, two = (port for _, port in started)
        say(two, "bobs-key", prompt="x")  # opens bob's cache there
        say(two, "alices-key", prompt="x")
        before = [tokens(two, "bob"), tokens(two, "alice")]
        say(one, "bobs-key")
        wait_until(lambda: tokens(two, "bob") > before[0] + 60)
        assert tokens(two, "alice") == before[1]
        assert len(redis_keys(redis_server)) == 2
        deleted = ask(one, "DELETE", "/admin/tenants/bob/cache", headers=bearer("ops-key"))
        assert deleted.json["replicas_notified"]
        assert tokens(one, "bob") == 0
        wait_until(lambda: tokens(two, "bob") == 0)
        wait_until(lambda: len(redis_keys(redis_server)) == 1)
        say(two, "bobs-key", prompt="y")
        wait_until(lambda: tokens(one, "bob") == 0)
        for process, _ in started:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        kept = {path.name for name in ("one", "two") for path in (tmp_path / name).iterdir()}
        assert len([name for name in kept if name.startswith("t")]) == 2  # alice's, and bob's new one


def redis_keys(server: RedisServer) -> list[bytes]:
    """All but the counters."""
    client = connect(server.url)
    try:
        found: Any = client.scan_iter()
        return [key for key in found if key != COUNTERS.encode()]
    finally:
        client.close()
