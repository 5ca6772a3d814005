"""Directories of caches: others at work in them, and things in them that are no files."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from server.admission.tenant_loader import load_or_create_secret, open_tenants
from server.base.settings import ServerSettings
from ssd.config import IndexConfig
from ssd.errors import ConfigError
from ssd.retrieval.files import Manifest, Owner, write_manifest
from ssd.retrieval.owners import secret_id
from tests.server.client import ask, metric, post, until_ready
from tests.server.test_process import SMALL, refused, running
from tests.waiting import PATIENCE_S

FINGERPRINT = "0123456789abcdef" * 2
KEY = {"authorization": "Bearer secret"}
STATE = ("secret", "generations.json", "generations.lock")


def open_files() -> list[str]:
    """Names of what this process has open."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(str(descriptor.readlink()))
    return names


@pytest.mark.parametrize("name", STATE)
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    state = tmp_path / "cache" / ".ssd"
    state.mkdir(parents=True)
    os.mkfifo(state / name, 0o600)
    arguments = ["--device", "cpu", "--max-num-seqs", "2", "--cache-dir", str(tmp_path / "cache"), "--api-key"]
    with running(*arguments, "secret") as (process, port):
        if name == "secret":
            assert process.wait(PATIENCE_S) == 2  # without it nothing that was kept could be found
            return
        until_ready(port, process)
        assert post(port, "/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=KEY).status == 200
        assert ask(port, "DELETE", "/v1/cache", headers=KEY).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("interval", [1e300, float("inf"), float("nan"), 0.0, -1.0, 86_401.0])
def test_an_interval_that_no_thread_can_wait_for_is_refused(interval: float) -> None:
    with pytest.raises(ConfigError, match="rebuild_interval_s must be > 0 and at most 86400"):
        IndexConfig(rebuild_interval_s=interval)


def taught(port: int) -> None:
    """Have the key's cache learn something."""
    body = {"prompt": [7, 8, 9] * 20, "max_tokens": 20, "ignore_eos": True}
    assert post(port, "/v1/completions", body, headers=KEY).status == 200


def stopped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_damaged_small_files_end_no_start_and_hide_no_cache_or_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "cache"
    arguments = (*SMALL, "--cache-dir", str(home), "--api-key", "secret")
    secret = home / ".ssd" / "secret"
    with running(*arguments) as (process, port):
        until_ready(port, process)
        assert ask(port, "DELETE", "/v1/cache", headers=KEY).json["deleted"]
        taught(port)
        stopped(process)
    (path,) = home.glob("t*")
    assert list(path.glob("*.seg"))
    whole = secret.read_bytes()
    for content in (None, whole.replace(b"a", b"b", 1), b""):
        secret.unlink(missing_ok=True)
        if content is not None:
            secret.write_bytes(content)
        assert f"{secret} is " in refused(*arguments)
    secret.write_bytes(whole)
    capfd.readouterr()
    for file in (home / ".ssd" / "generations.json", home / "default" / "manifest.json"):
        os.truncate(file, 20)
    with running(*arguments) as (process, port):
        until_ready(port, process)
        assert metric(port, "ssd:cache_failures_total", namespace="default") == 1
        assert ask(port, "DELETE", "/v1/cache", headers=KEY).json["deleted"]
        assert not path.exists()
        stopped(process)
    assert "was recovered from the name" in capfd.readouterr().err


def test_no_deletion_is_answered_while_a_cache_that_nobody_can_name_lies_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home, secret = tmp_path / "cache", tmp_path / "secret"
    secret.write_text("another secret of it")
    secret.chmod(0o600)
    arguments = (*SMALL, "--cache-dir", str(home), "--api-key", "secret")
    with running(*arguments) as (process, port):
        until_ready(port, process)
        taught(port)
        stopped(process)
    (path,) = home.glob("t*")
    with running(*arguments, "--secret-file", str(secret), "--no-speculation") as (process, port):
        until_ready(port, process)
        assert path.name in capfd.readouterr().err
        answer = ask(port, "DELETE", "/v1/cache", headers=KEY)
        assert answer.status == 500 and path.name in answer.json["error"]["message"]
        stopped(process)
    with running(*arguments, "--no-speculation") as (process, port):  # nothing is open, and it goes all the same
        until_ready(port, process)
        assert ask(port, "DELETE", "/v1/cache", headers=KEY).json["deleted"]
        assert not path.exists()


def test_thousands_of_caches_of_tenants_cost_a_start_no_files_and_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    secret, settings = load_or_create_secret(tmp_path), ServerSettings(model_names=("m",), model="m")
    keys = tuple(f"key-{number}" for number in range(2000))
    tenants = open_tenants(settings, secret, keys=keys, cache_directory=tmp_path)
    for name in tenants.labels():
        manifest = Manifest(fingerprint=FINGERPRINT, namespace=name, owner=Owner(secret_id(secret), "0"))
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name, manifest)
    num_open = len(open_files())
    for given in (keys, keys[:1]):  # all have their tenant; all but one have none
        open_tenants(settings, secret, keys=given, cache_directory=tmp_path)
    assert len(open_files()) == num_open and not caplog.records
