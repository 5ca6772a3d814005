"""Real servers that fail over: a master, a replica and three sentinels; a cluster of three masters and replicas."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port
from tests.redis_server import RedisServer
from tests.waiting import wait_until

SERVICE = "ssd"


class Watched:
    """A master, its replica and three sentinels that call it dead after half a second."""

    def __init__(self, directory: Path, *options: str) -> None:
        plain = ["--repl-diskless-sync-delay", "0", *options]
        self.servers = [RedisServer(directory / "0", *plain)]
        self.servers.append(RedisServer(directory / "1", *plain, "--replicaof", "127.0.0.1", str(self.servers[0].port)))
        master = self.servers[0].port
        config = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {master} 2\nsentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        self.sentinels = [RedisServer(directory / f"s{n}", "--sentinel", config=config) for n in range(3)]
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis-sentinel://{places}/{SERVICE}/0"

    def start(self) -> None:
        """Start all and wait until the replica follows and each sentinel knows the others."""
        for node in (*self.servers, *self.sentinels):
            node.start()
        wait_until(lambda: (self.servers[1].ask("ROLE") or [""] * 4)[3] == "connected")
        wait_until(lambda: all(_knows_all(sentinel.ask("SENTINEL", "MASTER", SERVICE)) for sentinel in self.sentinels))

    @property
    def master(self) -> RedisServer:
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
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
        options += ["--repl-diskless-sync-delay", "0", "--cluster-require-full-coverage", "no"]
        self.masters = [_node(directory / f"m{n}", *options) for n in range(num_masters)]
        self.replicas = [_node(directory / f"r{n}", *options) for n in range(num_masters if has_replicas else 0)]
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

    def node_of(self, slot: int) -> RedisServer:
        """The master of a slot."""
        answer: Any = next(found for node in self.masters + self.replicas if (found := node.ask("CLUSTER", "SLOTS")))
        port = next(owner[1] for first, last, owner, *_ in answer if first <= slot <= last)
        return next(node for node in self.masters + self.replicas if node.port == port)

    def move(
        self, slot: int, source: RedisServer, target: RedisServer, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
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


def id_of(node: RedisServer) -> str:
    """A node's name in its cluster."""
    return str(node.ask("CLUSTER", "MYID"))


def _node(directory: Path, *options: str) -> RedisServer:
    """On a free port so that the one 10,000 above, by which nodes talk, is free and no connection's own."""
    while True:
        port = free_port()
        if port < 20_000:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 10_000)):
                return RedisServer(directory, *options, port=port)


def _knows_all(answer: Any) -> bool:
    # A list of names and values, or a dictionary where redis-py knows the command.
    state = answer if isinstance(answer, dict) else dict(zip((answer or [])[::2], (answer or [])[1::2], strict=False))
    return str(state.get("num-other-sentinels")) == "2" and str(state.get("num-slaves")) == "1"


def _cluster_info(node: RedisServer) -> dict[str, str]:
    text = node.ask("CLUSTER", "INFO") or ""
    return dict(line.split(":", 1) for line in str(text).splitlines() if ":" in line)
