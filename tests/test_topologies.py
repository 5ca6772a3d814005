"""Sharing through servers that fail over and move: real sentinels, a real cluster, TLS; and servers that lie."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from benchmarks.servers import find_redis_server, free_port
from cache_builder.__main__ import main
from cache_builder.commands.redis_status import read_status
from ssd.errors import ConfigError
from ssd.replication.connection import connect, masters_of, parse_redis_url, redact_password, redacted_address
from ssd.replication.entry import stream_key
from ssd.replication.redis_stream import FIELD
from ssd.replication.replication_log import RedisCounters
from tests.redis_server import RedisServer, started
from tests.sharing_replica import FINGERPRINT, eventually, replica, stored
from tests.waiting import wait_until

NAMES = [f"n{number}" for number in range(12)]

# URLs


def test_a_url_names_sentinels_a_service_and_a_database_or_nodes_of_a_cluster() -> None:
    address = parse_redis_url("redis-sentinel://user:p%40w@h1:1,h2,[::1]:3/my%20service/4?socket_keepalive=yes")
    assert address.hosts == (("h1", 1), ("h2", 26379), ("::1", 3))
    assert (address.kind, address.service) == ("sentinel", "my service")
    assert address.options == {"username": "user", "password": "p@w", "db": 4, "socket_keepalive": True}
    assert address.sentinel_options == {"socket_keepalive": True}  # sentinels are not told the servers' password
    address = parse_redis_url("rediss-sentinel://h/s?sentinel_username=u&sentinel_password=p&ssl_check_hostname=false")
    assert (address.sentinel_options["username"], address.sentinel_options["password"]) == ("u", "p")
    assert address.options["ssl_check_hostname"] is address.sentinel_options["ssl_check_hostname"] is False
    assert address.options["connection_class"].__name__ == "SSLConnection"
    address = parse_redis_url("redis-cluster://:pw@h1:7000,h2")
    assert (address.kind, address.hosts) == ("cluster", (("h1", 7000), ("h2", 6379)))
    assert address.options["password"] == "pw"


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@host",
        "redis://user:s3cret@host:port/0",
        "redis-sentinel://:s3cret@h1,h2",
        "redis-sentinel://:s3cret@h1/service/x",
        "redis-sentinel://:s3cret@/service",
        "redis-sentinel://:s3cret@h1:99999/service",
        "redis-cluster://:s3cret@h1,h2/3",
        "redis-cluster://:s3cret@h1,,h2",
        "redis-cluster://:s3cret@" + "h," * 64 + "h",
        "redis-clusters://:s3cret@h1",
        *(
            f"{url}?ssl_ca_cert=x"
            for url in ("redis://:s3cret@h", "redis-cluster://:s3cret@h", "redis-sentinel://:s3cret@h/s")
        ),
    ],
)
def test_what_is_no_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"ssl_ca_cert.*correct it" if "?" in url else "redis-sentinel://") as caught:
        connect(url)
    assert "s3cret" not in str(caught.value)


def test_no_form_of_url_shows_its_password() -> None:
    for url, address in (
        ("redis://user:s3cr%40t@host:6379/0", "redis://host:6379/0"),
        ("redis://h/0?password=s3cr%40t", "redis://h/0"),
        ("redis-sentinel://u:s3cr%40t@h1:1,h2/service/0", "redis-sentinel://h1:1,h2/service/0"),
        ("rediss-cluster://:s3cr%40t@h1:1,h2?ssl_password=s3cr%40t", "rediss-cluster://h1:1,h2"),
        ("redis-sentinel://h1/s?sentinel_password=s3cr%40t", "redis-sentinel://h1/s"),
    ):
        assert "s3cr" not in redact_password(f"{url} s3cr@t", url)
        assert redacted_address(url) == address


def test_an_option_of_a_url_does_not_win_over_our_time_outs() -> None:
    with closing(connect("rediss://user:pw@host:7000/3?socket_timeout=99")) as client:
        options = client.connection_pool.connection_kwargs
        assert client.connection_pool.connection_class.__name__ == "SSLConnection"
    assert [options[name] for name in ("host", "port", "db", "username")] == ["host", 7000, 3, "user"]
    assert options["socket_timeout"] < 5


# TLS


class Certificates:
    """Of an authority, of a server called ``name``, and of a client, whose key has the password "sesame"."""

    def __init__(self, directory: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl")
        directory.mkdir()
        self.authority, authority_key = directory / "ca.pem", directory / "ca.key"
        self._run("req", "-x509", *_KEY, "-keyout", authority_key, "-out", self.authority, "-subj", "/CN=authority")
        self.server, self.server_key = directory / "server.pem", directory / "server.key"
        self.client, self.client_key = directory / "client.pem", directory / "client.key"
        for certificate, key, subject in (
            (self.server, self.server_key, name),
            (self.client, self.client_key, "client"),
        ):
            request, names = directory / "request", directory / "names"
            names.write_text(f"subjectAltName={'IP' if subject[0].isdigit() else 'DNS'}:{subject}\n")
            self._run("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={subject}")
            signed_by = ("-CA", self.authority, "-CAkey", authority_key, "-CAcreateserial", "-extfile", names)
            self._run("x509", "-req", "-in", request, "-out", certificate, "-days", "2", *signed_by)
        locked = directory / "locked.key"
        self._run("pkcs8", "-topk8", "-in", self.client_key, "-out", locked, "-passout", "pass:sesame")
        self.client_key = locked

    @staticmethod
    def _run(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def test_replicas_share_by_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    if (executable := find_redis_server()) is not None:
        tried = subprocess.run([executable, "--tls-port", "x"], capture_output=True, text=True, timeout=60)
        if "Bad directive" in tried.stdout + tried.stderr:
            pytest.skip("this redis-server was built without TLS")
    files, port = Certificates(tmp_path / "files", "127.0.0.1"), free_port()
    tls = ["--tls-port", str(port), "--tls-cert-file", str(files.server), "--tls-key-file", str(files.server_key)]
    own = f"ssl_certfile={files.client}&ssl_keyfile={files.client_key}&ssl_password=sesame"
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.authority}&{own}"
    with (
        started(RedisServer(tmp_path, *tls, "--tls-ca-cert-file", str(files.authority))) as server,
        replica(url) as one,
        replica(server.url) as two,
    ):
        one.append([1, 2])
        eventually(lambda: two.stored() == [[1, 2]])
        two.append([3])
        eventually(lambda: one.stored() == [[1, 2], [3]])
        for refused in (
            f"rediss://127.0.0.1:{port}/0?{own}",  # an authority nobody knows
            f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.authority}",  # no certificate of the client
            f"rediss://localhost:{port}/0?ssl_ca_certs={files.authority}&{own}",  # another name
        ):
            with closing(connect(refused)) as client, pytest.raises(redis.ConnectionError):
                client.ping()
        unchecked = f"rediss://localhost:{port}/0?ssl_ca_certs={files.authority}&ssl_check_hostname=false&{own}"
        with closing(connect(unchecked)) as client:
            assert client.ping()


# What servers may say


@contextmanager
def liar(says: Callable[[bytes, int], bytes]) -> Iterator[int]:
    """A server that answers each command with what ``says`` makes of it and of its port, which is returned."""

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while command := connection.recv(1 << 16):
                    connection.sendall(says(command, server.getsockname()[1]))
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


NONSENSE = (
    b"+OK\r\n",
    b"$-1\r\n",
    b"*0\r\n",
    b":7\r\n",
    b"-ERR no\r\n",
    b"-NOPERM no\r\n",
    b"-MOVED nonsense\r\n",
    b"-MOVED 5 :0\r\n",
    b"-ASK 5 127.0.0.1:1\r\n",
    b"-CLUSTERDOWN no\r\n",
    b"*2\r\n$1\r\nx\r\n$9\r\n127.0.0.1\r\n",
    b"$999999999999\r\n",
    b"*999999999999\r\n",
    b"\x00\xff\r\n",
)


def nonsense() -> Callable[[bytes, int], bytes]:
    """Answers in random order, from a seed."""
    rng = random.Random(1)
    return lambda _command, _port: rng.choice(NONSENSE)


@pytest.mark.parametrize("form", ["redis-cluster://127.0.0.1:{}", "redis-sentinel://127.0.0.1:{}/s"])
def test_a_server_that_answers_nonsense_costs_sharing_alone(form: str) -> None:
    with liar(nonsense()) as port, replica(form.format(port)) as one:
        one.append([1, 2])
        eventually(lambda: one.log.stats().num_failures > 12)
        assert one.stored() == [[1, 2]]
        started_at = time.monotonic()
    assert time.monotonic() - started_at < 10


# Sentinels


def test_sharing_goes_on_when_the_master_of_sentinels_is_killed(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    url = watched.url.replace("//", "//127.0.0.1:1,")  # a sentinel that is away is passed
    with started(watched), replica(url) as one, replica(watched.url) as two:
        one.append([1])
        eventually(lambda: two.stored() == [[1]])
        watched.master.kill()
        one.append([2])
        eventually(lambda: [2] in two.stored())
        two.append([3])
        eventually(lambda: [3] in one.stored())
        assert sorted(one.stored()) == sorted(two.stored()) == [[1], [2], [3]]
        assert one.log.stats().num_dropped == 0
        eventually(lambda: one.log.stats().num_reconnects and two.log.stats().num_reconnects)
        with replica(watched.url) as joiner:
            eventually(lambda: [2] in joiner.stored() and [3] in joiner.stored())


@pytest.mark.slow
def test_a_replica_that_was_promoted_without_the_newest_entries_begins_no_text_anew(tmp_path: Path) -> None:
    with started(Watched(tmp_path)) as watched, replica(watched.url) as one, replica(watched.url) as two:
        for number in range(20):
            one.append([number])
        eventually(lambda: len(two.stored()) == 20)
        master = watched.master
        master.ask("ACL", "SETUSER", "default", "-psync", "-sync")  # it would ask for all where it may not go on
        master.ask("CLIENT", "KILL", "TYPE", "replica")
        for number in range(20, 30):
            one.append([number])
        eventually(lambda: len(two.stored()) == 30)
        master.kill()
        two.append([100])
        one.append([101])
        eventually(lambda: [101] in two.stored() and [100] in one.stored())
        with replica(watched.url) as three:
            eventually(lambda: [100] in three.stored() and [101] in three.stored())
            assert [0] in three.stored() and [29] not in three.stored()  # what nobody could tell it
        for each in (one, two):
            assert sorted(each.stored()) == sorted([[number] for number in (*range(30), 100, 101)])


# A cluster


@contextmanager
def pair(url: str) -> Iterator[list[Any]]:
    """Two replicas that have opened all namespaces."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(replica(url)) for _ in range(2)]
        for each in replicas:
            for name in NAMES:
                each.caches.get(name)
        yield replicas


def have_all(replicas: list[Any], texts: dict[str, list[list[int]]]) -> bool:
    """Whether both have stored all texts of all namespaces, once."""
    return all(sorted(stored(each.caches, name)) == sorted(texts[name]) for each in replicas for name in texts)


def test_namespaces_of_all_nodes_of_a_cluster_are_shared_and_slots_may_move(tmp_path: Path) -> None:
    keys = {name: stream_key(FINGERPRINT, name) for name in NAMES}
    with started(Cluster(tmp_path, has_replicas=False)) as cluster, pair(cluster.url) as replicas:
        assert len({cluster.node_for(key_slot(key.encode())).port for key in keys.values()}) == 3
        texts: dict[str, list[list[int]]] = {name: [] for name in NAMES}

        def say(number: int) -> None:
            for at, name in enumerate(NAMES):
                replicas[at % 2].caches.get(name).append([number, at])
                texts[name].append([number, at])

        say(1)
        eventually(lambda: have_all(replicas, texts))
        for name in NAMES[:3]:
            slot = key_slot(keys[name].encode())
            source = cluster.node_for(slot)
            target = next(node for node in cluster.masters if node is not source)
            cluster.move(slot, source, target, meanwhile=lambda: (say(2), time.sleep(0.3)))
        say(3)
        eventually(lambda: have_all(replicas, texts))
        eventually(lambda: all(each.log.stats().is_connected for each in replicas))
        assert all(each.log.stats().num_dropped == 0 for each in replicas)
        with pair(cluster.url) as joiners:
            eventually(lambda: have_all(joiners, texts))
        with closing(connect(cluster.url)) as client, closing(RedisCounters(cluster.url)) as counters:
            assert client.ping() and len(masters_of(client)) == 3
            for key in keys.values():
                client.xadd(key, {FIELD: b"c"}, id=b"18446744073709551615-18446744073709551615")
            say(4)
            eventually(lambda: have_all(replicas, texts))
            assert [client.xlen(key) for key in keys.values()] == [1] * len(NAMES)  # begun anew, in transactions
            assert counters.add("x", 2) == 2 and counters.read(["x", "y"]) == [2, 0]
        status = read_status(cluster.url)
        assert len({server["address"] for server in status["servers"]}) == 3
        assert [space["namespace"] for space in status["namespaces"]] == sorted(NAMES)
        assert main(["purge", "--namespace", NAMES[0], "--redis", cluster.url]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_node_holds_up_no_other_and_its_replica_takes_over(tmp_path: Path, number: int) -> None:
    with started(Cluster(tmp_path)) as cluster, pair(cluster.url) as replicas:
        one, two = replicas
        texts: dict[str, list[list[int]]] = {name: [] for name in NAMES}

        def say(kind: int, names: list[str]) -> None:
            for at, name in enumerate(names):
                replicas[at % 2].caches.get(name).append([kind, at])
                texts[name].append([kind, at])

        say(1, NAMES)
        eventually(lambda: have_all(replicas, texts))
        lost = cluster.node_for(key_slot(stream_key(FINGERPRINT, NAMES[0]).encode()))
        others = [n for n in NAMES if cluster.node_for(key_slot(stream_key(FINGERPRINT, n).encode())) is not lost]
        assert 0 < len(others) < len(NAMES)
        lost.signal(number)
        say(2, others)
        eventually(lambda: have_all(replicas, {name: texts[name] for name in others}), within_s=30)
        say(3, NAMES)
        eventually(lambda: have_all(replicas, texts))
        eventually(lambda: one.log.stats().is_connected and two.log.stats().is_connected)
        if number == signal.SIGKILL:  # one that is only stopped refuses no connection
            eventually(lambda: one.log.stats().num_reconnects + two.log.stats().num_reconnects)


# Real servers that fail over


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
        for node, master in zip(self.replicas, self.masters, strict=False):
            wait_until(lambda node=node, master=master: node.ask("CLUSTER", "REPLICATE", id_of(master)))  # type: ignore[misc]
        wait_until(lambda: all(_cluster_info(node).get("cluster_state") == "ok" for node in nodes))
        wait_until(lambda: all((node.ask("ROLE") or [""] * 4)[3] == "connected" for node in self.replicas))

    def node_for(self, slot: int) -> RedisServer:
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
