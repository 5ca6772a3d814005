"""The secret of coupled sampling: stored for its owner alone, damaged or missing files, and never in messages."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.command.noise_secret import NoiseSecret
from ssd.errors import ConfigError


def test_a_secret_is_stored_for_its_owner_alone_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "cache" / ".ssd" / "noise"
    made = NoiseSecret.load_or_create(path)
    assert made.source == "directory"
    assert NoiseSecret.load_or_create(path)() == made() != NoiseSecret.load_or_create(tmp_path / "other")()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]


def test_processes_that_start_at_once_store_one_secret(tmp_path: Path) -> None:
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
def test_a_file_with_any_bytes_is_a_secret_or_one_line(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("noise") / "noise"
    path.write_bytes(content)
    path.chmod(0o600)
    is_secret = len(content) == 64 and not set(content) - set(b"0123456789abcdef")
    try:
        assert NoiseSecret.load_or_create(path)() == bytes.fromhex(content.decode()) and is_secret
    except ConfigError as error:
        assert not is_secret
        assert str(path) in str(error) and "remove it" in str(error) and "\n" not in str(error)


def test_a_path_without_a_regular_file_is_reported_and_never_waited_for(tmp_path: Path) -> None:
    for path in (tmp_path / "pipe", tmp_path / "directory"):
        os.mkfifo(path) if path.name == "pipe" else path.mkdir()
        with pytest.raises(ConfigError, match="remove it"):
            NoiseSecret.load_or_create(path)


def test_without_a_writable_directory_the_secret_is_that_of_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    secret = NoiseSecret.load_or_create(tmp_path / "file" / "noise")
    assert secret.source == "memory" and "cannot be stored" in caplog.text


def test_no_message_contains_the_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "noise"
    NoiseSecret.load_or_create(path)
    path.chmod(0o644)
    with caplog.at_level(logging.DEBUG):
        secret = NoiseSecret.load_or_create(path)
    assert "chmod 600" in caplog.text
    for message in (caplog.text, repr(secret), str(secret)):
        assert secret().hex() not in message and repr(secret())[2:-1] not in message
    path.write_text(secret().hex() + "!")
    with pytest.raises(ConfigError) as caught:
        NoiseSecret.load_or_create(path)
    assert secret().hex() not in str(caught.value)
