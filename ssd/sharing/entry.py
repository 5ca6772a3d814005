"""What things are called in Redis, and one entry of a shared log, format 2.

All keys of one namespace have the same hash tag, the part in braces, so that a cluster keeps them on one node and a
transaction over several of them is possible. An entry::

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

from ssd.compiled.addresses import kernel
from ssd.retrieval.segment import Bytes, Tokens

FORMAT_VERSION = 2
MAX_ENTRY_TOKENS = 4096
LEAD_IN_TOKENS = 32
"""A longer sequence is cut into entries that overlap by this much, so that each can be searched alone."""

_HEADER = struct.Struct("<B8s16sH")
_CHECKSUM = struct.Struct("<Q")
_PAYLOAD = _HEADER.size + _CHECKSUM.size
MAX_ENTRY_BYTES = _PAYLOAD + 4 * MAX_ENTRY_TOKENS + 64  # zlib never adds more to so little


class InvalidEntryError(ValueError):
    """Bytes that are no entry: damaged, of another version or stream, or not meant for this vocabulary.

    ``kind`` : one of ``refusals.INVALID``.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


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
        raise InvalidEntryError("size", f"{len(data)} bytes, expected {_PAYLOAD + 1}..{MAX_ENTRY_BYTES}")
    version, replica_id, sequence_id, num_tokens = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise InvalidEntryError("format", f"format {version}, expected {FORMAT_VERSION}")
    if not 1 <= num_tokens <= MAX_ENTRY_TOKENS:
        raise InvalidEntryError("format", f"{num_tokens} tokens, expected 1..{MAX_ENTRY_TOKENS}")
    inflater = zlib.decompressobj()
    try:
        planes = inflater.decompress(data[_PAYLOAD:], 4 * num_tokens + 1)
    except zlib.error as error:
        raise InvalidEntryError("damaged", f"not zlib: {error}") from None
    if len(planes) != 4 * num_tokens or not inflater.eof or inflater.unused_data:
        raise InvalidEntryError("damaged", f"does not hold exactly the {num_tokens} tokens it announces")
    tokens = np.empty(num_tokens, np.uint32)
    largest = join_planes(np.frombuffer(planes, np.uint8), tokens)
    if _checksum(data[: _HEADER.size], key, tokens) != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
        raise InvalidEntryError("checksum", "its checksum does not match")
    if largest >= vocab_size:
        raise InvalidEntryError("vocabulary", f"token id {largest}, the vocabulary has {vocab_size}")
    return Entry(replica_id, sequence_id, tokens.view(np.int32))


@kernel
def join_planes(planes: Bytes, tokens: npt.NDArray[np.uint32]) -> int:
    """Fill ``tokens`` : uint32[n], n >= 1, from ``planes`` : uint8[4n], their lowest bytes, then their second, third
    and highest ones. Returns the largest token. O(n): numpy takes the strided copy a byte at a time.
    """
    n, largest = len(tokens), np.uint32(0)
    for i in range(n):
        low = np.uint32(planes[i]) | np.uint32(planes[n + i]) << np.uint32(8)
        high = np.uint32(planes[2 * n + i]) | np.uint32(planes[3 * n + i]) << np.uint32(8)
        tokens[i] = low | high << np.uint32(16)
        largest = max(largest, tokens[i])
    return int(largest)


def warm_up_entries() -> None:
    """Compile what opens an entry, so that the first one that arrives compiles nothing beside running requests."""
    join_planes(np.frombuffer(bytes(4), np.uint8), np.empty(1, np.uint32))


def num_tokens_of(data: bytes) -> int:
    """Tokens an entry announces, for bounding the log; whatever cannot be an entry counts as a full one."""
    if len(data) < _PAYLOAD or data[0] != FORMAT_VERSION:
        return MAX_ENTRY_TOKENS
    num_tokens: int = _HEADER.unpack_from(data)[3]
    return min(max(1, num_tokens), MAX_ENTRY_TOKENS)


def _checksum(header: bytes, key: str, tokens: npt.NDArray[np.uint32]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join((header, key.encode(), tokens.data)))


KEYS_VERSION = 1


def namespace_key(fingerprint: str, namespace: str) -> str:
    """What the names of all keys of a namespace begin with.

    Replicas share exactly when the tokenizer, by its fingerprint, and the namespace are the same.
    """
    return f"ssd:{KEYS_VERSION}:{{{fingerprint}:{namespace}}}"


def stream_key(fingerprint: str, namespace: str) -> str:
    """The stream that replicas append to what they completed."""
    return namespace_key(fingerprint, namespace)


def head_key(fingerprint: str, namespace: str) -> str:
    """The head of the text that a replica published (``published.format``)."""
    return namespace_key(fingerprint, namespace) + ":head"


def layer_key(fingerprint: str, namespace: str) -> str:
    """The head of the text that was pushed: searched by all, evicted by none."""
    return namespace_key(fingerprint, namespace) + ":layer"


def chunks_key(fingerprint: str, namespace: str) -> str:
    """The hash of both heads' chunks, by name."""
    return namespace_key(fingerprint, namespace) + ":chunks"


def lease_key(fingerprint: str, namespace: str) -> str:
    """Who publishes, for as long as the key lives."""
    return namespace_key(fingerprint, namespace) + ":lease"


def fence_key(fingerprint: str, namespace: str) -> str:
    """What former versions counted leases with; removed with the rest."""
    return namespace_key(fingerprint, namespace) + ":fence"


def purge_key(fingerprint: str, namespace: str) -> str:
    """A demand to forget the namespace (``published.published``)."""
    return namespace_key(fingerprint, namespace) + ":purge"


def heartbeat_key(fingerprint: str, namespace: str, member: str) -> str:
    """What the server ``member`` says of a namespace that it has open."""
    return f"{namespace_key(fingerprint, namespace)}:member:{member}"


def all_keys(fingerprint: str, namespace: str) -> list[str]:
    """Every key that holds something a namespace said, or says who may publish it."""
    named = (stream_key, head_key, layer_key, chunks_key, lease_key, fence_key)
    return [key(fingerprint, namespace) for key in named]
