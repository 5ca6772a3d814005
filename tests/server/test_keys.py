"""Keys are apart: what one key's requests left tells another nothing, and nobody reads the keys themselves."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.admission.tenant_config import read_key_file
from server.command.arguments import parse_arguments
from server.command.start import make_settings, make_tenants
from ssd.errors import ConfigError
from tests.server.bundled_engine import load_plain
from tests.server.client import ask, bearer, get, post, until_ready
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.server.test_process import ROOT, SMALL, running
from tests.waiting import PATIENCE_S

KEYS = ("alices-key", "bobs-key")
PROC = Path("/proc/self/cmdline")


# -- reuse -------------------------------------------------------------------------------------------------------------


def cached(server: RunningServer, key: str, prompt: str, **fields: Any) -> int:
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = post(server.port, "/v1/completions", asked, headers=bearer(key))
    number: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_keys_and_values_are_reused_within_one_key_only() -> None:
    with serving(load_plain, api_keys=KEYS) as server:
        prompt = "def add(a, b):\n    return a + b\n" * 3
        assert [cached(server, key, prompt) > 0 for key in (*KEYS, *KEYS)] == [False, False, True, True]
        salted = [cached(server, key, prompt, cache_salt="same") > 0 for key in (*KEYS, *KEYS)]
        assert salted == [False, False, True, True]


def test_the_operator_may_share_them() -> None:
    with serving(load_plain, api_keys=KEYS, share_prefix_cache=True) as server:
        prompt = "import os\n" * 8
        assert [cached(server, key, prompt) > 0 for key in KEYS] == [False, True]


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_only_what_watches_the_service_answers_without_a_key() -> None:
    with serving(lambda _: FailingEngine(), api_keys=KEYS) as server:
        closed = [
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/no/such/path"),
            ("POST", "/tokenize/"),
            ("GET", "//v1/models"),
        ]
        for method, path in closed:
            for headers in (
                {},
                bearer("wrong"),
                {"authorization": f"Basic {KEYS[0]}"},
                bearer(""),
                bearer(KEYS[0][:-1]),
            ):
                answer = ask(server.port, method, path, {}, headers=headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        for key in KEYS:
            assert get(server.port, "/v1/models", headers=bearer(key)).status == 200
            assert post(server.port, "/tokenize", {"prompt": "ab"}, headers=bearer(key)).json["tokens"] == [97, 98]
        for path in ("/health", "/live", "/metrics", "/version", "/openapi.json"):
            assert get(server.port, path).status == 200


# -- where keys come from ----------------------------------------------------------------------------------------------


def test_a_file_holds_a_key_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("# who: alice\nfirst\n\n  second#2  \n")
    path.chmod(0o600)
    assert read_key_file(path) == ("first", "second#2")
    path.chmod(0o440)  # as Kubernetes mounts a secret
    assert read_key_file(path) == ("first", "second#2")
    assert not caplog.records
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert read_key_file(path) == ("first", "second#2")
    assert "chmod 600" in caplog.text and "first" not in caplog.text
    options = parse_arguments(["--api-key-file", str(path), "--api-key", "third"], {"SSD_API_KEY": "fourth"})
    tenants = make_tenants(options, make_settings(options))
    assert all(tenants.find(key) for key in ("third", "fourth", "first", "second#2")) and not tenants.find("second")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (None, "No such file"),
        (b"", "contains no key"),
        (b"# none\n", "contains no key"),
        (b"good\nb\xc3\xa4d\n", "key 2"),
        (b"\xff\n", "is not a UTF-8 text file"),
        (b"secret\tkey", "key 1"),
    ],
)
def test_a_file_of_no_use_is_explained_without_its_content(tmp_path: Path, content: bytes | None, hint: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=hint) as error:
        read_key_file(path)
    assert "secret" not in str(error.value)


# -- the process list --------------------------------------------------------------------------------------------------


def command_lines(process: subprocess.Popen[bytes]) -> list[bytes]:
    """Of the process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
        parents.setdefault(parent, []).append(int(stat.parent.name))
    family = [process.pid]
    for member in family:
        family += parents.get(member, [])
    return [Path(f"/proc/{member}/{name}").read_bytes() for member in family for name in ("cmdline", "environ")]


@pytest.mark.skipif(not PROC.exists(), reason="needs /proc")
def test_keys_of_the_command_line_are_not_in_the_process_list(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("another-key")
    given = (*SMALL, "--api-key", KEYS[0], f"--api-key={KEYS[1]}", "--api-key-file", str(path))
    with running(*given) as (process, port):
        until_ready(port, process)
        statuses = [get(port, "/v1/models", headers=bearer(key)).status for key in (*KEYS, "another-key", "wrong")]
        assert statuses == [200, 200, 200, 401]
        own_command, _own_environment, *children = command_lines(process)
        hidden = ["--api-key", "*" * len(KEYS[0]), f"--api-key={'*' * len(KEYS[1])}", "--api-key-file", str(path), ""]
        assert own_command.decode().split("\0")[-len(hidden) :] == hidden
        assert not any(key.encode() in text for text in (own_command, *children) for key in KEYS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_key_that_cannot_be_hidden_is_warned_of() -> None:
    code = "from pathlib import Path; Path.open = lambda *_, **__: open('/nowhere/mem');"
    code += "from server.__main__ import hide_keys; hide_keys()"
    arguments = [sys.executable, "-c", code, "x", "--api-key", KEYS[0]]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT)
    assert "--api-key-file" in done.stderr and KEYS[0] not in done.stderr and done.returncode == 0
