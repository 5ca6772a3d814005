"""Segment files, format 1: written once, memory-mapped by readers, the only form segments travel in.

::

    offset  bytes
         0      8   magic "SSDSEG" CR LF                all numbers little-endian
         8      4   format version, 1
        12      4   header length, 256
        16      4   byte order mark 0x01020304
        20      4   w, bytes of a packed token: 2, 3 or 4
        24      8   n, number of tokens, separators included
        32      8   absolute ring position of the first token; 0 when static
        40      4   flags: 1 = static
        44      4   positions between two posts of the fence, 32
        48      8   xxh3-64 of the text section, its guards included
        56      8   xxh3-64 of the order
        64      8   xxh3-64 of the fence
        72     32   tokenizer fingerprint, ASCII hexadecimal
       104     64   namespace, ASCII, zero-padded
       168     64   segment id, ASCII, zero-padded
       232     16   zero
       248      8   xxh3-64 of bytes 0..247
       256          text: 64 zero bytes; n packed tokens of w bytes; zeros up to the next multiple of 64 and 64 more
                    order: n int32; zeros up to the next multiple of 64
                    fence: ceil(n / 32) uint64; the file ends here
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import FormatVersion, SegmentCorrupt, TokenizerMismatch
from ssd.retrieval.packed import GUARD_BYTES, WIDTHS, packed_size
from ssd.retrieval.snapshot import FENCE_STEP, Segment

FORMAT_VERSION = 1

_MAGIC = b"SSDSEG\r\n"
_BYTE_ORDER = 0x01020304
_HEADER = struct.Struct("<8sIIIIQQIIQQQ32s64s64s16x")
_CHECKSUM = struct.Struct("<Q")
_HEADER_LENGTH = 256
_ALIGNMENT = 64
_STATIC = 1
_MAX_TOKENS = (1 << 31) - 1  # positions are int32

assert _HEADER.size + _CHECKSUM.size == _HEADER_LENGTH


def segment_file_size(num_tokens: int, width: int) -> int:
    """Bytes a segment file of ``num_tokens`` tokens, ``width`` bytes each, has."""
    return _fence_offset(num_tokens, width) + 8 * num_posts(num_tokens)


def num_posts(num_tokens: int) -> int:
    """Length of the fence of ``num_tokens`` tokens."""
    return -(-num_tokens // FENCE_STEP)


def _order_offset(num_tokens: int, width: int) -> int:
    return _HEADER_LENGTH + packed_size(num_tokens, width)


def _fence_offset(num_tokens: int, width: int) -> int:
    return _order_offset(num_tokens, width) + -(-4 * num_tokens // _ALIGNMENT) * _ALIGNMENT


def write_segment(path: Path, segment: Segment, *, fingerprint: str, namespace: str, durable: bool = True) -> None:
    """Write ``segment`` to ``path``, which appears whole or not at all; raises OSError.

    ``durable`` : the bytes are synced to disk before they get their name. The name itself is not: whoever refers to the
    file syncs the directory first.
    """
    text = np.ascontiguousarray(segment.text)
    order = np.ascontiguousarray(segment.order, "<i4")
    fence = np.ascontiguousarray(segment.fence, "<u8")
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        _HEADER_LENGTH,
        _BYTE_ORDER,
        segment.width,
        len(order),
        segment.start or 0,
        _STATIC if segment.start is None else 0,
        FENCE_STEP,
        xxhash.xxh3_64_intdigest(text.data),
        xxhash.xxh3_64_intdigest(order.data),
        xxhash.xxh3_64_intdigest(fence.data),
        fingerprint.encode("ascii"),
        namespace.encode("ascii"),
        segment.segment_id.encode("ascii"),
    )
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))
    order_offset, fence_offset = _order_offset(len(order), segment.width), _fence_offset(len(order), segment.width)
    padding = bytes(fence_offset - order_offset - order.nbytes)
    write_file(path, [header, checksum, text.data, order.data, padding, fence.data], durable=durable)


def write_file(path: Path, parts: Sequence[bytes | memoryview], *, durable: bool) -> None:
    """Put ``parts`` at ``path`` atomically: readers see the old file or the new one. Raises OSError.

    The bytes go to a temporary name in the same directory, which is renamed; ``durable`` : once they are on disk.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # a process that is told to end leaves nothing behind either
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_directory(path: Path) -> None:
    """Make renames and removals in ``path`` survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Header:
    width: int
    num_tokens: int
    start: int | None
    checksums: tuple[int, int, int]
    """Of text, order and fence."""
    fingerprint: str
    segment_id: str


def open_segment(path: Path, *, fingerprint: str) -> Segment:
    """Memory-map a segment file read-only and check all of it. O(n); nothing is allocated for the arrays.

    Raises SegmentCorrupt, FormatVersion, TokenizerMismatch, and OSError when it cannot be read at all. That the order
    is right is not checked: a checksum says it is what was written, the bounds that no reader can leave the text.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER_LENGTH:
            raise _corrupt(path, f"{size} bytes are fewer than its header's {_HEADER_LENGTH}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = _read_header(path, mapped[:_HEADER_LENGTH])
    n, width = header.num_tokens, header.width
    if header.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {header.fingerprint}, this one is {fingerprint}: its token ids mean other "
            "text. Use the tokenizer it was made with, or rebuild it with `ssd-cache build`"
        )
    if width not in WIDTHS or not 0 < n <= _MAX_TOKENS or len(mapped) != segment_file_size(n, width):
        raise _corrupt(path, f"{len(mapped)} bytes do not fit the {n} tokens of {width} bytes of its header")
    if hasattr(mmap, "MADV_POPULATE_READ"):  # Linux 5.14: page tables are filled now, not by the first lookups
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_POPULATE_READ)
    text = np.frombuffer(mapped, np.uint8, packed_size(n, width), _HEADER_LENGTH)
    order = np.frombuffer(mapped, "<i4", n, _order_offset(n, width))
    fence = np.frombuffer(mapped, "<u8", num_posts(n), _fence_offset(n, width))
    sections: tuple[tuple[str, npt.NDArray[Any]], ...] = (("text", text), ("order", order), ("fence", fence))
    for (section, array), checksum in zip(sections, header.checksums, strict=True):
        if xxhash.xxh3_64_intdigest(array.data) != checksum:
            raise _corrupt(path, f"the checksum of its {section} does not match")
    _check_text(path, text, n, width)
    if order.min() < 1 or order.max() > n:
        raise _corrupt(path, f"its order has a position outside its {n} tokens")
    return Segment(text, order, fence, width, header.start, header.segment_id)


def _check_text(path: Path, text: npt.NDArray[np.uint8], num_tokens: int, width: int) -> None:
    """Guards and the last separator are what keeps a reader inside."""
    stop = GUARD_BYTES + width * num_tokens
    if text[:GUARD_BYTES].any() or text[stop - width :].any():
        raise _corrupt(path, "its text is not closed by a separator and guarded by zeros")
    if width == 4 and text[GUARD_BYTES:stop].view("<u4").max() > 1 << 31:
        raise _corrupt(path, "its text holds what is no token id")


def _read_header(path: Path, header: bytes) -> _Header:
    (
        magic,
        version,
        header_length,
        byte_order,
        width,
        num_tokens,
        start,
        flags,
        fence_step,
        text_checksum,
        order_checksum,
        fence_checksum,
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
    if byte_order != _BYTE_ORDER or fence_step != FENCE_STEP or start > 1 << 62:
        raise _corrupt(path, "its header has numbers that no writer writes")
    try:
        fingerprint, segment_id = written_with.decode("ascii"), name.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise _corrupt(path, "its names are not ASCII") from None
    return _Header(
        width,
        num_tokens,
        None if flags & _STATIC else start,
        (text_checksum, order_checksum, fence_checksum),
        fingerprint,
        segment_id,
    )


def _corrupt(path: Path, what: str) -> SegmentCorrupt:
    return SegmentCorrupt(
        f"{path} is damaged: {what}. Delete it, or restore it from a copy, or rebuild it with `ssd-cache build`"
    )
