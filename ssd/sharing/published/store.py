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
from abc import ABC, abstractmethod
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
    NAME_BYTES,
    TAG_BYTES,
    Head,
    InvalidHeadError,
    owner_of,
)
from ssd.sharing.stream import OversizedReplyError, ask_all

if TYPE_CHECKING:
    import redis


MAX_BLOB_BYTES: Final = max(MAX_CHUNK_BYTES, MAX_LEARNED_BYTES)
LEASE_MS: Final = 30_000
"""Three looks at least: one that fails costs nobody the lease, and a killed publisher's work waits no longer."""

_MAX_NAMES: Final = 1 << 17
_DIGITS: Final = frozenset(b"0123456789abcdef")


class Tags(NamedTuple):
    """What the heads of a namespace begin with, empty where there is none: a head whose tag is known is known."""

    head: bytes
    layer: bytes


class Store(ABC):
    """What is published of one namespace. One owner; any call may raise what redis-py or a file system's library does.

    ``owner`` : fingerprint and namespace, as names have it.
    """

    def __init__(self, fingerprint: str, namespace: str) -> None:
        self.owner = owner_of(fingerprint, namespace)

    def head(self, *, layer: bool = False) -> Head | None:
        """The head, or that of the layer; None where there is none that can be used."""
        data = self.read(layer=layer)
        try:
            return None if data is None else Head.from_bytes(data, owner=self.owner)
        except InvalidHeadError:
            return None

    @abstractmethod
    def tags(self) -> Tags:
        """What both heads begin with."""

    @abstractmethod
    def read(self, *, layer: bool = False) -> bytes | None:
        """A head's bytes, or what somebody else wrote; None where there is nothing, or far too much."""

    @abstractmethod
    def replace(self, data: bytes) -> bool:
        """Put ``data`` in the head's place; False, changing nothing, if the lease was lost."""

    @abstractmethod
    def replace_layer(self, data: bytes) -> None:
        """Put ``data`` in the layer's place."""

    def hold(self) -> bool:
        """Take or renew the lease, the right to replace the head; False while another has it. At most two exchanges."""
        return True

    def renew(self) -> bool:
        """Keep the lease; False if it was lost since ``hold``."""
        return True

    def release(self) -> None:  # noqa: B027
        """Let go of the lease, if it is held."""

    @abstractmethod
    def get(self, name: bytes) -> bytes | None:
        """The chunk put there, or what somebody else wrote; None where there is nothing, or far too much."""

    @abstractmethod
    def put(self, name: bytes, data: bytes) -> None:
        """Keep ``data``, at most MAX_BLOB_BYTES, as the chunk ``name``."""

    @abstractmethod
    def names(self) -> set[bytes]:
        """Those of all chunks there are."""

    @abstractmethod
    def remove(self, names: Iterable[bytes]) -> None:
        """Keep these chunks no longer."""

    @abstractmethod
    def clear(self) -> int:
        """Remove all, and the lease; how many things there were."""


class RedisStore(Store):
    """Heads in a key each, chunks in a hash."""

    def __init__(self, client: redis.Redis, fingerprint: str, namespace: str) -> None:
        super().__init__(fingerprint, namespace)
        self._client = client
        self._chunks = chunks_key(fingerprint, namespace)
        self._head = head_key(fingerprint, namespace)
        self._layer = layer_key(fingerprint, namespace)
        self._lease = lease_key(fingerprint, namespace)
        self._former = fence_key(fingerprint, namespace)
        self._token = secrets.token_hex(16).encode()
        self._holds = False

    def tags(self) -> Tags:
        keys = (self._head, self._layer)
        return Tags(*ask_all(self._client, [("GETRANGE", key, 0, TAG_BYTES - 1) for key in keys]))

    def read(self, *, layer: bool = False) -> bytes | None:
        data: Any = self._client.getrange(self._layer if layer else self._head, 0, MAX_HEAD_BYTES)
        return data if isinstance(data, bytes) and 0 < len(data) <= MAX_HEAD_BYTES else None

    def replace(self, data: bytes) -> bool:
        def write(pipeline: Any) -> None:
            pipeline.set(self._head, data)
            pipeline.pexpire(self._lease, LEASE_MS)

        return self._transact(write)

    def replace_layer(self, data: bytes) -> None:
        self._client.set(self._layer, data)

    def hold(self) -> bool:
        if not self._holds or not self.renew():
            self._holds = bool(self._client.set(self._lease, self._token, nx=True, px=LEASE_MS))
        return self._holds

    def renew(self) -> bool:
        return self._transact(lambda pipeline: pipeline.pexpire(self._lease, LEASE_MS))

    def release(self) -> None:
        if self._holds:
            self._holds = False
            self._transact(lambda pipeline: pipeline.delete(self._lease))

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

    def get(self, name: bytes) -> bytes | None:
        try:
            data: Any = self._client.hget(self._chunks, name.hex())
        except OversizedReplyError:
            return None
        return data if isinstance(data, bytes) and len(data) <= MAX_BLOB_BYTES else None

    def put(self, name: bytes, data: bytes) -> None:
        self._client.hset(self._chunks, name.hex(), data)

    def names(self) -> set[bytes]:
        try:
            found: Any = self._client.hkeys(self._chunks)
        except OversizedReplyError:  # far too many, and no head names them
            self._client.delete(self._chunks)
            return set()
        return set(map(_from_hex, filter(_is_name, found)))

    def remove(self, names: Iterable[bytes]) -> None:
        if gone := [name.hex() for name in names]:
            self._client.hdel(self._chunks, *gone)

    def clear(self) -> int:
        num_chunks: Any = self._client.hlen(self._chunks)
        self._client.delete(self._chunks)
        keys = (self._head, self._layer, self._lease, self._former)
        return int(num_chunks) + sum(int(self._client.delete(key)) for key in keys)


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


class UrlStore(Store):
    """Heads and chunks as files, and no lease: everybody may write."""

    def __init__(self, place: Place, fingerprint: str, namespace: str) -> None:
        super().__init__(fingerprint, namespace)
        self._files, self._is_local = place.files, place.is_local
        self._directory = f"{place.path}/{fingerprint}/{namespace}"
        self._chunks = f"{self._directory}/chunks"

    def tags(self) -> Tags:
        return Tags(*(self._read(name, TAG_BYTES) or b"" for name in ("head", "layer")))

    def read(self, *, layer: bool = False) -> bytes | None:
        return _at_most(MAX_HEAD_BYTES, self._read("layer" if layer else "head", MAX_HEAD_BYTES + 1))

    def replace(self, data: bytes) -> bool:
        self._write("head", data)
        return True

    def replace_layer(self, data: bytes) -> None:
        self._write("layer", data)

    def get(self, name: bytes) -> bytes | None:
        return _at_most(MAX_BLOB_BYTES, self._read(f"chunks/{name.hex()}", MAX_BLOB_BYTES + 1))

    def put(self, name: bytes, data: bytes) -> None:
        self._write(f"chunks/{name.hex()}", data)

    def names(self) -> set[bytes]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._chunks, detail=False)
        except FileNotFoundError:
            return set()
        names = (path.rpartition("/")[2].encode() for path in paths[:_MAX_NAMES])
        return set(map(_from_hex, filter(_is_name, names)))

    def remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._remove(f"chunks/{name.hex()}")

    def clear(self) -> int:
        removed = [self._remove(name) for name in ("head", "layer")]
        removed += [self._remove(f"chunks/{name.hex()}") for name in self.names()]
        for directory in (self._chunks, self._directory):
            try:
                self._files.rmdir(directory)
            except OSError:  # it is not there, or something else is in it
                break
        return sum(removed)

    def _read(self, name: str, num_bytes: int) -> bytes | None:
        try:
            with self._files.open(f"{self._directory}/{name}", "rb", cache_type="none") as file:
                data: bytes = file.read(num_bytes)
                return data
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes) -> None:
        path = f"{self._directory}/{name}"
        if self._is_local:
            make_directory(Path(path).parent)
            write_file(Path(path), [data], durable=True)
        else:
            self._files.pipe_file(path, data)

    def _remove(self, name: str) -> bool:
        path = f"{self._directory}/{name}"
        try:
            self._files.rm_file(path)
        except OSError:
            if self._files.exists(path):
                raise
            return False
        return True


class SplitStore(RedisStore):
    """Heads in Redis, chunks at a URL."""

    def __init__(self, client: redis.Redis, place: Place, fingerprint: str, namespace: str) -> None:
        super().__init__(client, fingerprint, namespace)
        self._elsewhere = UrlStore(place, fingerprint, namespace)

    def get(self, name: bytes) -> bytes | None:
        return self._elsewhere.get(name)

    def put(self, name: bytes, data: bytes) -> None:
        self._elsewhere.put(name, data)

    def names(self) -> set[bytes]:
        return self._elsewhere.names()

    def remove(self, names: Iterable[bytes]) -> None:
        self._elsewhere.remove(names)

    def clear(self) -> int:
        return super().clear() + self._elsewhere.clear()


def store_at(client: redis.Redis | None, place: Place | None, fingerprint: str, namespace: str) -> Store:
    """Where a namespace is published: heads in Redis where there is a client, chunks at a URL where there is one.

    One of them must be. Nothing is sent yet.
    """
    if client is None:
        assert place is not None
        return UrlStore(place, fingerprint, namespace)
    if place is None:
        return RedisStore(client, fingerprint, namespace)
    return SplitStore(client, place, fingerprint, namespace)


def _at_most(num_bytes: int, data: bytes | None) -> bytes | None:
    return None if data is None or len(data) > num_bytes else data


def _is_name(text: object) -> bool:
    return isinstance(text, bytes) and len(text) == 2 * NAME_BYTES and not set(text) - _DIGITS


def _from_hex(text: bytes) -> bytes:
    return bytes.fromhex(text.decode())
