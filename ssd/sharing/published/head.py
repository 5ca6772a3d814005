"""The head of a namespace: which chunks its published text is made of, and where in the log that text ends.

::

    ssd1 <xxh3-64 of the rest, 16 digits> <fencing number, 16 digits>\\n      TAG_BYTES bytes: two heads with the same
    {"format": 1, "owner": ..., "chunks": [[name, tokens, bytes], ...], ...}   tag are the same

``mark`` is the checkpoint of the cache that published: everything in the log up to its waypoints, and everything of its
own up to a ring position, is in the chunks or was evicted (``bookmark``). So who takes the chunks takes the mark with
them, reads the log from there, and stores nothing twice. ``recent`` are the sequence ids of the last entries before it,
for logs that were emptied: a writer that was cut off writes its last entries again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import xxhash

from ssd.retrieval.cache_state import Checkpoint
from ssd.sharing.bookmark import MAX_RECENT
from ssd.sharing.published.chunk import MAX_CHUNK_BYTES, MAX_CHUNK_TOKENS

MAX_HEAD_BYTES: Final = 1 << 20
MAX_CHUNKS: Final = 1 << 13
MAX_LEARNED_BYTES: Final = 1 << 22
TAG_BYTES: Final = 39

_FORMAT: Final = 1
_TAG: Final = re.compile(rb"ssd1 ([0-9a-f]{16}) ([0-9a-f]{16})\n")
_NAME: Final = re.compile(r"[0-9a-f]{32}")


class InvalidHeadError(ValueError):
    """Bytes that are no head: damaged, of another version, or another namespace's."""


class ChunkRef(NamedTuple):
    """A chunk as a head names it."""

    name: bytes
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """``owner`` : fingerprint and namespace. ``chunks`` : the oldest text first. ``fence`` : of the lease it was
    written under. ``learned`` : name of a blob, what drafting learned beside the text. ``mark`` and ``recent`` : see
    above.
    """

    owner: bytes
    chunks: tuple[ChunkRef, ...]
    fence: int = 0
    learned: bytes | None = None
    mark: Checkpoint | None = None
    recent: tuple[bytes, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    """For people: who wrote it and when. Nothing is decided by it."""
    tag: bytes = field(default=b"", compare=False)
    """What the bytes it was read from begin with."""

    @property
    def num_tokens(self) -> int:
        """Of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_bytes(self) -> int:
        """Of all chunks."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def names(self) -> frozenset[bytes]:
        """What the store must hold for it."""
        return frozenset({chunk.name for chunk in self.chunks} | ({self.learned} if self.learned else set()))

    def to_bytes(self) -> bytes:
        """For ``from_bytes``. O(chunks)."""
        content = {
            "format": _FORMAT,
            "owner": self.owner.hex(),
            "chunks": [(chunk.name.hex(), chunk.num_tokens, chunk.num_bytes) for chunk in self.chunks],
            "learned": None if self.learned is None else self.learned.hex(),
            "mark": None if self.mark is None else self.mark.to_json(),
            "recent": b"".join(self.recent).hex(),
            "about": self.about,
        }
        body = json.dumps(content, separators=(",", ":")).encode()
        return b"ssd1 %016x %016x\n" % (_checksum(body, self.fence), self.fence) + body

    @classmethod
    def from_bytes(cls, data: bytes, *, owner: bytes) -> Head:
        """Check every property; raises InvalidHeadError."""
        tag = data[:TAG_BYTES]
        fence = fence_of(tag)
        if fence is None or len(data) > MAX_HEAD_BYTES:
            raise InvalidHeadError(f"not a head of format {_FORMAT}")
        body = data[TAG_BYTES:]
        if b"ssd1 %016x %016x\n" % (_checksum(body, fence), fence) != tag:
            raise InvalidHeadError("its checksum does not match")
        try:
            content = json.loads(body)
            if content["format"] != _FORMAT or content["owner"] != owner.hex():
                raise ValueError("another version, or another namespace's")
            if len(content["chunks"]) > MAX_CHUNKS:
                raise ValueError("too many chunks")
            chunks = tuple(_ref(*chunk) for chunk in content["chunks"])
            learned = None if content["learned"] is None else _name(content["learned"])
            recent = _recent(content.get("recent", ""))
            about = content["about"] if isinstance(content["about"], dict) else {}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidHeadError(f"what it says cannot be: {type(error).__name__}") from None
        mark = Checkpoint.from_json(content["mark"])
        return cls(
            owner=owner, chunks=chunks, fence=fence, learned=learned, mark=mark, recent=recent, about=about, tag=tag
        )


def fence_of(tag: bytes) -> int | None:
    """The fencing number in a head's first TAG_BYTES bytes; None for what begins no head."""
    match = _TAG.fullmatch(tag)
    return None if match is None else int(match[2], 16)


def newest_within(chunks: tuple[ChunkRef, ...], max_tokens: int) -> tuple[ChunkRef, ...]:
    """The last of ``chunks`` that hold at most ``max_tokens`` tokens together. O(chunks)."""
    first, num_tokens = len(chunks), 0
    while first and num_tokens + chunks[first - 1].num_tokens <= max_tokens:
        first -= 1
        num_tokens += chunks[first].num_tokens
    return chunks[first:]


def _checksum(body: bytes, fence: int) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=fence)


def _ref(name: object, num_tokens: object, num_bytes: object) -> ChunkRef:
    if type(num_tokens) is not int or not 1 <= num_tokens <= MAX_CHUNK_TOKENS:
        raise ValueError(num_tokens)
    if type(num_bytes) is not int or not 1 <= num_bytes <= MAX_CHUNK_BYTES - 6 * (MAX_CHUNK_TOKENS - num_tokens):
        raise ValueError(num_bytes)
    return ChunkRef(_name(name), num_tokens, num_bytes)


def _name(text: object) -> bytes:
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise ValueError(text)
    return bytes.fromhex(text)


def _recent(text: object) -> tuple[bytes, ...]:
    if not isinstance(text, str) or len(text) % 32 or len(text) > 32 * MAX_RECENT:
        raise ValueError(text)
    joined = bytes.fromhex(text)  # which skips blanks
    if 2 * len(joined) != len(text):
        raise ValueError(text)
    return tuple(joined[start : start + 16] for start in range(0, len(joined), 16))
