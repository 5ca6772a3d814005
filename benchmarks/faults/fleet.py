"""Several servers that share through one Redis, each by a proxy of its own, and two tenants who ask all of them."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from benchmarks.faults.history import History, family
from benchmarks.faults.load import Load, Question, note, notes_on_disk
from benchmarks.faults.scene import server
from benchmarks.fleet_faults.proxy import FaultProxy
from benchmarks.processes import Redis, Server, headers_of
from server.tenants.namespace_names import NamespaceNames
from server.tenants.rules import digest_of
from ssd.sharing.entry import chunks_key, head_key, stream_key
from ssd.text.codec import TextCodec

if TYPE_CHECKING:
    import redis

KEYS: Final = ("key-of-the-first-tenant", "key-of-the-second-tenant")
USER, PASSWORD = "ssd", "the password"
RIGHTS: Final = (
    "~ssd:1:*",
    *("+xadd", "+xread", "+xrange", "+xrevrange", "+xtrim", "+ping", "+watch", "+multi", "+exec", "+del"),
    *("+hmget", "+hincrby", "+getrange", "+set", "+get", "+pexpire", "+unwatch"),
    *("+hget", "+hset", "+hkeys", "+hdel", "+hlen"),
)
"""What docs/sharing.md says that a user needs."""

_BASE = "fleet"
_SECRET = b"the secret of the fleet"
_CACHE_TOKENS = 1 << 20
_PROBE_TOKENS = 16
_DRAFTED = 8  # of them: what a server drafts that never saw the text is one or two
_FILL_TOKENS = 24_000  # more than the least that is published
_FILL_PROMPT = 200
_FILL_FROM = 300  # special tokens lie below
_PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")


@dataclass(slots=True)
class Member:
    """One server and what belongs to it. ``loads`` : one for each tenant."""

    server: Server
    proxy: FaultProxy
    directory: Path
    history: History
    loads: list[Load] = field(default_factory=list)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The server is ended on purpose meanwhile."""
        with ExitStack() as stack:
            for load in self.loads:
                stack.enter_context(load.outage())
            yield


class Fleet:
    """A context manager: all starts when it is entered and ends when it is left.

    Raises FileNotFoundError where there is no redis-server.
    """

    def __init__(
        self, home: Path, codec: TextCodec, questions: Sequence[Question], size: int, chance: random.Random
    ) -> None:
        self.chance = chance
        names = NamespaceNames(_SECRET)
        self.namespaces = [names.tenant(_BASE, f"key:{digest_of(key)}", 0) for key in KEYS]
        self.members: list[Member] = []
        self._home = home
        self._codec = codec
        self._num_redis = 0
        self._stack = ExitStack()
        self.redis = self._new_redis()
        (home / "secret").write_bytes(_SECRET)
        (home / "secret").chmod(0o600)
        for number, history in enumerate(family(size)):
            proxy = FaultProxy(self.redis.port, seed=chance.randrange(1 << 32))
            self._stack.callback(proxy.close)
            directory = home / f"cache-{number}"
            url = f"redis://{USER}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{proxy.port}/0"
            one = server(home / f"server-{number}.log", *self._options(directory), "--redis", url)
            loads = [
                Load(one, questions, history, namespace, key)
                for namespace, key in zip(self.namespaces, KEYS, strict=True)
            ]
            self.members.append(Member(one, proxy, directory, history, loads))

    def __enter__(self) -> Self:
        for member in self.members:
            self._stack.callback(member.server.kill)
            member.server.start(wait=False)
        for member in self.members:
            member.server.wait_ready()
        for key in KEYS:
            self._fill(key)
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
    def published(self) -> list[tuple[str, str]]:
        """The keys of both tenants' published heads, and of their chunks."""
        fingerprint = self._codec.fingerprint
        return [(head_key(fingerprint, name), chunks_key(fingerprint, name)) for name in self.namespaces]

    @property
    def streams(self) -> list[str]:
        """The keys of both tenants' logs."""
        return [stream_key(self._codec.fingerprint, namespace) for namespace in self.namespaces]

    def some(self) -> list[Member]:
        """One or more of the servers."""
        return self.chance.sample(self.members, self.chance.randint(1, len(self.members)))

    def hold(self, seconds: float) -> None:
        """Let it last about so long."""
        time.sleep(seconds * self.chance.uniform(0.7, 1.3))

    @contextmanager
    def client(self, server: Redis | None = None) -> Iterator[redis.Redis]:
        """Somebody else who may do anything to Redis, by no proxy."""
        import redis

        with closing(redis.Redis.from_url((server or self.redis).url, socket_timeout=30)) as client:
            yield client

    def give_rights(self, client: redis.Redis) -> None:
        """The servers' user has the password and the rights it should have."""
        client.execute_command("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *RIGHTS)  # type: ignore[no-untyped-call]

    def restart_redis(self, *, is_empty: bool) -> None:
        """After a kill: with what it had written, or with nothing."""
        if is_empty:
            for path in self.redis.directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.redis.start()

    def new_standby(self) -> Redis:
        """Another Redis that has all that the first one has, and goes on to follow it."""
        standby = self._new_redis()
        deadline = time.monotonic() + 20
        with self.client(standby) as client:
            client.replicaof("127.0.0.1", str(self.redis.port))
            while client.info("replication").get("master_link_status") != "up":
                if time.monotonic() > deadline:
                    raise TimeoutError("the standby did not catch up")
                time.sleep(0.05)
        return standby

    def switch_to(self, standby: Redis) -> Redis:
        """The servers' new connections lead there. Returns the Redis that it was before."""
        former, self.redis = self.redis, standby
        for member in self.members:
            member.proxy.target = standby.port
        return former

    def kill_server(self, member: Member) -> None:
        """``kill -9`` in the middle of what it is doing, and a start; what was on disk before is promised."""
        member.history.promise(number for _, number in self.notes_on_disk(member))
        with member.outage():
            member.server.kill()
            member.history.end_life(in_order=False)
            member.server.start()

    def close_servers(self) -> None:
        """In order: all that was acknowledged is to be on disk."""
        for member in self.members:
            member.history.end_life(in_order=member.server.terminate())

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

    def _fill(self, key: str) -> None:
        """Enough text of random tokens that the tenant's cache is published."""
        for number in range(_FILL_TOKENS // _FILL_PROMPT):
            prompt = [self.chance.randrange(_FILL_FROM, self._codec.vocab_size) for _ in range(_FILL_PROMPT)]
            self.members[number % len(self.members)].server.post({"prompt": prompt, "max_tokens": 1}, key=key)

    def _options(self, directory: Path) -> list[str]:
        options = ["--cache-dir", str(directory), "--namespace", _BASE, "--secret-file", str(self._home / "secret")]
        options += ["--cache-tokens", str(_CACHE_TOKENS), "--rebuild-interval", "0.3"]
        return [*options, *(word for key in KEYS for word in ("--api-key", key))]

    def _new_redis(self) -> Redis:
        self._num_redis += 1
        directory = self._home / f"redis-{self._num_redis}"
        directory.mkdir(parents=True)
        user = ("--user", USER, "on", f">{PASSWORD}", *RIGHTS)
        made = Redis(directory, *_PERSISTENT, *user)
        self._stack.callback(made.kill)
        made.start()
        return made


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
