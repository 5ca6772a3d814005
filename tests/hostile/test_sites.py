"""Pages of other sites, in a browser on a machine that reaches a server without keys: they neither ask nor read."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.server.client import Answer, bearer
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.waiting import PATIENCE_S

BODY = json.dumps({"prompt": "abc", "max_tokens": 3})
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    names = ("ssd.example.com", "*.svc.cluster.local", "proxy:8443")
    with serving(
        lambda _: FailingEngine(), host="my-machine", allowed_hosts=names, allowed_origins=("https://a.example",)
    ) as running:
        yield running


def ask(port: int, method: str, path: str, headers: dict[str, str], body: str | None = None) -> Answer:
    """One request with these headers alone; the host is 127.0.0.1 unless they name another."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            if value != "none":
                connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(None if body is None else body.encode())
        return Answer(connection.getresponse())


KNOWN = [
    "none",
    "",
    "localhost",
    "LOCALHOST:8000",
    "ssd.localhost:1",
    "127.0.0.1",
    "127.0.0.1:8000",
    "10.1.2.3:80",
    "[::1]:8000",
    "[2001:db8::1]",
    "my-machine:8000",
    "My-Machine.",
    "ssd.example.com",
    "proxy",
    "ssd.default.svc.cluster.local:8000",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil-ssd.example.com",
    "ssd.example.com.evil.example",
    "svc.cluster.local.evil.example",
    "svc.cluster.local",
    "localhost@evil.example",
    "[::1].evil.example",
    "127.0.0.1:8000@evil.example",
    "my-machine.evil.example",
    "*",
    "xlocalhost",
    "[evil.example]",
]


@pytest.mark.parametrize("host", KNOWN)
def test_a_server_without_keys_is_called_by_its_names(server: RunningServer, host: str) -> None:
    assert ask(server.port, "GET", "/version", {"host": host}).status == 200
    assert ask(server.port, "POST", "/v1/completions", {"host": host, **JSON}, BODY).status == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", ["/version", "/ui/stats", "/", "/v1/models", "/live", "/metrics", "/v1/models/"])
def test_and_by_no_other_that_a_page_can_lead_to_it(server: RunningServer, host: str, path: str) -> None:
    answer = ask(server.port, "GET", path, {"host": host})
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in answer.error["message"] and "location" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000", "host": "localhost:8000"},
        {"origin": "http://localhost", "host": "localhost:8000"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "https://a.example.evil.example"},
        {"origin": "http://a.example"},
        {"origin": "127.0.0.1"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_no_page_of_another_site_may_ask(server: RunningServer, headers: dict[str, str]) -> None:
    for method, body in (("POST", BODY), ("GET", None)):
        path = "/v1/completions" if body else "/ui/stats"
        answer = ask(server.port, method, path, {**headers, **JSON}, body)
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert "--allowed-origins" in answer.error["message"]
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000", "sec-fetch-site": "same-origin"},
        {"origin": "https://ssd.example.com", "host": "ssd.example.com"},  # a proxy encrypts
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"origin": "https://a.example", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    ],
)
def test_its_own_page_a_named_site_and_programs_may(server: RunningServer, headers: dict[str, str]) -> None:
    assert ask(server.port, "POST", "/v1/completions", {**headers, **JSON}, BODY).status == 200
    assert ask(server.port, "GET", "/ui/stats", headers).status == 200


def test_a_link_on_another_site_leads_to_the_page(server: RunningServer) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert ask(server.port, "GET", "/", headers).status == 200
    assert ask(server.port, "POST", "/v1/completions", {**headers, **JSON}, BODY).status == 403


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("none", 200),
        ("text/plain", 415),
        ("text/plain;application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
        ("application/json-patch+json", 415),
    ],
)
def test_a_body_that_a_page_can_send_unasked_is_not_taken_for_json(
    server: RunningServer, kind: str, status: int
) -> None:
    answer = ask(server.port, "POST", "/v1/completions", {"content-type": kind}, BODY)
    assert answer.status == status
    assert status == 200 or "content-type: application/json" in answer.error["message"]


def test_with_keys_the_key_alone_decides() -> None:
    given: dict[str, Any] = {"host": "evil.example", "origin": "https://evil.example", "content-type": "text/plain"}
    with serving(lambda _: FailingEngine(), api_keys=("secret",)) as server:
        assert ask(server.port, "POST", "/v1/completions", given, BODY).status == 401
        assert ask(server.port, "POST", "/v1/completions", {**given, **bearer("secret")}, BODY).status == 200


def test_every_name_and_site_can_be_allowed() -> None:
    given = {"host": "any.example", "origin": "https://evil.example", **JSON}
    with serving(lambda _: FailingEngine(), allowed_hosts=("*",), allowed_origins=("*",)) as server:
        assert ask(server.port, "POST", "/v1/completions", given, BODY).status == 200
