"""What is published of a namespace: chunks of its text, named by what they hold, and the head that orders them.

A chunk, format 1::

    offset  bytes
         0      4   "SSDc"                                       all numbers little-endian
         4      1   format version
         5      4   s, number of sequences, 1..MAX_CHUNK_TOKENS
         9      4   n, number of tokens, s..MAX_CHUNK_TOKENS
        13     16   name: xxh3-128 of whose text it is, and of lengths and tokens as they are below, not compressed
        29      -   zlib: the lengths' lower bytes, then their upper bytes; the tokens' lowest bytes, second, third,
                    fourth; 2s + 4n bytes

A chunk's name says what it holds and whose it is, so the same text of another namespace or tokenizer is another chunk,
and one that was put in another's place is refused. A sequence has at most 4,096 tokens, as an entry of the log.

Where text is cut, its content says: a sequence ends a chunk if its hash falls below its length, as a part of
`MEAN_CHUNK_TOKENS`. So text that was evicted at the beginning, or changed in the middle, changes the chunks it touches
and no others (content-defined chunking: Muthitacharoen et al., A Low-bandwidth Network File System, SOSP 2001,
section 3.1). A least length keeps repeated text from being cut everywhere.

The head, format 1::

    ssd1 <xxh3-64 of the rest, 16 digits> <its seed, 16 digits>\\n      TAG_BYTES bytes: two heads with the same
    {"format": 1, "owner": ..., "chunks": [[name, tokens, bytes], ...], ...}   tag are the same

``mark`` is the checkpoint of the cache that published: everything in the log up to its waypoints, and everything of its
own up to a ring position, is in the chunks or was evicted (``cursor``). So who takes the chunks takes the mark with
them, reads the log from there, and stores nothing twice. ``recent`` are the sequence ids of the last entries before it,
for logs that were emptied: a writer that was cut off writes its last entries again.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.retrieval.cache_state import Checkpoint
from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens
from ssd.sharing.cursor import MAX_RECENT
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS

MAX_CHUNK_TOKENS: Final = 1 << 17
"""As a chunk is at most half a megabyte before it is compressed, one is read from Redis well within a time-out."""

NAME_BYTES: Final = 16

_MAGIC: Final = b"SSDc"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sBII16s")
MAX_CHUNK_BYTES: Final = _HEADER.size + 6 * MAX_CHUNK_TOKENS + 1024  # zlib adds some bytes to each 16 KB at most


class InvalidChunkError(ValueError):
    """Bytes that are no chunk: damaged, of another version, another's, or not meant for this vocabulary."""


def owner_of(fingerprint: str, namespace: str) -> bytes:
    """Whose text it is, as names have it."""
    return f"{fingerprint}:{namespace}\0".encode()


def name_of(owner: bytes, sequences: Sequence[Tokens]) -> bytes:
    """The name of the chunk that holds ``sequences``: int32[1..MAX_ENTRY_TOKENS] each, in order. O(tokens)."""
    return _name(owner, *_columns(sequences))


def pack_chunk(owner: bytes, sequences: Sequence[Tokens]) -> bytes:
    """The bytes of a chunk. O(tokens)."""
    lengths, tokens = _columns(sequences)
    assert 1 <= len(lengths) <= len(tokens) <= MAX_CHUNK_TOKENS and lengths.max() <= MAX_ENTRY_TOKENS
    header = _HEADER.pack(_MAGIC, _VERSION, len(lengths), len(tokens), _name(owner, lengths, tokens))
    return header + zlib.compress(_planes(lengths) + _planes(tokens), 1)


def unpack_chunk(data: bytes, *, owner: bytes, name: bytes, vocab_size: int) -> list[Tokens]:
    """Check every property of a chunk, then return its sequences; raises InvalidChunkError.

    ``data`` comes from whoever can write to the store. No more than 6 bytes a token of MAX_CHUNK_TOKENS are ever
    decompressed. O(tokens).
    """
    if not _HEADER.size < len(data) <= MAX_CHUNK_BYTES:
        raise InvalidChunkError(f"{len(data)} bytes, expected {_HEADER.size + 1}..{MAX_CHUNK_BYTES}")
    magic, version, num_sequences, num_tokens, said = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise InvalidChunkError(f"not a chunk of format {_VERSION}")
    if not 1 <= num_sequences <= num_tokens <= MAX_CHUNK_TOKENS or said != name:
        raise InvalidChunkError("its header is not that of the chunk it is taken for")
    size = 2 * num_sequences + 4 * num_tokens
    inflater = zlib.decompressobj()
    try:
        planes = inflater.decompress(data[_HEADER.size :], size + 1)
    except zlib.error as error:
        raise InvalidChunkError(f"not zlib: {error}") from None
    if len(planes) != size or not inflater.eof or inflater.unused_data:
        raise InvalidChunkError(f"does not hold exactly the {num_tokens} tokens it announces")
    lengths = _from_planes(planes[: 2 * num_sequences], 2).view("<u2").reshape(-1)
    tokens = _from_planes(planes[2 * num_sequences :], 4).view("<u4").reshape(-1)
    if _name(owner, lengths, tokens) != name:
        raise InvalidChunkError("what it holds is not what its name says")
    ends = np.cumsum(lengths, dtype=np.int64)
    if lengths.min() < 1 or lengths.max() > MAX_ENTRY_TOKENS or ends[-1] != num_tokens:
        raise InvalidChunkError("the lengths of its sequences do not fit its tokens")
    if int(tokens.max()) >= vocab_size:
        raise InvalidChunkError(f"token id {tokens.max()}, the vocabulary has {vocab_size}")
    return np.split(tokens.astype(np.int32), ends[:-1])


def _columns(sequences: Sequence[Tokens]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    return np.array([len(each) for each in sequences], "<u2"), np.concatenate(sequences).astype("<u4")


def _name(owner: bytes, lengths: npt.NDArray[np.uint16], tokens: npt.NDArray[np.uint32]) -> bytes:
    digest = xxhash.xxh3_128(owner)
    digest.update(struct.pack("<I", len(lengths)))
    digest.update(lengths.data)
    digest.update(tokens.data)
    return digest.digest()


def _planes(values: npt.NDArray[np.unsignedinteger]) -> bytes:
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(planes: bytes, width: int) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(width, -1).T)


MEAN_CHUNK_TOKENS: Final = 1 << 16
LEAST_CHUNK_TOKENS: Final = 1 << 13


def parts_of(segments: Sequence[Segment]) -> Iterator[Tokens]:
    """int32[1..MAX_ENTRY_TOKENS] each: the segments' sequences as the log would have them. O(tokens)."""
    for sequence in sequences_of(segments):
        yield from split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)


def parts_of_tail(tail: Tokens) -> Iterator[Tokens]:
    """The same of sequences that each end with a separator."""
    for piece in np.split(tail, np.flatnonzero(tail == SEPARATOR)):
        sequence = piece[1:] if len(piece) and piece[0] == SEPARATOR else piece
        yield from split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)


def cut(parts: Iterable[Tokens]) -> Iterator[list[Tokens]]:
    """The chunks of ``parts``, in order: each has at most MAX_CHUNK_TOKENS tokens. O(tokens), in memory of a chunk."""
    chunk: list[Tokens] = []
    num_tokens = 0
    for part in parts:
        if num_tokens + len(part) > MAX_CHUNK_TOKENS:
            yield chunk
            chunk, num_tokens = [], 0
        chunk.append(part)
        num_tokens += len(part)
        if num_tokens >= LEAST_CHUNK_TOKENS and hash_of(part) % MEAN_CHUNK_TOKENS < len(part):
            yield chunk
            chunk, num_tokens = [], 0
    if chunk:
        yield chunk


def hash_of(part: Tokens) -> int:
    """xxh3-64 of a sequence's tokens."""
    return xxhash.xxh3_64_intdigest(part.tobytes())


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
    """``owner`` : fingerprint and namespace. ``chunks`` : the oldest text first. ``learned`` : name of a blob, what
    drafting learned beside the text. ``mark`` and ``recent`` : see above.
    """

    owner: bytes
    chunks: tuple[ChunkRef, ...]
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
        return b"ssd1 %016x %016x\n" % (_checksum(body, 0), 0) + body

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
            learned = None if content["learned"] is None else _name_in(content["learned"])
            recent = _recent(content.get("recent", ""))
            about = content["about"] if isinstance(content["about"], dict) else {}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidHeadError(f"what it says cannot be: {type(error).__name__}") from None
        mark = Checkpoint.from_json(content["mark"])
        return cls(owner=owner, chunks=chunks, learned=learned, mark=mark, recent=recent, about=about, tag=tag)


def fence_of(tag: bytes) -> int | None:
    """The seed in a head's first TAG_BYTES bytes, 0 but for former versions'; None for what begins no head."""
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
    return ChunkRef(_name_in(name), num_tokens, num_bytes)


def _name_in(text: object) -> bytes:
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
