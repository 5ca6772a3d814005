"""The servers into which faults are injected: one with a durable cache, or several that share text through one Redis.

In a fleet of several servers, each is connected to Redis by a `FaultProxy` of its own, and two tenants send requests to
all servers.
"""

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

from benchmarks.reliability.clients import SERVER_OPTIONS, History, Load, Verdict, family, note, notes_on_disk
from benchmarks.reliability.proxy import FaultProxy
from benchmarks.servers import Redis, Server, headers_of
from server.admission.registry import NamespaceNames
from server.admission.tenant_config import digest_of
from ssd.replication.entry import stream_key
from ssd.text.codec import TextCodec

if TYPE_CHECKING:
    import redis

KEYS: Final[tuple[str, ...]] = ("key-of-the-first-tenant", "key-of-the-second-tenant")
_ALONE: Final = "faults"
_BASE: Final = "fleet"
_SECRET: Final = b"the secret of the fleet"
_PROBE_TOKENS = 16
_MIN_DRAFTED = 8  # of the probe's tokens; a server that never saw the text drafts one or two
_DISK_BYTES: Final = 128 << 20
_SERVER: Final = (
    *SERVER_OPTIONS,
    *("--max-num-seqs", "4", "--max-model-len", "256", "--num-speculative-tokens", "16"),
    *("--rebuild-interval", "0.3", "--cache-tokens", str(1 << 22)),  # no text is evicted
)


class SkippedError(Exception):
    """A fault cannot be injected in this setup, for example without Redis or without the right to mount."""


@dataclass(slots=True)
class Member:
    """One server with its cache directory, the load of each tenant, and its proxy if there is a Redis."""

    server: Server
    directory: Path
    history: History
    loads: list[Load]
    link: FaultProxy | None = None

    @property
    def proxy(self) -> FaultProxy:
        """The proxy between the server and Redis. Raises SkippedError if there is no Redis."""
        if self.link is None:
            raise SkippedError("one server has no Redis")
        return self.link

    def kill(self) -> None:
        self.server.kill()
        self.history.end_life(in_order=False)

    def close(self) -> None:
        """Shut down the server regularly. If it has to be killed, this counts as an unexpected end."""
        is_closed = self.server.terminate()
        self.server.num_deaths += not is_closed
        self.history.end_life(in_order=is_closed)

    def begin_anew(self) -> None:
        """Kill the server, empty its cache directory, and start it. No stored text may still be expected there."""
        self.kill()
        assert not self.history.promised
        clear(self.directory)
        self.server.start()

    def revive(self) -> None:
        if self.server.revive():
            self.history.end_life(in_order=False)


class Fleet:
    """The servers with their Redis and their clients. A context manager that starts and ends them.

    Attributes:
        has_small_disks: Whether each cache directory is a small file system of its own, which needs the right to mount.
        verdicts: The results of checks of stored notes with the names of the directories, since the last round.
    """

    def __init__(self, home: Path, codec: TextCodec, size: int, chance: random.Random) -> None:
        """Prepare ``size`` servers. A single server has neither Redis nor API keys.

        Raises FileNotFoundError if redis-server is needed but not installed.
        """
        self.chance = chance
        self.members: list[Member] = []
        self.has_small_disks = True
        self.verdicts: list[tuple[str, Verdict]] = []
        self._codec = codec
        self._stack = ExitStack()
        self.keys = keys = KEYS if size > 1 else (None,)
        names = NamespaceNames(_SECRET)
        self.namespaces = [_ALONE if key is None else names.tenant(_BASE, f"key:{digest_of(key)}", 0) for key in keys]
        (home / "secret").write_bytes(_SECRET)
        (home / "secret").chmod(0o600)
        if size > 1:
            (home / "redis").mkdir()
            self.redis = Redis(home / "redis", "--appendonly", "yes", "--appendfsync", "always")
            self._stack.enter_context(self.redis)
        for number, history in enumerate(family(size)):
            directory, options, link = home / f"cache-{number}", ["--namespace", _ALONE], None
            directory.mkdir(parents=True)
            self.has_small_disks = self.has_small_disks and self._mounts(directory)
            if size > 1:
                link = self._stack.enter_context(FaultProxy(self.redis.port, seed=chance.randrange(1 << 32)))
                url = f"redis://127.0.0.1:{link.port}/0"
                options = ["--namespace", _BASE, "--secret-file", str(home / "secret"), "--redis", url]
                options += [word for key in KEYS for word in ("--api-key", key)]
            server = Server(home / f"server-{number}.log", *_SERVER, *options, "--cache-dir", str(directory))
            loads = [
                Load(server, keys=(key,), history=history, namespace=namespace)
                for namespace, key in zip(self.namespaces, keys, strict=True)
            ]
            self.members.append(Member(server, directory, history, loads, link))

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
        return [load for member in self.members for load in member.loads]

    @property
    def counts(self) -> Counter[str]:
        """The number of requests of all clients by outcome."""
        return sum((load.counts for load in self.loads), Counter())

    @property
    def streams(self) -> list[str]:
        """The keys of the Redis streams of both tenants."""
        return [stream_key(self._codec.fingerprint, namespace) for namespace in self.namespaces]

    def one(self) -> Member:
        return self.chance.choice(self.members)

    def some(self) -> list[Member]:
        return self.chance.sample(self.members, self.chance.randint(1, len(self.members)))

    def hold(self, seconds: float) -> None:
        """Sleep for about ``seconds``, varied at random by up to 30 %."""
        time.sleep(seconds * self.chance.uniform(0.7, 1.3))

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """Yield a Redis client that is connected directly, without a proxy."""
        import redis

        with closing(redis.Redis.from_url(self.redis.url, socket_timeout=30)) as client:
            yield client

    def restart_redis(self, *, is_empty: bool) -> None:
        """Start Redis after it was killed, with the data on its disk or, if ``is_empty``, without any."""
        if is_empty:
            clear(self.redis.directory)
        self.redis.start()

    def kill_server(self, member: Member) -> None:
        """Kill and restart a server. The notes (numbered test texts) that were on its disk must survive."""
        self.promise(member)
        member.kill()
        member.server.start()

    def promise(self, member: Member) -> None:
        """Record that the notes (numbered test texts) now on a server's disk must be found there later."""
        member.history.promise(number for _, number in notes_on_disk(member.directory, self._codec))

    def settle(self, member: Member) -> None:
        """Restart a server and check its stored notes, before a fault that destroys its cache."""
        self.close(member)
        member.server.start()

    def close(self, member: Member) -> None:
        """Shut down a server regularly, and check that the expected notes (numbered test texts) are on its disk."""
        member.close()
        found = notes_on_disk(member.directory, self._codec)
        self.verdicts.append((member.directory.name, member.history.check(found)))

    def sharing_returns(self, within_s: float) -> float | None:
        """Wait until a new text from each server is drafted by all other servers, for both tenants.

        Returns the longest time in seconds; None if it took longer than ``within_s``.
        """
        longest = 0.0
        for tenant, namespace in enumerate(self.namespaces):
            for writer in self.members:
                begin = time.monotonic()
                body = self._add_text(writer, namespace, KEYS[tenant])
                for reader in self.members:
                    while reader is not writer and not _drafts(reader.server, body, KEYS[tenant]):
                        if time.monotonic() - begin > within_s:
                            return None
                        time.sleep(0.1)
                longest = max(longest, time.monotonic() - begin)
        return longest

    def _add_text(self, member: Member, namespace: str, key: str) -> dict[str, object]:
        """Let a server generate an unpredictable text; return the request. Raises ValueError if it was drafted."""
        number = member.history.begin(namespace)
        body = {
            "prompt": f"{note(number)}{self.chance.randbytes(12).hex()}\n",
            "max_tokens": _PROBE_TOKENS,
            "temperature": 1.5,
            "seed": number,
            "ignore_eos": True,
        }
        if _drafts(member.server, body, key):
            raise ValueError("a server drafts a text that was not generated yet, so the probe of other servers is void")
        member.server.post(body, key=key)
        member.history.acknowledge(number)
        return body

    def _mounts(self, directory: Path) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(directory)]
        is_mounted = shutil.which("mount") is not None and _succeeds(command)
        if is_mounted:
            self._stack.callback(_succeeds, ["umount", "--lazy", str(directory)])
        return is_mounted


def _drafts(server: Server, body: dict[str, object], key: str) -> bool:
    """Return whether the server drafts most tokens of the answer to a request, without storing this answer."""
    request = {**body, "stream": True, "stream_options": {"include_drafts": True}, "store": False}
    num_accepted = 0
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(request), headers_of(key))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    num_accepted += (choice.get("draft") or {"num_accepted": 0})["num_accepted"]
    return num_accepted >= _MIN_DRAFTED


def clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0
