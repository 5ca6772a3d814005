"""Published text in Redis: heads, lease and fencing number in keys of their own, the chunks in one hash.

All have the hash tag of the namespace. The lease is a key that expires: only Redis' clock counts, and who holds it
learns that it was lost when it next asks. A head is replaced in a transaction that fails where the lease has changed,
and never by a lease older than the one that wrote it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ssd.sharing.keys import chunks_key, fence_key, head_key, layer_key, lease_key
from ssd.sharing.pages import OversizedReplyError
from ssd.sharing.published.chunk import owner_of
from ssd.sharing.published.head import MAX_HEAD_BYTES, TAG_BYTES, fence_of
from ssd.sharing.published.store import MAX_BLOB_BYTES, Store, Tags

if TYPE_CHECKING:
    import redis

LEASE_MS: Final = 15_000
"""Three looks long: one that fails costs nobody the lease, and what a killed publisher left undone waits no longer."""

_MOST_FENCE: Final = 1 << 62


class RedisChunks:
    """A hash of chunks."""

    def __init__(self, client: redis.Redis, fingerprint: str, namespace: str) -> None:
        self._client = client
        self._key = chunks_key(fingerprint, namespace)

    def get(self, name: bytes) -> bytes | None:
        """As ``Chunks`` has it."""
        try:
            data: Any = self._client.hget(self._key, name.hex())
        except OversizedReplyError:
            return None
        return data if isinstance(data, bytes) and len(data) <= MAX_BLOB_BYTES else None

    def put(self, name: bytes, data: bytes) -> None:
        """As ``Chunks`` has it."""
        self._client.hset(self._key, name.hex(), data)

    def names(self) -> set[bytes]:
        """As ``Chunks`` has it; a hash of far too many names is removed, as no head names them."""
        try:
            found: Any = self._client.hkeys(self._key)
        except OversizedReplyError:
            self._client.delete(self._key)
            return set()
        return {name for text in found if (name := _name(text)) is not None}

    def remove(self, names: Iterable[bytes]) -> None:
        """As ``Chunks`` has it."""
        if gone := [name.hex() for name in names]:
            self._client.hdel(self._key, *gone)

    def clear(self) -> int:
        """As ``Chunks`` has it."""
        count: Any = self._client.hlen(self._key)
        self._client.delete(self._key)
        return int(count)


class RedisHeads:
    """Two keys and a lease. One owner."""

    def __init__(self, client: redis.Redis, fingerprint: str, namespace: str) -> None:
        self._client = client
        self._head = head_key(fingerprint, namespace)
        self._layer = layer_key(fingerprint, namespace)
        self._lease = lease_key(fingerprint, namespace)
        self._fence_key = fence_key(fingerprint, namespace)
        self._token = secrets.token_hex(16).encode()
        self._fence: int | None = None

    def tags(self) -> Tags:
        """As ``Heads`` has it."""
        found: list[Any] = [self._client.getrange(key, 0, TAG_BYTES - 1) for key in (self._head, self._layer)]
        return Tags(*found)

    def read(self, *, layer: bool = False) -> bytes | None:
        """As ``Heads`` has it."""
        data: Any = self._client.getrange(self._layer if layer else self._head, 0, MAX_HEAD_BYTES)
        return data if isinstance(data, bytes) and 0 < len(data) <= MAX_HEAD_BYTES else None

    def hold(self) -> int | None:
        """As ``Heads`` has it. At most three commands."""
        if self._fence is not None and self._renew():
            return self._fence
        self._fence = None
        if self._client.set(self._lease, self._token, nx=True, px=LEASE_MS):
            self._fence = self._next_fence()
        return self._fence

    def release(self) -> None:
        """As ``Heads`` has it."""
        if self._fence is not None:
            self._fence = None
            self._transact(lambda pipeline: pipeline.delete(self._lease))

    def replace(self, data: bytes) -> bool:
        """As ``Heads`` has it."""
        fence = self._fence
        if fence is None:
            return False

        def write(pipeline: Any) -> None:
            pipeline.set(self._head, data)
            pipeline.pexpire(self._lease, LEASE_MS)

        def is_older(pipeline: Any) -> bool:
            there = fence_of(pipeline.getrange(self._head, 0, TAG_BYTES - 1))
            return there is None or there <= fence or there > _MOST_FENCE

        return self._transact(write, is_older)

    def replace_layer(self, data: bytes) -> None:
        """As ``Heads`` has it."""
        self._client.set(self._layer, data)

    def clear(self) -> int:
        """As ``Heads`` has it."""
        keys = (self._head, self._layer, self._lease, self._fence_key)
        return sum(int(self._client.delete(key)) for key in keys)

    def _renew(self) -> bool:
        return self._transact(lambda pipeline: pipeline.pexpire(self._lease, LEASE_MS))

    def _next_fence(self) -> int:
        """Greater than that of the head there is, also where somebody set the counter back."""
        fence: Any = self._client.incr(self._fence_key)
        tag: Any = self._client.getrange(self._head, 0, TAG_BYTES - 1)
        there = fence_of(tag)
        if there is not None and fence <= there <= _MOST_FENCE:
            self._client.set(self._fence_key, there + 1)
            return there + 1
        return int(fence)

    def _transact(self, act: Any, check: Any = None) -> bool:
        """``act`` in a transaction, if the lease is ours and stays so until it is done."""
        from redis.exceptions import WatchError

        with self._client.pipeline() as pipeline:
            pipeline.watch(self._lease)  # type: ignore[no-untyped-call]
            if pipeline.get(self._lease) != self._token or (check is not None and not check(pipeline)):
                return False
            pipeline.multi()
            act(pipeline)
            try:
                pipeline.execute()
            except WatchError:
                return False
        return True


def redis_store(client: redis.Redis, fingerprint: str, namespace: str) -> Store:
    """All of a namespace in Redis. Nothing is sent yet."""
    return Store(
        owner_of(fingerprint, namespace),
        RedisHeads(client, fingerprint, namespace),
        RedisChunks(client, fingerprint, namespace),
    )


def _name(text: object) -> bytes | None:
    if not isinstance(text, bytes) or len(text) != 32:
        return None
    try:
        return bytes.fromhex(text.decode())
    except ValueError:
        return None
