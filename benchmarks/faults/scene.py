"""Where a fault happens: a server with a durable cache, a load, and a Redis with another replica where it needs one."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.faults.history import History
from benchmarks.faults.load import Load
from benchmarks.faults.questions import Question
from benchmarks.faults.store import notes_in, notes_on_disk
from benchmarks.processes import Redis, Server
from ssd.config import CacheConfig
from ssd.retrieval.cache import CacheSet
from ssd.sharing.keys import stream_key
from ssd.sharing.redis_log import RedisLog
from ssd.text.codec import TextCodec

if TYPE_CHECKING:
    import redis

NAMESPACE = "faults"
OTHER_NAMESPACE = "elsewhere"  # followed as well, and nothing may ever arrive there

_CACHE_TOKENS = 1 << 20
_DISK_BYTES = 32 << 20
_SERVER = (
    *("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "256"),
    *("--num-speculative-tokens", "16", "--exact", "on"),
)


class SkippedError(Exception):
    """What a fault needs is not to be had here."""


def server(log: Path, *options: str) -> Server:
    """A small one, with the bundled model."""
    return Server(log, *_SERVER, *options)


class Scene:
    """A context manager. Everything starts when it is entered and ends when it is left."""

    def __init__(self, home: Path, codec: TextCodec, questions: Sequence[Question], chance: random.Random) -> None:
        self.directory = home / "cache"
        self.history = History()
        self.chance = chance
        self.is_damaged = False
        """Whether a fault destroyed files: what was in them may be missing."""
        self.is_on_small_disk = False
        self.redis: Redis | None = None
        self.server: Server
        self.load: Load
        self._home = home
        self._codec = codec
        self._questions = questions
        self._replica: CacheSet | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self, *, with_redis: bool, with_small_disk: bool) -> None:
        """Start what the faults need. Raises SkippedError."""
        self.directory.mkdir(parents=True)
        if with_small_disk:
            self._mount()
        options = ["--cache-dir", str(self.directory), "--namespace", NAMESPACE]
        options += ["--cache-tokens", str(_CACHE_TOKENS), "--rebuild-interval", "0.3"]
        if with_redis:
            options += ["--redis", self._open_redis()]
        self.server = server(self._home / "server.log", *options)
        self.load = Load(self.server, self._questions, self.history, NAMESPACE)
        self._stack.callback(self.server.kill)
        self.server.start()

    def kill_server(self) -> None:
        """``kill -9``; what it had not written is lost, and nobody may mind."""
        self.server.kill()
        self.history.end_life(in_order=False)

    def close_server(self, *, kill_after_s: float | None = None) -> None:
        """SIGTERM, and a kill if it takes longer than that."""
        is_closed = self.server.terminate(kill_after_s=kill_after_s)
        self.history.end_life(in_order=is_closed and not self.is_damaged)

    def revive_server(self) -> None:
        """If it ended by itself, start it again."""
        if self.server.revive():
            self.history.end_life(in_order=False)

    def hold(self, seconds: float) -> None:
        """Let it last about so long."""
        time.sleep(seconds * self.chance.uniform(0.7, 1.3))

    def promise_committed(self) -> None:
        """What is on disk now must be there at the end."""
        if not self.is_damaged:
            self.history.promise(number for _, number in self.notes_on_disk())

    def notes_on_disk(self) -> list[tuple[str, int]]:
        """(namespace, number) of each note in the cache directory."""
        return notes_on_disk(self.directory, self._codec, _CACHE_TOKENS)

    def notes_shared(self) -> list[tuple[str, int]]:
        """(namespace, number) of each note that the other replica received."""
        if self._replica is None:
            return []
        caches = {name: self._replica.get(name) for name in (NAMESPACE, OTHER_NAMESPACE)}
        return [(name, number) for name, cache in caches.items() for number in notes_in(cache, self._codec)]

    def sharing_returns(self, within_s: float) -> float | None:
        """Seconds until a note asked for now reaches the other replica; None if it does not."""
        begin = time.monotonic()
        number = self.load.take_note()
        while time.monotonic() - begin < within_s:
            if (NAMESPACE, number) in self.notes_shared():
                return time.monotonic() - begin
            time.sleep(0.05)
        return None

    @property
    def stream(self) -> str:
        """The key of the shared log."""
        return stream_key(self._codec.fingerprint, NAMESPACE)

    @contextmanager
    def redis_client(self) -> Iterator[redis.Redis]:
        """Somebody else who may write to Redis."""
        import redis

        assert self.redis is not None
        client = redis.Redis.from_url(self.redis.url, socket_timeout=30)
        try:
            yield client
        finally:
            client.close()

    def _open_redis(self) -> str:
        try:
            self.redis = Redis(self._home)
        except FileNotFoundError as error:
            raise SkippedError(str(error)) from None
        self._stack.callback(self.redis.kill)
        self.redis.start()
        log = RedisLog(self.redis.url, fingerprint=self._codec.fingerprint, vocab_size=self._codec.vocab_size)
        self._stack.callback(log.close)
        self._replica = CacheSet(CacheConfig(), self._codec.fingerprint, inline=True, on_open=log.attach)
        self._stack.callback(self._replica.close)
        self.notes_shared()  # opens both namespaces
        return self.redis.url

    def _mount(self) -> None:
        if shutil.which("mount") is None or not _works(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(self.directory)]
        ):
            raise SkippedError("a small disk needs the right to mount a tmpfs")
        self.is_on_small_disk = True
        self._stack.callback(_works, ["umount", "--lazy", str(self.directory)])


def _works(command: list[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


Inject = Callable[[Scene], Any]
