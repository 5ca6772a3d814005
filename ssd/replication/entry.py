"""The format (version 2) of the entries of a replication log, and the names of its Redis streams.

An entry::

    offset  bytes
         0      1   format version                              all numbers little-endian
         1      8   replica id: identifies the writer; a new one each time a replica opens the namespace
         9     16   sequence id: an entry may be written twice, but is stored once; a replica's ids consist of the
                    replica id and the ring position of the text (``ssd/replication/offsets.py``)
        25      2   n, number of tokens, 1..4096
        27      8   xxh3-64 of bytes 0..26, of the stream's key and of the tokens as uint32
        35      -   zlib: the tokens' lowest bytes, then their second bytes, third, fourth; 4n bytes

The checksum covers the stream's key, so an entry is valid in its own stream only. An entry is rejected if a restore, a
damaged command or a damaged reply brings it into another namespace's stream.

The four byte planes compress better than whole tokens, because the upper two consist mostly of zeros.
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
LEAD_IN_TOKENS = 32  # the overlap of the parts of a long sequence, so that each part can be searched alone

_HEADER = struct.Struct("<B8s16sH")
_CHECKSUM = struct.Struct("<Q")
_PAYLOAD = _HEADER.size + _CHECKSUM.size
_MIN_MEAN_ENTRY_TOKENS = 64
MAX_ENTRY_BYTES = _PAYLOAD + 4 * MAX_ENTRY_TOKENS + 64  # the maximum overhead of zlib for this size


class InvalidEntryError(ValueError):
    """Raised if bytes are not a valid replication entry: damaged, or of another version, stream or vocabulary."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a replication log: a sequence of tokens, or one of the overlapping parts of a long sequence."""

    replica_id: bytes  # identifies the writer
    sequence_id: bytes
    tokens: Tokens  # int32[n], 1 <= n <= 4096


def pack_entry(entry: Entry, key: str) -> bytes:
    tokens = np.ascontiguousarray(entry.tokens, "<u4")
    assert 1 <= len(tokens) <= MAX_ENTRY_TOKENS
    header = _HEADER.pack(FORMAT_VERSION, entry.replica_id, entry.sequence_id, len(tokens))
    planes = tokens.view(np.uint8).reshape(-1, 4).T.tobytes()
    return header + _CHECKSUM.pack(_checksum(header, key, tokens)) + zlib.compress(planes, 1)


def unpack_entry(data: bytes, key: str, *, vocab_size: int) -> Entry:
    """Parse and verify an entry of the Redis stream ``key``; raise InvalidEntryError if the entry is invalid.

    ``data`` is not trusted, because anyone who can write to the Redis server may have written it. At most 16 KB are
    decompressed.
    """
    if not _PAYLOAD < len(data) <= MAX_ENTRY_BYTES:
        raise InvalidEntryError(
            f"the entry has {len(data)} bytes, but it must have {_PAYLOAD + 1} to {MAX_ENTRY_BYTES}"
        )
    version, replica_id, sequence_id, num_tokens = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise InvalidEntryError(f"the entry has format {version}, but this SSD release reads format {FORMAT_VERSION}")
    if not 1 <= num_tokens <= MAX_ENTRY_TOKENS:
        raise InvalidEntryError(f"the entry has {num_tokens} tokens, but it must have 1 to {MAX_ENTRY_TOKENS}")
    inflater = zlib.decompressobj()
    try:
        planes = inflater.decompress(data[_PAYLOAD:], 4 * num_tokens + 1)
    except zlib.error as error:
        raise InvalidEntryError(f"the entry cannot be decompressed with zlib: {error}") from None
    if len(planes) != 4 * num_tokens or not inflater.eof or inflater.unused_data:
        raise InvalidEntryError(f"the entry does not contain exactly the {num_tokens} tokens of its header")
    low, second, third, high = np.frombuffer(planes, np.uint8).reshape(4, num_tokens).astype("<u4")
    tokens = low | second << 8 | third << 16 | high << 24
    if _checksum(data[: _HEADER.size], key, tokens) != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
        raise InvalidEntryError("the entry's checksum does not match")
    if (largest := int(tokens.max())) >= vocab_size:
        raise InvalidEntryError(f"the entry has token id {largest}, but the vocabulary has only {vocab_size} tokens")
    return Entry(replica_id, sequence_id, tokens.view(np.int32))


def unverified_num_tokens(data: bytes) -> int:
    """Return the number of tokens that an unverified replication entry claims to have, to estimate the stream's size.

    An entry of another format counts as MAX_ENTRY_TOKENS.
    """
    if len(data) < _PAYLOAD or data[0] != FORMAT_VERSION:
        return MAX_ENTRY_TOKENS
    num_tokens: int = _HEADER.unpack_from(data)[3]
    return min(max(1, num_tokens), MAX_ENTRY_TOKENS)


def unverified_id(data: bytes) -> bytes | None:
    """Return the sequence id of a replication entry without verifying it; None if its size or version is wrong."""
    if not _PAYLOAD < len(data) <= MAX_ENTRY_BYTES or data[0] != FORMAT_VERSION:
        return None
    sequence_id: bytes = _HEADER.unpack_from(data)[2]
    return sequence_id


def _checksum(header: bytes, key: str, tokens: npt.NDArray[np.uint32]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join((header, key.encode(), tokens.data)))


def max_entries_of(max_tokens: int) -> int:
    """Return the maximum length, in entries, of a Redis stream that may hold ``max_tokens`` tokens.

    The limit bounds the memory of a stream with many short entries.
    """
    return max(1, max_tokens // _MIN_MEAN_ENTRY_TOKENS)


KEYS_VERSION = 1


def stream_key(fingerprint: str, namespace: str) -> str:
    """Return the key of the Redis stream through which replicas share the text of a namespace.

    Replicas share text if they have the same namespace and tokenizer (``fingerprint``). The part of the key in braces
    is a hash tag, so that the namespace's stream is on one node of a cluster.
    """
    return f"ssd:{KEYS_VERSION}:{{{fingerprint}:{namespace}}}"
