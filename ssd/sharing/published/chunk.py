"""One chunk of published text, format 1.

::

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
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.retrieval.packed import Tokens
from ssd.sharing.entry import MAX_ENTRY_TOKENS

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
