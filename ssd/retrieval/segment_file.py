"""Segment files, format 1: written once, memory-mapped by readers, the only form segments travel in.

::

    offset  bytes
         0      8   magic "SSDSEGM" and a line feed
         8      4   format version                     all numbers little-endian
        12      4   header length, 256
        16      8   n, number of tokens, separators included
        24      8   absolute ring position of the first token; 0 when static
        32      4   flags: 1 = static
        36      4   zero
        40      8   xxh3-64 of the tokens
        48      8   xxh3-64 of the suffixes
        56     32   tokenizer fingerprint, ASCII hexadecimal
        88     64   namespace, ASCII, zero-padded
       152     64   segment id, ASCII, zero-padded
       216     32   zero
       248      8   xxh3-64 of bytes 0..247
       256     4n   tokens, int32
    next multiple of 64
                4n  suffixes, int32; the file ends here
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import FormatVersion, SegmentCorrupt, TokenizerMismatch
from ssd.retrieval.snapshot import SEPARATOR, Segment

FORMAT_VERSION = 1

_MAGIC = b"SSDSEGM\n"
_HEADER = struct.Struct("<8sIIQQIIQQ32s64s64s32x")
_CHECKSUM = struct.Struct("<Q")
_HEADER_LENGTH = 256
_ALIGNMENT = 64
_STATIC = 1
_MAX_TOKENS = (1 << 31) - 1  # suffixes are int32

assert _HEADER.size + _CHECKSUM.size == _HEADER_LENGTH


def segment_file_size(num_tokens: int) -> int:
    """Bytes a segment file of ``num_tokens`` tokens has."""
    return _suffixes_offset(num_tokens) + 4 * num_tokens


def _suffixes_offset(num_tokens: int) -> int:
    return -(-(_HEADER_LENGTH + 4 * num_tokens) // _ALIGNMENT) * _ALIGNMENT


def write_segment(path: Path, segment: Segment, *, fingerprint: str, namespace: str, durable: bool = True) -> None:
    """Write ``segment`` to ``path``, which appears whole or not at all; raises OSError.

    The bytes go to a temporary name in the same directory, which is renamed. ``durable`` : file and directory are
    synced to disk, so that it survives a power failure; without, only a crash of the process.
    """
    tokens = np.ascontiguousarray(segment.tokens, "<i4")
    suffixes = np.ascontiguousarray(segment.suffixes, "<i4")
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        _HEADER_LENGTH,
        len(tokens),
        segment.start or 0,
        _STATIC if segment.start is None else 0,
        0,
        xxhash.xxh3_64_intdigest(tokens.data),
        xxhash.xxh3_64_intdigest(suffixes.data),
        fingerprint.encode("ascii"),
        namespace.encode("ascii"),
        segment.segment_id.encode("ascii"),
    )
    padding = bytes(_suffixes_offset(len(tokens)) - _HEADER_LENGTH - 4 * len(tokens))
    parts: list[bytes | memoryview] = [
        header,
        _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)),
        tokens.data,
        padding,
        suffixes.data,
    ]
    replace_file(path, parts, durable=durable)


def replace_file(path: Path, parts: Sequence[bytes | memoryview], *, durable: bool) -> None:
    """Put ``parts`` at ``path`` atomically: readers see the old file or the new one. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and removals in ``path`` survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_segment(path: Path, *, fingerprint: str) -> Segment:
    """Memory-map a segment file read-only and check all of it. O(n); nothing is allocated for the arrays.

    Raises SegmentCorrupt, FormatVersion, TokenizerMismatch, and OSError when it cannot be read at all. That the
    suffixes are in order is not checked: a checksum says they are what was written, the bounds that no reader can leave
    them.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER_LENGTH:
            raise _corrupt(path, f"{size} bytes are fewer than its header's {_HEADER_LENGTH}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    fields = _read_header(path, mapped[:_HEADER_LENGTH])
    (num_tokens, start, flags, tokens_checksum, suffixes_checksum, written_with, segment_id) = fields
    if written_with != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {written_with}, this one is {fingerprint}: its token ids mean other text. "
            "Use the tokenizer it was made with, or rebuild it with `ssd-cache build`"
        )
    if not 0 < num_tokens <= _MAX_TOKENS or len(mapped) != segment_file_size(num_tokens):
        raise _corrupt(path, f"{len(mapped)} bytes do not fit the {num_tokens} tokens of its header")
    tokens = np.frombuffer(mapped, "<i4", num_tokens, _HEADER_LENGTH)
    suffixes = np.frombuffer(mapped, "<i4", num_tokens, _suffixes_offset(num_tokens))
    _check_section(path, "tokens", tokens, tokens_checksum)
    _check_section(path, "suffixes", suffixes, suffixes_checksum)
    if tokens.min() < SEPARATOR or tokens[-1] != SEPARATOR:
        raise _corrupt(path, "its tokens are not ids closed by a separator")
    if suffixes.min() < 0 or suffixes.max() >= num_tokens:
        raise _corrupt(path, f"a suffix lies outside its {num_tokens} tokens")
    return Segment(tokens, suffixes, None if flags & _STATIC else start, segment_id)


def _read_header(path: Path, header: bytes) -> tuple[int, int, int, int, int, str, str]:
    (
        magic,
        version,
        header_length,
        num_tokens,
        start,
        flags,
        _,
        tokens_checksum,
        suffixes_checksum,
        written_with,
        _,
        name,
    ) = _HEADER.unpack(header[: _HEADER.size])
    if magic != _MAGIC:
        raise _corrupt(path, f"it begins with {magic!r}, not {_MAGIC!r}")
    if version != FORMAT_VERSION:
        raise FormatVersion(
            f"{path} has format {version}, this version reads {FORMAT_VERSION}. Rebuild it with `ssd-cache build`, "
            "or use the version of ssd that wrote it"
        )
    if header_length != _HEADER_LENGTH or _CHECKSUM.unpack(header[_HEADER.size :])[0] != xxhash.xxh3_64_intdigest(
        header[: _HEADER.size]
    ):
        raise _corrupt(path, "the checksum of its header does not match")
    try:
        fingerprint, segment_id = written_with.decode("ascii"), name.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise _corrupt(path, "its names are not ASCII") from None
    return num_tokens, start, flags, tokens_checksum, suffixes_checksum, fingerprint, segment_id


def _check_section(path: Path, section: str, array: npt.NDArray[np.int32], checksum: int) -> None:
    if xxhash.xxh3_64_intdigest(array.data) != checksum:
        raise _corrupt(path, f"the checksum of its {section} does not match")


def _corrupt(path: Path, what: str) -> SegmentCorrupt:
    return SegmentCorrupt(
        f"{path} is damaged: {what}. Delete it, or restore it from a copy, or rebuild it with `ssd-cache build`"
    )
