"""What things are called in Redis, and one entry of a shared log, format 2.

The part of a stream's key in braces says where a cluster keeps it. An entry::

    offset  bytes
         0      1   format version                              all numbers little-endian
         1      8   replica id: who wrote it, another one each time a replica opens the namespace
         9     16   sequence id: an entry may be written twice, it is stored once; a replica's are made of the
                    replica id and the ring position of the text (``ssd/sharing/cursor.py``)
        25      2   n, number of tokens, 1..4096
        27      8   xxh3-64 of bytes 0..26, of the stream's key and of the tokens as uint32
        35      -   zlib: the tokens' lowest bytes, then their second bytes, third, fourth; 4n bytes

The key is in the checksum so that an entry is one in its own stream alone: what a restore, a damaged command or a
damaged answer brings into another namespace's is none there.

The four byte planes compress better than whole tokens: the upper two are mostly zero.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.retrieval.segment import Tokens

FORMAT_VERSION = 2
MAX_ENTRY_TOKENS = 4096
LEAD_IN_TOKENS = 32
"""A longer sequence is cut into entries that overlap by this much, so that each can be searched alone."""

_HEADER = struct.Struct("<B8s16sH")
_CHECKSUM = struct.Struct("<Q")
_PAYLOAD = _HEADER.size + _CHECKSUM.size
_MIN_MEAN_ENTRY_TOKENS = 64
MAX_ENTRY_BYTES = _PAYLOAD + 4 * MAX_ENTRY_TOKENS + 64  # zlib never adds more to so little


class InvalidEntryError(ValueError):
    """Bytes that are no entry: damaged, of another version or stream, or not meant for this vocabulary."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``tokens`` : int32[n], 1 <= n <= 4096, a text that can be searched alone."""

    replica_id: bytes
    sequence_id: bytes
    tokens: Tokens


def pack_entry(entry: Entry, key: str) -> bytes:
    """The bytes of an entry for the stream ``key``. O(n)."""
    tokens = np.ascontiguousarray(entry.tokens, "<u4")
    assert 1 <= len(tokens) <= MAX_ENTRY_TOKENS
    header = _HEADER.pack(FORMAT_VERSION, entry.replica_id, entry.sequence_id, len(tokens))
    planes = tokens.view(np.uint8).reshape(-1, 4).T.tobytes()
    return header + _CHECKSUM.pack(_checksum(header, key, tokens)) + zlib.compress(planes, 1)


def unpack_entry(data: bytes, key: str, *, vocab_size: int) -> Entry:
    """Check every property of an entry of the stream ``key``, then return it; raises InvalidEntryError.

    ``data`` comes from whoever can write to the Redis server. No more than 16 KB is ever decompressed.
    """
    if not _PAYLOAD < len(data) <= MAX_ENTRY_BYTES:
        raise InvalidEntryError(f"{len(data)} bytes, expected {_PAYLOAD + 1}..{MAX_ENTRY_BYTES}")
    version, replica_id, sequence_id, num_tokens = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise InvalidEntryError(f"format {version}, expected {FORMAT_VERSION}")
    if not 1 <= num_tokens <= MAX_ENTRY_TOKENS:
        raise InvalidEntryError(f"{num_tokens} tokens, expected 1..{MAX_ENTRY_TOKENS}")
    inflater = zlib.decompressobj()
    try:
        planes = inflater.decompress(data[_PAYLOAD:], 4 * num_tokens + 1)
    except zlib.error as error:
        raise InvalidEntryError(f"not zlib: {error}") from None
    if len(planes) != 4 * num_tokens or not inflater.eof or inflater.unused_data:
        raise InvalidEntryError(f"does not hold exactly the {num_tokens} tokens it announces")
    low, second, third, high = np.frombuffer(planes, np.uint8).reshape(4, num_tokens).astype("<u4")
    tokens = low | second << 8 | third << 16 | high << 24
    if _checksum(data[: _HEADER.size], key, tokens) != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
        raise InvalidEntryError("its checksum does not match")
    if (largest := int(tokens.max())) >= vocab_size:
        raise InvalidEntryError(f"token id {largest}, the vocabulary has {vocab_size}")
    return Entry(replica_id, sequence_id, tokens.view(np.int32))


def num_tokens_of(data: bytes) -> int:
    """Tokens an entry announces, for bounding the log; whatever cannot be an entry counts as a full one."""
    if len(data) < _PAYLOAD or data[0] != FORMAT_VERSION:
        return MAX_ENTRY_TOKENS
    num_tokens: int = _HEADER.unpack_from(data)[3]
    return min(max(1, num_tokens), MAX_ENTRY_TOKENS)


def announced_id(data: bytes) -> bytes | None:
    """The sequence id that an entry announces, of which nothing is checked; None for what cannot be an entry."""
    if not _PAYLOAD < len(data) <= MAX_ENTRY_BYTES or data[0] != FORMAT_VERSION:
        return None
    sequence_id: bytes = _HEADER.unpack_from(data)[2]
    return sequence_id


def _checksum(header: bytes, key: str, tokens: npt.NDArray[np.uint32]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join((header, key.encode(), tokens.data)))


def max_entries_of(max_tokens: int) -> int:
    """Most entries of a stream: its bound in tokens, for entries of a small mean length."""
    return max(1, max_tokens // _MIN_MEAN_ENTRY_TOKENS)


KEYS_VERSION = 1


def stream_key(fingerprint: str, namespace: str) -> str:
    """The stream that replicas append to what they completed.

    They share exactly when the tokenizer, by its fingerprint, and the namespace are the same.
    """
    return f"ssd:{KEYS_VERSION}:{{{fingerprint}:{namespace}}}"
