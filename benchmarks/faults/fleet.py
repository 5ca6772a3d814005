"""Where faults happen: one server with a durable cache, or several that share through one Redis, each by a proxy of its
own, and two tenants who ask all of them."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from benchmarks.faults.proxy import FaultProxy
from benchmarks.history import History, Verdict, family, note, notes_on_disk
from benchmarks.load import SERVER_OPTIONS, Load
from benchmarks.processes import Redis, Server, headers_of
from server.admission.registry import NamespaceNames
from server.admission.tenant_config import digest_of
from ssd.replication.entry import stream_key
from ssd.text.codec import TextCodec

if TYPE_CHECKING:
    import redis

KEYS: Final[tuple[str, ...]] = ("key-of-the-first-tenant", "key-of-the-second-tenant")
_BASE = "fleet"
_SECRET = b"the secret of the fleet"
_CACHE_TOKENS = 1 << 22  # some times what all rounds say: what is lost must not be what is old
_PROBE_TOKENS = 16
_DRAFTED = 8  # of them: what a server drafts that never saw the text is one or two
_PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")


_DISK_BYTES: Final = 128 << 20
_SERVER: Final = (
    *SERVER_OPTIONS,
    *("--max-num-seqs", "4", "--max-model-len", "256", "--num-speculative-tokens", "16"),
)
ALONE: Final = "faults"
"""The namespace of one server."""


class SkippedError(Exception):
    """What a fault needs is not to be had here."""


@dataclass(slots=True)
class Member:
    """One server and what belongs to it. ``loads`` : one for each tenant. ``wire`` : None where there is no Redis."""

    server: Server
    directory: Path
    history: History
    loads: list[Load]
    wire: FaultProxy | None = None

    @property
    def proxy(self) -> FaultProxy:
        """Between it and Redis. Raises SkippedError where there is none."""
        if self.wire is None:
            raise SkippedError("one server has no Redis")
        return self.wire

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The server is ended on purpose meanwhile."""
        with ExitStack() as stack:
            for load in self.loads:
                stack.enter_context(load.outage())
            yield

    def kill(self) -> None:
        """``kill -9``; what it had not written is lost, and nobody may mind."""
        self.server.kill()
        self.history.end_life(in_order=False)

    def close(self, *, kill_after_s: float | None = None) -> None:
        """SIGTERM, and a kill if it takes longer than that; where none was asked for, not to close is to die."""
        is_closed = self.server.terminate(kill_after_s=kill_after_s)
        self.server.num_deaths += not is_closed and kill_after_s is None
        self.history.end_life(in_order=is_closed)

    def begin_anew(self) -> None:
        """kill -9, and back with nothing; what was promised must be settled."""
        with self.outage():
            self.kill()
            assert not self.history.promised
            empty(self.directory)
            self.server.start()

    def revive(self) -> None:
        """If it ended by itself, start it again."""
        if self.server.revive():
            self.history.end_life(in_order=False)


class Fleet:
    """A context manager: all starts when it is entered and ends when it is left.

    One server has neither Redis nor keys. Raises FileNotFoundError where more have no redis-server.
    """

    def __init__(self, home: Path, codec: TextCodec, size: int, chance: random.Random) -> None:
        self.chance = chance
        self.members: list[Member] = []
        self.has_small_disks = True
        """Each a file system of its own; not where nothing may be mounted."""
        self.verdicts: list[tuple[str, Verdict]] = []
        """Of directories that were settled, by name, until a round takes them."""
        self._codec = codec
        self._stack = ExitStack()
        self.keys = keys = KEYS if size > 1 else (None,)
        names = NamespaceNames(_SECRET)
        self.namespaces = [ALONE if key is None else names.tenant(_BASE, f"key:{digest_of(key)}", 0) for key in keys]
        (home / "secret").write_bytes(_SECRET)
        (home / "secret").chmod(0o600)
        if size > 1:
            (home / "redis").mkdir()
            self.redis = Redis(home / "redis", *_PERSISTENT)
            self._stack.callback(self.redis.kill)
            self.redis.start()
        for number, history in enumerate(family(size)):
            directory, options, wire = home / f"cache-{number}", ["--namespace", ALONE], None
            directory.mkdir(parents=True)
            self.has_small_disks = self.has_small_disks and self._mounts(directory)
            if size > 1:
                wire = FaultProxy(self.redis.port, seed=chance.randrange(1 << 32))
                self._stack.callback(wire.close)
                url = f"redis://127.0.0.1:{wire.port}/0"
                options = ["--namespace", _BASE, "--secret-file", str(home / "secret"), "--redis", url]
                options += [word for key in KEYS for word in ("--api-key", key)]
            options += ["--cache-dir", str(directory), "--rebuild-interval", "0.3"]
            options += ["--cache-tokens", str(_CACHE_TOKENS)]
            one = Server(home / f"server-{number}.log", *_SERVER, *options)
            loads = [
                Load(one, keys=(key,), history=history, namespace=namespace)
                for namespace, key in zip(self.namespaces, keys, strict=True)
            ]
            self.members.append(Member(one, directory, history, loads, wire))

    def __enter__(self) -> Self:
        for member in self.members:
            self._stack.callback(member.server.kill)
            member.server.start(wait=False)
        for member in self.members:
            member.server.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def loads(self) -> list[Load]:
        """Of all servers and tenants."""
        return [load for member in self.members for load in member.loads]

    @property
    def counts(self) -> Counter[str]:
        """What became of all requests so far."""
        return sum((load.counts for load in self.loads), Counter())

    @property
    def streams(self) -> list[str]:
        """The keys of both tenants' logs."""
        return [stream_key(self._codec.fingerprint, namespace) for namespace in self.namespaces]

    def one(self) -> Member:
        """One of the servers."""
        return self.chance.choice(self.members)

    def some(self) -> list[Member]:
        """One or more of the servers."""
        return self.chance.sample(self.members, self.chance.randint(1, len(self.members)))

    def hold(self, seconds: float) -> None:
        """Let it last about so long."""
        time.sleep(seconds * self.chance.uniform(0.7, 1.3))

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """Somebody else who may do anything to Redis, by no proxy."""
        import redis

        with closing(redis.Redis.from_url(self.redis.url, socket_timeout=30)) as client:
            yield client

    def restart_redis(self, *, is_empty: bool) -> None:
        """After a kill: with what it had written, or with nothing."""
        if is_empty:
            empty(self.redis.directory)
        self.redis.start()

    def kill_server(self, member: Member) -> None:
        """``kill -9`` in the middle of what it is doing, and a start; what was on disk before is promised."""
        self.promise(member)
        with member.outage():
            member.kill()
            member.server.start()

    def promise(self, member: Member) -> None:
        """What is on its disk now must be there when it is settled."""
        member.history.promise(number for _, number in self.notes_on_disk(member))

    def settle(self, member: Member) -> None:
        """Before what no note outlives: close it, verify what was promised, and start it with what it had."""
        with member.outage():
            self._close(member)
            member.server.start()

    def close_all(self) -> None:
        """Close all in order and verify what was promised."""
        for member in self.members:
            self._close(member)

    def _close(self, member: Member) -> None:
        member.close()
        self.verdicts.append((member.directory.name, member.history.settle(self.notes_on_disk(member))))

    def notes_on_disk(self, member: Member) -> list[tuple[str, int]]:
        """(namespace, number) of each note in the directory of a server."""
        return notes_on_disk(member.directory, self._codec, _CACHE_TOKENS)

    def sharing_returns(self, within_s: float) -> float | None:
        """Seconds until a text learned by each server is drafted by all others, for both tenants; None if it is not."""
        longest = 0.0
        for tenant, namespace in enumerate(self.namespaces):
            for writer in self.members:
                begin = time.monotonic()
                body = self._teach(writer, namespace, KEYS[tenant])
                for reader in self.members:
                    while reader is not writer and not _drafts(reader.server, body, KEYS[tenant]):
                        if time.monotonic() - begin > within_s:
                            return None
                        time.sleep(0.1)
                longest = max(longest, time.monotonic() - begin)
        return longest

    def _teach(self, member: Member, namespace: str, key: str) -> dict[str, object]:
        """A server answers what nobody could guess: sampled with a seed of its own from nearly flat scores.

        Raises ValueError where it was drafted all the same.
        """
        number = member.history.begin(namespace)
        body = {
            "prompt": f"{note(number)}{self.chance.randbytes(12).hex()}\n",
            "max_tokens": _PROBE_TOKENS,
            "temperature": 1.5,
            "seed": number,
            "ignore_eos": True,
        }
        if _drafts(member.server, body, key):
            raise ValueError("a server drafts what nobody has said yet, so that others do says nothing")
        member.server.post(body, key=key)
        member.history.acknowledge(number)
        return body

    def _mounts(self, directory: Path) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(directory)]
        is_mounted = shutil.which("mount") is not None and works(command)
        if is_mounted:
            self._stack.callback(works, ["umount", "--lazy", str(directory)])
        return is_mounted


def _drafts(server: Server, body: dict[str, object], key: str) -> bool:
    """Whether the server would draft most of the answer; it learns nothing from being asked."""
    asked = {**body, "stream": True, "stream_options": {"include_drafts": True}, "store": False}
    num_accepted = 0
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(asked), headers_of(key))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    num_accepted += (choice.get("draft") or {"num_accepted": 0})["num_accepted"]
    return num_accepted >= _DRAFTED


def empty(directory: Path) -> None:
    """Remove all that is in it."""
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def works(command: Sequence[str]) -> bool:
    """Whether a command ends with status 0."""
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0
