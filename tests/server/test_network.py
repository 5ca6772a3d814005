"""Where the service listens: TLS, Unix sockets, below a path, for pages of other sites."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from server.command.arguments import parse_arguments
from server.command.listen import listen, remove_socket_file
from server.command.options import NetworkOptions
from ssd.errors import ConfigError
from tests.server.client import Answer, ask, get, post
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.waiting import PATIENCE_S

KEY = {"authorization": "Bearer sesame"}
COMPLETION: Any = {"prompt": "abc", "max_tokens": 3}


def network(*words: str) -> NetworkOptions:
    return parse_arguments(["--port", "0", *words], {}).network


# TLS


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def make_certificate(certificate: Path, key: Path, *words: str | Path) -> None:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    openssl("req", "-x509", *curve, "-keyout", key, "-out", certificate, *words)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """An authority that signed itself, and a client's certificate that it signed."""
    directory = tmp_path_factory.mktemp("tls")
    found = SimpleNamespace(
        certificate=directory / "server.pem",
        key=directory / "server.key",
        client=directory / "client.pem",
        client_key=directory / "client.key",
    )
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    for certificate, key, more in (
        (found.certificate, found.key, names),
        (found.client, found.client_key, ["-subj", "/CN=a", "-CA", str(found.certificate), "-CAkey", str(found.key)]),
    ):
        make_certificate(certificate, key, "-nodes", "-days", "2", *more)
    return found


def trusting(files: SimpleNamespace) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.certificate))


def test_openais_client_talks_tls(files: SimpleNamespace) -> None:
    options = network("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key))
    with serving(lambda _: FailingEngine(), network=options) as server:
        web = openai.DefaultHttpxClient(verify=trusting(files))
        with (
            web,
            openai.OpenAI(
                base_url=f"https://127.0.0.1:{server.port}/v1", api_key="none", http_client=web, max_retries=0
            ) as client,
        ):
            whole = client.completions.create(model="test-model", prompt="abc", max_tokens=3)
            assert whole.choices[0].text == "cba"
            chunks = list(client.completions.create(model="test-model", prompt="abc", max_tokens=3, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == "cba"
        with pytest.raises((http.client.HTTPException, OSError)):
            get(server.port, "/live", timeout=5)  # plain text


def test_certificates_of_clients_can_be_required(files: SimpleNamespace) -> None:
    options = network(
        "--ssl-certfile",
        str(files.certificate),
        "--ssl-keyfile",
        str(files.key),
        "--ssl-ca-certs",
        str(files.certificate),
        "--ssl-cert-reqs",
        "2",
    )

    def status(context: ssl.SSLContext, port: int) -> int:
        with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)) as connection:
            connection.request("GET", "/live")
            return connection.getresponse().status

    with serving(lambda _: FailingEngine(), network=options) as server:
        with pytest.raises(OSError):
            status(trusting(files), server.port)
        context = trusting(files)
        context.load_cert_chain(files.client, files.client_key)
        assert status(context, server.port) == 200


# Places


def unix_get(path: Path, target: str) -> Answer:
    connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_S)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closing(connection):
        connection.sock.connect(str(path))
        connection.request("GET", target)
        return Answer(connection.getresponse())


def test_a_unix_socket_is_listened_on_and_taken_over_once_nobody_does(tmp_path: Path) -> None:
    path = tmp_path / "ssd.sock"
    options = network("--uds", str(path))
    for _ in range(2):  # the second time the path is there, and nobody behind it
        with serving(lambda _: FailingEngine(), network=options):
            assert unix_get(path, "/health").status == 200
            assert unix_get(path, "/v1/models").json["data"][0]["id"] == "test-model"
            with pytest.raises(ConfigError, match="choose another path"):
                listen(options)
    remove_socket_file(options)
    assert not path.exists()


# Below a path


@pytest.fixture(scope="module")
def below() -> Iterator[RunningServer]:
    with serving(
        lambda _: FailingEngine(), root_path="/llm", api_keys=("sesame",), allowed_origins=("https://a.example",)
    ) as server:
        yield server


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_requests_come_with_the_path_and_without(below: RunningServer, prefix: str) -> None:
    assert get(below.port, f"{prefix}/health").status == 200
    assert get(below.port, f"{prefix}/v1/models").status == 401
    assert get(below.port, f"{prefix}/v1/models", headers=KEY).json["data"][0]["id"] == "test-model"
    assert post(below.port, f"{prefix}/v1/completions", COMPLETION, headers=KEY).json["choices"][0]["text"] == "cba"
    assert get(below.port, f"{prefix}/openapi.json").json["servers"] == [{"url": "/llm"}]
    assert b'href="openapi.json"' in get(below.port, f"{prefix}/docs").content
    assert get(below.port, f"{prefix}/docs/docs.js").status == 200


@pytest.mark.parametrize("path", ["/llmhealth", "/llm/llm/health", "/other/health", "/llm/health/v1/models"])
def test_no_path_opens_more_than_its_own(below: RunningServer, path: str) -> None:
    assert get(below.port, path).status == 401
    assert get(below.port, path, headers=KEY).status == 404


# Pages of other sites


def preflight(port: int, origin: str) -> Answer:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    return ask(port, "OPTIONS", "/v1/chat/completions", headers=asked)


def test_named_sites_may_call_and_others_may_not(below: RunningServer) -> None:
    allowed = preflight(below.port, "https://a.example")
    assert allowed.status == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    assert "access-control-allow-origin" not in preflight(below.port, "https://b.example").headers
    refused = get(below.port, "/v1/models", headers={"origin": "https://a.example"})
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    stranger = get(below.port, "/v1/models", headers={"origin": "https://b.example", **KEY})
    assert "access-control-allow-origin" not in stranger.headers


def test_a_key_of_another_certificate_is_refused_at_the_start(
    files: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        network("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.client_key))
    assert "cannot be used for TLS" in capsys.readouterr().err


def test_without_the_option_no_page_of_another_site_may_call() -> None:
    with serving(lambda _: FailingEngine()) as server:
        answer = get(server.port, "/v1/models", headers={"origin": "https://a.example"})
        assert answer.status == 403 and "access-control-allow-origin" not in answer.headers
        assert json.loads(preflight(server.port, "https://a.example").content)["error"]["type"]
