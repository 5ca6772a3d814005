"""Starts with certificates that are of no use, and ends by signals while clients ask and harass."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from server.command.arguments import parse_arguments
from tests.hostile.test_attacks import SMALL
from tests.hostile.test_bodies import chunks, head
from tests.server.client import post, until_ready
from tests.server.test_network import make_certificate, openssl
from tests.server.test_process import cache_tokens, running, stopped_line
from tests.waiting import PATIENCE_S, wait_until

# TLS


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys, whole and not."""
    made = tmp_path_factory.mktemp("tls")
    for name, *more in (("a", "-nodes"), ("b", "-nodes"), ("locked", "-passout", "pass:secret")):
        make_certificate(made / f"{name}.pem", made / f"{name}.key", "-subj", "/CN=localhost", *more)
    openssl("req", "-new", "-key", made / "a.key", "-subj", "/CN=localhost", "-out", made / "a.csr")
    openssl(
        "x509", "-req", "-in", made / "a.csr", "-signkey", made / "a.key", "-days", "-1", "-out", made / "expired.pem"
    )
    openssl("x509", "-in", made / "a.pem", "-outform", "der", "-out", made / "a.der")
    (made / "junk").write_bytes(bytes(range(256)) * 9)
    (made / "empty").touch()
    (made / "locked-both.pem").write_bytes((made / "locked.pem").read_bytes() + (made / "locked.key").read_bytes())
    return made


def complaint(directory: Path, certificate: str, key: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ends a start with these files."""
    words = ["--ssl-certfile", str(directory / certificate)]
    with pytest.raises(SystemExit) as ended:
        parse_arguments([*words, *(["--ssl-keyfile", str(directory / key)] if key else [])], {})
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("ssd-serve: error: --ssl-")
    return line


@pytest.mark.parametrize(
    ("certificate", "key", "reason"),
    [
        ("no.pem", "a.key", "there is no such file"),
        ("a.pem", "no.key", "there is no such file"),
        ("", "a.key", "there is no such file"),
        ("a.pem", "", "cannot be used for TLS"),
        ("a.pem", "b.key", "key values mismatch"),
        ("a.pem", "a.pem", "cannot be used for TLS"),
        ("a.key", "a.pem", "cannot be used for TLS"),
        ("a.der", "a.key", "in PEM form"),
        ("junk", "a.key", "in PEM form"),
        ("empty", "", "in PEM form"),
        ("a.pem", "junk", "in PEM form"),
        ("locked.pem", "locked.key", "the key has a password"),
        ("locked-both.pem", "", "the key has a password"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_one_line_at_the_start(
    directory: Path, certificate: str, key: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in complaint(directory, certificate, key, capsys)


def test_a_certificate_that_has_expired_is_one_warning(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def start(certificate: str) -> list[str]:
        caplog.clear()
        files = ("--ssl-certfile", str(directory / certificate), "--ssl-keyfile", str(directory / "a.key"))
        assert parse_arguments(files, {}).network.ssl_certfile is not None
        return [record.getMessage() for record in caplog.records]

    (warning,) = start("expired.pem")
    assert "expired.pem: clients will reject the certificate, certificate has expired" in warning
    assert start("a.pem") == []


# Signals

NUM_CLIENTS = 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_under_load_cuts_no_answer_and_loses_no_text(number: signal.Signals, tmp_path: Path) -> None:
    arguments = (*SMALL, "--cache-dir", str(tmp_path / "cache"))
    with running(*arguments, stderr=subprocess.PIPE) as (process, port), ExitStack() as opened:
        until_ready(port, process)
        is_over = threading.Event()
        came_to: list[tuple[int, int]] = []
        """Status and tokens of every answer; status 0 for none."""

        def ask(client: int) -> None:
            for turn in range(10_000):
                body = {"prompt": f"# {client} {turn}\n", "max_tokens": 24, "ignore_eos": True, "temperature": 1}
                if turn % 2:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                try:
                    answer = post(port, "/v1/completions", body)
                except (ConnectionError, http.client.RemoteDisconnected):  # not one byte of an answer
                    came_to.append((0, 0))
                    return
                if answer.status == 200:
                    usage = (answer.events[-1] if turn % 2 else answer.json)["usage"]
                    came_to.append((200, usage["total_tokens"]))
                else:
                    assert (answer.status, answer.error["code"]) == (503, "not_ready")
                    came_to.append((503, 0))
                    time.sleep(0.02)

        def harass(_: int) -> None:
            while not is_over.is_set():
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
                    connection.sendall(head() + chunks(b" " * 5000, 1))
                    connection.recv(4096)
                time.sleep(0.01)

        for _ in range(50):
            idle = opened.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            idle.sendall(b"GET /live HTTP/1.1\r\nhost: ")
        with ThreadPoolExecutor(NUM_CLIENTS + 4) as pool:
            harassing = [pool.submit(harass, index) for index in range(4)]
            clients = [pool.submit(ask, index) for index in range(NUM_CLIENTS)]
            wait_until(lambda: len(came_to) >= 5 * NUM_CLIENTS)
            process.send_signal(number)
            try:
                _, log = process.communicate(timeout=PATIENCE_S)
                for each in clients:
                    each.result()
            finally:
                is_over.set()
            for each in harassing:
                each.result()
        assert process.returncode == 0
        ended = stopped_line(log.decode())
        assert " 0 were aborted after " in ended and ended.endswith("the cache is flushed"), ended
        assert "Traceback" not in log.decode() and " ERROR " not in log.decode()
    num_tokens = sum(tokens for _, tokens in came_to)
    with running(*arguments) as (process, port):
        until_ready(port, process)
        assert cache_tokens(port) >= num_tokens
