"""Work before a slot is given: it is counted, refused before it is done where it can be, and done in turn."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from server.admission.quotas import Account
from server.base.limits import Limits
from server.observe.metrics import ServerMetrics
from tests.server.client import ask, bearer, post
from tests.server.failing_engine import CharCodec, FailingEngine, RunningServer, serving
from tests.server.test_tenants import quota_server, tenants_in
from tests.waiting import wait_until

WRONG: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/completions", b"{"),
    ("POST", "/tokenize", {"prompt": "x"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("DELETE", "/v1/cache", None),
    ("GET", "/admin/tenants", None),
]


@pytest.mark.parametrize(("method", "path", "body"), WRONG)
def test_what_fails_or_makes_no_text_is_counted_too(method: str, path: str, body: Any, tmp_path: Path) -> None:
    with quota_server(tmp_path) as (server, _):
        answers = [ask(server.port, method, path, body, headers=bearer("rated-key")) for _ in range(4)]
        assert 429 not in [answer.status for answer in answers[:2]]  # the key may send two a minute
        assert [answer.status for answer in answers[2:]] == [429, 429]
        assert post(server.port, "/v1/completions", {"prompt": "x"}, headers=bearer("bobs-key")).status == 200


def test_a_clock_that_jumps_gives_no_tenant_another_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quota_server(tmp_path) as (server, _):
        statuses = []
        for now in (1e9, 9e9, 0.0, 1e9):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            answer = post(server.port, "/v1/completions", {"prompt": "x"}, headers=bearer("rated-key"))
            statuses.append(answer.status)
        assert statuses == [200, 200, 429, 429]  # the key may send two a minute


def test_one_tenants_slow_bodies_leave_room_for_anothers(tmp_path: Path) -> None:
    engine, limits = FailingEngine(), Limits(max_bodies_bytes=1_000_000, max_body_bytes=300_000)
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "x" * 200_000}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer bobs-key\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with serving(lambda _: engine, tenants=tenants_in(tmp_path), limits=limits) as server, ExitStack() as opened:
        for _ in range(8):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            with suppress(OSError):  # it is refused, and need not be read
                connection.sendall(head.encode() + body[:-1])
        time.sleep(0.3)
        answer = post(server.port, "/v1/completions", body, headers=bearer("alices-key"))
        assert answer.status != 503, answer.error


def test_long_answers_that_nobody_takes_leave_room_for_others(tmp_path: Path) -> None:
    """Clients that ask and do not read; what the system takes of an answer for them is not the server's memory."""
    text = "\u20ac" * 250_000  # some 4 MB of token ids and texts
    body = json.dumps({"prompt": text, "return_token_strs": True}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nauthorization: Bearer "
    limits = Limits(max_answers_bytes=16 << 20)
    with (
        serving(lambda _: FailingEngine(), tenants=tenants_in(tmp_path), limits=limits) as server,
        ExitStack() as stack,
    ):

        def ask_slowly(key: str) -> bytes:
            """The beginning of an answer of which no more is read."""
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(f"{head}{key}\r\n\r\n".encode() + body)
            return connection.recv(12)

        greedy = [ask_slowly("bobs-key") for _ in range(8)]
        assert b"HTTP/1.1 200" in greedy and greedy[-1] == b"HTTP/1.1 503"
        assert ask_slowly("alices-key") == b"HTTP/1.1 200"


class WatchedCodec(CharCodec):
    """Notes what it is given, and waits with it; its tokens are few."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.may_go_on = threading.Event()

    def encode_completion(self, text: str) -> list[int]:
        return [ord(character) for character in text[:8]]

    def encode_prompt(self, text: str) -> list[int]:
        self.given.append(text)
        assert self.may_go_on.wait(20)
        return self.encode_completion(text)


@contextmanager
def watched_server(directory: Path) -> Iterator[tuple[RunningServer, WatchedCodec]]:
    engine, codec = FailingEngine(), WatchedCodec()
    engine.codec = codec
    with serving(lambda _: engine, tenants=tenants_in(directory)) as server:
        yield server, codec


def test_who_reads_metrics_without_a_key_keeps_no_tenant_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, begun = threading.Event(), threading.Event()

    def slow(_metrics: ServerMetrics) -> bytes:
        begun.set()
        assert may_go_on.wait(20)
        return b"x 1\n"

    monkeypatch.setattr(ServerMetrics, "exposition", slow)
    engine = FailingEngine()
    with serving(lambda _: engine, tenants=tenants_in(tmp_path)) as server, ThreadPoolExecutor(24) as strangers:
        asked = [strangers.submit(ask, server.port, "GET", "/metrics") for _ in range(24)]
        assert begun.wait(20)
        told = post(server.port, "/tokenize", {"prompt": "abc"}, headers=bearer("alices-key"))  # is written aside too
        assert told.json["count"] == 3
        may_go_on.set()
        statuses = [each.result().status for each in asked]
        assert {*statuses} <= {200, 503} and statuses.count(200) >= 17  # one is read, 16 wait


def test_choices_that_no_key_may_have_are_refused_before_their_prompts_are_tokenised(tmp_path: Path) -> None:
    with watched_server(tmp_path) as (server, codec):
        body = {"prompt": [" " * 1000] * 78, "max_tokens": 1}
        answer = post(server.port, "/v1/completions", body, headers=bearer("slow-key"))
        assert (answer.status, answer.error["param"]) == (400, "n") and codec.given == []


def test_tenants_have_their_turn_between_others_requests_and_the_prompts_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come: list[str] = []
    check_quota = Account.check_quota

    def noted(account: Account, *numbers: int) -> None:
        come.append(account.name)  # and is in line before anything else runs on the event loop
        check_quota(account, *numbers)

    monkeypatch.setattr(Account, "check_quota", noted)
    with watched_server(tmp_path) as (server, codec), ThreadPoolExecutor(4) as clients:

        def send(prompt: Any, key: str) -> int:
            body = {"prompt": prompt, "max_tokens": 1}
            return post(server.port, "/v1/completions", body, headers=bearer(key)).status

        sent = [clients.submit(send, ["b" + " x" * 10_000] * 2, "bobs-key") for _ in range(3)]
        wait_until(lambda: come == ["bob"] * 3)
        sent.append(clients.submit(send, "a" + " x" * 10_000, "alices-key"))
        wait_until(lambda: come[3:] == ["alice"])
        codec.may_go_on.set()
        assert [each.result() for each in sent] == [200] * 4
        assert "".join(text[0] for text in codec.given) == "bbabbbb"  # one is under way, one is first in line
