"""Where the published text of one namespace lies, in the words of those who use it: in Redis, or at an fsspec URL.

In Redis all keys have the hash tag of the namespace. The lease is a key that expires: only Redis' clock counts, and who
holds it learns that it was lost when it next asks. A head is replaced in a transaction that fails where the lease has
changed. At a URL (a directory, a bucket)::

    <URL>/<fingerprint>/<namespace>/chunks/<name>       written once, whole or not at all
    <URL>/<fingerprint>/<namespace>/head, layer         where there is no Redis

Who can write there can change what is drafted, never what is said: all that is read is checked. Without Redis there is
no lease: the head that was written last counts, and whoever finds that it is another's takes what it lacks before it
writes again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ssd.errors import ConfigError, first_line
from ssd.retrieval.files import make_directory, write_file
from ssd.sharing.entry import chunks_key, fence_key, head_key, layer_key, lease_key
from ssd.sharing.published.format import (
    MAX_CHUNK_BYTES,
    MAX_HEAD_BYTES,
    MAX_LEARNED_BYTES,
    TAG_BYTES,
    Head,
    InvalidHeadError,
    owner_of,
)
from ssd.sharing.stream import OversizedReplyError, ask_all

if TYPE_CHECKING:
    import redis


MAX_BLOB_BYTES: Final = max(MAX_CHUNK_BYTES, MAX_LEARNED_BYTES)


class Tags(NamedTuple):
    """What the heads of a namespace begin with, empty where there is none: a head whose tag is known is known."""

    head: bytes
    layer: bytes


LEASE_MS: Final = 30_000
"""Three looks at least: one that fails costs nobody the lease, and a killed publisher's work waits no longer."""


class RedisChunks:
    """A hash of chunks: bytes by name, of at most MAX_BLOB_BYTES. Any call may raise what redis-py raises."""

    def __init__(self, client: redis.Redis, fingerprint: str, namespace: str) -> None:
        self._client = client
        self._key = chunks_key(fingerprint, namespace)

    def get(self, name: bytes) -> bytes | None:
        """What was put there, or what somebody else wrote; None where there is nothing, or far too much."""
        try:
            data: Any = self._client.hget(self._key, name.hex())
        except OversizedReplyError:
            return None
        return data if isinstance(data, bytes) and len(data) <= MAX_BLOB_BYTES else None

    def put(self, name: bytes, data: bytes) -> None:
        """Keep ``data``."""
        self._client.hset(self._key, name.hex(), data)

    def names(self) -> set[bytes]:
        """All there are; a hash of far too many names is removed, as no head names them."""
        try:
            found: Any = self._client.hkeys(self._key)
        except OversizedReplyError:
            self._client.delete(self._key)
            return set()
        return {name for text in found if (name := _name(text)) is not None}

    def remove(self, names: Iterable[bytes]) -> None:
        """Keep these no longer."""
        if gone := [name.hex() for name in names]:
            self._client.hdel(self._key, *gone)

    def clear(self) -> int:
        """Remove all; how many there were."""
        count: Any = self._client.hlen(self._key)
        self._client.delete(self._key)
        return int(count)


class RedisHeads:
    """The two heads of a namespace in a key each, and a lease: the right to replace the first. One owner."""

    def __init__(self, client: redis.Redis, fingerprint: str, namespace: str) -> None:
        self._client = client
        self._head = head_key(fingerprint, namespace)
        self._layer = layer_key(fingerprint, namespace)
        self._lease = lease_key(fingerprint, namespace)
        self._former = fence_key(fingerprint, namespace)
        self._token = secrets.token_hex(16).encode()
        self._holds = False

    def tags(self) -> Tags:
        """What both begin with."""
        keys = (self._head, self._layer)
        return Tags(*ask_all(self._client, [("GETRANGE", key, 0, TAG_BYTES - 1) for key in keys]))

    def read(self, *, layer: bool = False) -> bytes | None:
        """The head's bytes, or what somebody else wrote; None where there is nothing, or far too much."""
        data: Any = self._client.getrange(self._layer if layer else self._head, 0, MAX_HEAD_BYTES)
        return data if isinstance(data, bytes) and 0 < len(data) <= MAX_HEAD_BYTES else None

    def hold(self) -> bool:
        """Take or renew the lease; False while another has it. At most two exchanges."""
        if not self._holds or not self.renew():
            self._holds = bool(self._client.set(self._lease, self._token, nx=True, px=LEASE_MS))
        return self._holds

    def renew(self) -> bool:
        """Keep the lease; False if it was lost since ``hold``."""
        return self._transact(lambda pipeline: pipeline.pexpire(self._lease, LEASE_MS))

    def release(self) -> None:
        """Let go of the lease, if it is held."""
        if self._holds:
            self._holds = False
            self._transact(lambda pipeline: pipeline.delete(self._lease))

    def replace(self, data: bytes) -> bool:
        """Put ``data`` in the head's place; False, changing nothing, if the lease was lost."""

        def write(pipeline: Any) -> None:
            pipeline.set(self._head, data)
            pipeline.pexpire(self._lease, LEASE_MS)

        return self._transact(write)

    def replace_layer(self, data: bytes) -> None:
        """Put ``data`` in the layer's place."""
        self._client.set(self._layer, data)

    def clear(self) -> int:
        """Remove both, and the lease; how many things there were."""
        keys = (self._head, self._layer, self._lease, self._former)
        return sum(int(self._client.delete(key)) for key in keys)

    def _transact(self, act: Callable[[Any], object]) -> bool:
        """``act`` in a transaction, if the lease is ours and stays so until it is done."""
        from redis.exceptions import WatchError

        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(self._lease)  # type: ignore[no-untyped-call]
            if pipeline.get(self._lease) != self._token:
                return False
            pipeline.multi()
            act(pipeline)
            try:
                pipeline.execute()
            except WatchError:
                return False
        return True


def _name(text: object) -> bytes | None:
    if not isinstance(text, bytes) or len(text) != 32:
        return None
    try:
        return bytes.fromhex(text.decode())
    except ValueError:
        return None


_MAX_NAMES: Final = 1 << 17


class Place(NamedTuple):
    """A file system and a path in it. ``is_local`` : files of this machine, which are written as our own are."""

    files: Any
    path: str
    is_local: bool


def open_place(url: str) -> Place:
    """Where ``url`` leads. Nothing is looked at yet. Raises ConfigError."""
    try:
        import fsspec
    except ModuleNotFoundError:
        raise ConfigError("publishing to a URL needs fsspec: pip install 'ssd-serving[store]'") from None
    try:
        files, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except Exception as error:  # an unknown protocol, a package that is not installed
        raise ConfigError(f"{url.split('?')[0]!r} cannot be published to: {first_line(error)}") from None
    protocols = files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)
    return Place(files, path.rstrip("/"), "file" in protocols)


class UrlChunks:
    """Chunks as files. Any call may raise what the file system's library raises."""

    def __init__(self, place: Place, fingerprint: str, namespace: str) -> None:
        self._place = place
        self._path = f"{place.path}/{fingerprint}/{namespace}/chunks"

    def get(self, name: bytes) -> bytes | None:
        """As in Redis."""
        return _read(self._place, f"{self._path}/{name.hex()}", MAX_BLOB_BYTES)

    def put(self, name: bytes, data: bytes) -> None:
        """As in Redis."""
        _write(self._place, f"{self._path}/{name.hex()}", data)

    def names(self) -> set[bytes]:
        """As in Redis."""
        self._place.files.invalidate_cache()
        try:
            paths = self._place.files.ls(self._path, detail=False)
        except FileNotFoundError:
            return set()
        names = (path.rpartition("/")[2] for path in paths[:_MAX_NAMES])
        return {bytes.fromhex(name) for name in names if len(name) == 32 and not set(name) - _DIGITS}

    def remove(self, names: Iterable[bytes]) -> None:
        """As in Redis."""
        for name in names:
            _remove(self._place, f"{self._path}/{name.hex()}")

    def clear(self) -> int:
        """As in Redis."""
        names = self.names()
        self.remove(names)
        _remove(self._place, self._path, is_directory=True)
        return len(names)


class UrlHeads:
    """Both heads as files, and no lease. One owner."""

    def __init__(self, place: Place, fingerprint: str, namespace: str) -> None:
        self._place = place
        self._directory = f"{place.path}/{fingerprint}/{namespace}"

    def tags(self) -> Tags:
        """As in Redis."""
        return Tags(*((_read_from(self._place, path, TAG_BYTES) or b"") for path in self._paths()))

    def read(self, *, layer: bool = False) -> bytes | None:
        """As in Redis."""
        return _read(self._place, self._paths()[layer], MAX_HEAD_BYTES)

    def hold(self) -> bool:
        """As in Redis, but everybody may write."""
        return True

    def renew(self) -> bool:
        """As in Redis, but everybody may write."""
        return True

    def release(self) -> None:
        """As in Redis."""

    def replace(self, data: bytes) -> bool:
        """As in Redis."""
        _write(self._place, self._paths()[0], data)
        return True

    def replace_layer(self, data: bytes) -> None:
        """As in Redis."""
        _write(self._place, self._paths()[1], data)

    def clear(self) -> int:
        """As in Redis."""
        count = sum(_remove(self._place, path) for path in self._paths())
        _remove(self._place, self._directory, is_directory=True)
        return count

    def _paths(self) -> tuple[str, str]:
        return f"{self._directory}/head", f"{self._directory}/layer"


class Store(NamedTuple):
    """Both, for the namespace that ``owner`` names."""

    owner: bytes
    heads: RedisHeads | UrlHeads
    chunks: RedisChunks | UrlChunks

    def head(self, *, layer: bool = False) -> Head | None:
        """The head; None where there is none that can be used."""
        data = self.heads.read(layer=layer)
        try:
            return None if data is None else Head.from_bytes(data, owner=self.owner)
        except InvalidHeadError:
            return None


def redis_store(client: redis.Redis, fingerprint: str, namespace: str) -> Store:
    """All of a namespace in Redis. Nothing is sent yet."""
    return Store(
        owner_of(fingerprint, namespace),
        RedisHeads(client, fingerprint, namespace),
        RedisChunks(client, fingerprint, namespace),
    )


def url_store(place: Place, fingerprint: str, namespace: str) -> Store:
    """All of a namespace at a URL."""
    heads, chunks = UrlHeads(place, fingerprint, namespace), UrlChunks(place, fingerprint, namespace)
    return Store(owner_of(fingerprint, namespace), heads, chunks)


_DIGITS: Final = frozenset("0123456789abcdef")


def _read(place: Place, path: str, most_bytes: int) -> bytes | None:
    """All of a file; None where there is none, or it has more than ``most_bytes``."""
    data = _read_from(place, path, most_bytes + 1)
    return None if data is None or len(data) > most_bytes else data


def _read_from(place: Place, path: str, num_bytes: int) -> bytes | None:
    try:
        with place.files.open(path, "rb", cache_type="none") as file:
            data: bytes = file.read(num_bytes)
            return data
    except FileNotFoundError:
        return None


def _write(place: Place, path: str, data: bytes) -> None:
    if place.is_local:
        make_directory(Path(path).parent)
        write_file(Path(path), [data], durable=True)
    else:
        place.files.pipe_file(path, data)


def _remove(place: Place, path: str, *, is_directory: bool = False) -> bool:
    try:
        place.files.rmdir(path) if is_directory else place.files.rm_file(path)
    except OSError:
        if is_directory or not place.files.exists(path):
            return False
        raise
    return True
