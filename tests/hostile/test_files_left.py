"""Too few file descriptors under load: a line of log a second at most, right answers, and the server recovers."""

from __future__ import annotations

import http.client
import resource
import socket
import time
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from tests.hostile.test_attacks import SMALL
from tests.server.client import get, greedy_completion, until_ready
from tests.server.test_process import running
from tests.waiting import PATIENCE_S, wait_until

NUM_CLIENTS = 300
FLOOD_S = 5.0


def num_open(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def test_no_file_is_left_for_connections(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with (
        path.open("w") as log,
        running(*SMALL, "--cache-dir", str(tmp_path / "cache"), stderr=log.fileno()) as (process, port),
    ):
        until_ready(port, process)
        right = greedy_completion(port, prompt="import os\n", max_tokens=20).json["choices"]
        wait_until(lambda: "ready after" in path.read_text())  # a thread writes the log
        before = path.read_text()
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        with ExitStack() as opened:
            held = opened.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)))

            def page() -> int:
                """The status of a file of the page, asked for on the connection that is there already."""
                held.request("GET", "/")
                response = held.getresponse()
                response.read()
                return response.status

            assert page() == 200
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open(process.pid) + 20, limits[1]))
            began = time.monotonic()
            waiting = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_CLIENTS)]
            for connection in waiting:
                with suppress(OSError):
                    connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while time.monotonic() < began + FLOOD_S:
                assert page() == 200
                time.sleep(0.05)
        said = path.read_text().removeprefix(before)
        lines = [line for line in said.splitlines() if "server.observe.access" not in line]
        refused = [datetime.fromisoformat(line[:23]) for line in lines if "no file descriptor is free" in line]
        others = [line for line in lines if "no file descriptor is free" not in line]

        assert "Traceback" not in said and 'File "' not in said
        assert refused and all((later - earlier).total_seconds() > 0.99 for earlier, later in pairwise(refused))
        messages = [line[24:].partition("[Errno 24]") for line in others]
        assert all(errno for _, errno, _ in messages), others
        assert len({message for message, _, _ in messages}) == len(messages), "what fails is logged once until a retry"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: get(port, "/live").status == 200)
        assert get(port, "/").status == 200
        assert greedy_completion(port, prompt="import os\n", max_tokens=20).json["choices"] == right
        process.terminate()
        assert process.wait() == 0
