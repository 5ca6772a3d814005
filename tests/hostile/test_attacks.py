"""What one client sends costs the others nothing: a real server, a stream and /live beside every attack."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.hostile.attacks import ATTACKS, COMPLETIONS, Attack
from tests.server.client import get, until_ready, wait_until
from tests.server.test_process import running
from tests.waiting import PATIENCE_S

KEY = {"authorization": "Bearer secret"}
LONGEST_WAIT_S = 1.0
"""For /live and for the next event of a stream, of the server's own processor time; idle cores need a tenth of it."""
MOST_GROWTH_MB = 600
# The stream is urgent: what it waits for is its next event, and not a slot behind choices that came earlier.
SMALL = (
    "--scheduling-policy",
    "priority",
    "--device",
    "cpu",
    "--max-num-seqs",
    "4",
    "--max-model-len",
    "256",
    "--cache-tokens",
    "65536",
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """Process id and port."""
    with running(*SMALL, "--api-key", "secret") as (process, port):
        until_ready(port, process)
        yield process.pid, port


class Witness:
    """A client that streams and one that asks for /live, again and again; notes the longest wait of each.

    A wait counts as the time of the clock or as the processor time that the server took meanwhile, whichever is less:
    what a busy machine makes both wait for is not the server's.
    """

    def __init__(self, process: int, port: int) -> None:
        self.longest = {"stream": 0.0, "live": 0.0}
        self.num_events = 0
        self._process, self._port = process, port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._stream, self._live)]

    def __enter__(self) -> Witness:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.num_events > 20)
        self.longest = dict.fromkeys(self.longest, 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _now(self) -> tuple[float, float]:
        """Seconds of the clock, and of the processors for the server."""
        return time.perf_counter(), processor_seconds(self._process)

    def _note(self, name: str, since: tuple[float, float]) -> tuple[float, float]:
        now = self._now()
        self.longest[name] = max(self.longest[name], min(now[0] - since[0], now[1] - since[1]))
        return now

    def _live(self) -> None:
        while not self._stop.is_set():
            began = self._now()
            assert get(self._port, "/live").status == 200
            self._note("live", began)
            time.sleep(0.005)

    def _stream(self) -> None:
        body = {
            "prompt": "x = 1\n",
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1,
            "priority": -100,
            "num_speculative_tokens": 0,
        }
        while not self._stop.is_set():
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)) as connection:
                last = self._now()
                connection.request("POST", COMPLETIONS, json.dumps(body), KEY)
                response = connection.getresponse()
                assert response.status == 200, response.read()
                while not self._stop.is_set() and response.readline():
                    last = self._note("stream", last)
                    self.num_events += 1


def send(port: int, attack: Attack, content: bytes) -> int:
    """The status of an attack; a server that refuses a body need not read it."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.putrequest("POST", attack.path)
        for name, value in {**KEY, "content-length": str(len(content))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        with suppress(BrokenPipeError, ConnectionResetError):
            if len(content) < 30_000_000:  # what is longer is refused by what its header says
                connection.send(content)
        response = connection.getresponse()
        answer = response.read()
        if response.status >= 400:
            assert len(answer) < 2000, "an error quotes at most a little of what was sent"
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        return response.status


def processor_seconds(process: int) -> float:
    """Of all threads of a process since it began."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_costs_nobody_else_anything(server: tuple[int, int], attack: Attack) -> None:
    process, port = server
    content = attack.body()
    before = resident_mb(process)
    with Witness(process, port) as witness, ThreadPoolExecutor(attack.at_once) as clients:
        began = time.perf_counter()
        statuses = set(clients.map(lambda _: send(port, attack, content), range(attack.at_once)))
        took = time.perf_counter() - began
        time.sleep(0.2)
    grown = resident_mb(process) - before
    waits = ", ".join(f"{name} {1000 * wait:.0f} ms" for name, wait in witness.longest.items())
    print(f"\n{attack.name}: {sorted(statuses)} in {took:.2f} s; others waited {waits}; {grown:+.0f} MB")
    assert statuses <= set(attack.statuses)
    assert max(witness.longest.values()) < LONGEST_WAIT_S
    assert grown < MOST_GROWTH_MB
