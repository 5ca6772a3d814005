"""Where the published text of one namespace lies, in the words of those who use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

from ssd.sharing.published.chunk import MAX_CHUNK_BYTES
from ssd.sharing.published.head import MAX_LEARNED_BYTES, Head, InvalidHeadError

MAX_BLOB_BYTES: Final = max(MAX_CHUNK_BYTES, MAX_LEARNED_BYTES)


class Tags(NamedTuple):
    """What the heads of a namespace begin with, empty where there is none: a head whose tag is known is known."""

    head: bytes
    layer: bytes


class Chunks(Protocol):
    """Bytes by name, of at most MAX_BLOB_BYTES. Any call may raise what the store's library raises."""

    def get(self, name: bytes) -> bytes | None:
        """What was put there, or what somebody else wrote; None where there is nothing, or far too much."""
        ...

    def put(self, name: bytes, data: bytes) -> None:
        """Keep ``data``."""
        ...

    def names(self) -> set[bytes]:
        """All there are."""
        ...

    def remove(self, names: Iterable[bytes]) -> None:
        """Keep these no longer."""
        ...

    def clear(self) -> int:
        """Remove all; how many there were."""
        ...


class Heads(Protocol):
    """The two heads of a namespace, and the right to replace the first. Any call may raise what its library raises."""

    def tags(self) -> Tags:
        """What both begin with."""
        ...

    def read(self, *, layer: bool = False) -> bytes | None:
        """The head's bytes, or what somebody else wrote; None where there is nothing, or far too much."""
        ...

    def hold(self) -> int | None:
        """Take or renew the lease: its fencing number, None while another has it."""
        ...

    def release(self) -> None:
        """Let go of the lease, if it is held."""
        ...

    def replace(self, data: bytes) -> bool:
        """Put ``data`` in the head's place; False, changing nothing, if the lease was lost or a later one wrote."""
        ...

    def replace_layer(self, data: bytes) -> None:
        """Put ``data`` in the layer's place."""
        ...

    def clear(self) -> int:
        """Remove both, and the lease; how many things there were."""
        ...


class Store(NamedTuple):
    """Both, for the namespace that ``owner`` names."""

    owner: bytes
    heads: Heads
    chunks: Chunks

    def head(self, *, layer: bool = False) -> Head | None:
        """The head; None where there is none that can be used."""
        data = self.heads.read(layer=layer)
        try:
            return None if data is None else Head.from_bytes(data, owner=self.owner)
        except InvalidHeadError:
            return None
