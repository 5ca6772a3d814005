"""What a segment file says of itself in its first 256 bytes, and where its sections lie; format 1.

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

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from ssd.errors import FormatVersion, SegmentCorrupt
from ssd.retrieval.atomic_file import NotAFileError, open_file
from ssd.retrieval.names import is_segment_id
from ssd.retrieval.packed import WIDTHS, packed_size
from ssd.retrieval.segment import FENCE_STEP

FORMAT_VERSION = 1
HEADER_LENGTH = 256

_MAGIC = b"SSDSEG\r\n"
_BYTE_ORDER = 0x01020304
_HEADER = struct.Struct("<8sIIIIQQIIQQQ32s64s64s16x")
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT = 64
_STATIC = 1
_MAX_TOKENS = (1 << 31) - 1  # positions are int32
_MAX_START = 1 << 62

assert _HEADER.size + _CHECKSUM.size == HEADER_LENGTH


def segment_file_size(num_tokens: int, width: int) -> int:
    """Bytes a segment file of ``num_tokens`` tokens, ``width`` bytes each, has."""
    return fence_offset(num_tokens, width) + 8 * num_posts(num_tokens)


def num_posts(num_tokens: int) -> int:
    """Length of the fence of ``num_tokens`` tokens."""
    return -(-num_tokens // FENCE_STEP)


def order_offset(num_tokens: int, width: int) -> int:
    """Where the order begins; the text lies between the header and it."""
    return HEADER_LENGTH + packed_size(num_tokens, width)


def fence_offset(num_tokens: int, width: int) -> int:
    """Where the fence begins."""
    return order_offset(num_tokens, width) + -(-4 * num_tokens // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """One segment's; ``start`` is None when it is static, checksums are xxh3-64 of the three sections."""

    width: int
    num_tokens: int
    start: int | None
    text_checksum: int
    order_checksum: int
    fence_checksum: int
    fingerprint: str
    namespace: str
    segment_id: str

    @property
    def stop(self) -> int | None:
        """One past the last absolute ring position, or None for a static segment."""
        return None if self.start is None else self.start + self.num_tokens

    def to_bytes(self) -> bytes:
        """HEADER_LENGTH of them."""
        packed = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            HEADER_LENGTH,
            _BYTE_ORDER,
            self.width,
            self.num_tokens,
            self.start or 0,
            _STATIC if self.start is None else 0,
            FENCE_STEP,
            self.text_checksum,
            self.order_checksum,
            self.fence_checksum,
            self.fingerprint.encode("ascii"),
            self.namespace.encode("ascii"),
            self.segment_id.encode("ascii"),
        )
        return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))

    @classmethod
    def from_bytes(cls, path: Path, header: bytes) -> Self:
        """What ``to_bytes`` made. ``path`` : for messages. Raises SegmentCorrupt, FormatVersion."""
        if len(header) < HEADER_LENGTH:
            raise corrupt(path, f"{len(header)} bytes are fewer than its header's {HEADER_LENGTH}")
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
            fingerprint,
            namespace,
            name,
        ) = _HEADER.unpack(header[: _HEADER.size])
        if magic != _MAGIC:
            raise corrupt(path, f"it begins with {magic!r}, not {_MAGIC!r}")
        if version != FORMAT_VERSION:
            raise FormatVersion(
                f"{path} has format {version}, this version reads {FORMAT_VERSION}. Rebuild it with `ssd-cache build`, "
                "or use the version of ssd that wrote it"
            )
        checksum = _CHECKSUM.unpack(header[_HEADER.size : HEADER_LENGTH])[0]
        if header_length != HEADER_LENGTH or checksum != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
            raise corrupt(path, "the checksum of its header does not match")
        if byte_order != _BYTE_ORDER or fence_step != FENCE_STEP or start > _MAX_START:
            raise corrupt(path, "its header has numbers that no writer writes")
        if width not in WIDTHS or not 0 < num_tokens <= _MAX_TOKENS:
            raise corrupt(path, f"no segment has {num_tokens} tokens of {width} bytes")
        names = [fingerprint, namespace.rstrip(b"\0"), name.rstrip(b"\0")]
        if not all(each.isascii() for each in names) or not is_segment_id(names[2].decode()):
            raise corrupt(path, "its header has names that no writer writes")
        return cls(
            width=width,
            num_tokens=num_tokens,
            start=None if flags & _STATIC else start,
            text_checksum=text_checksum,
            order_checksum=order_checksum,
            fence_checksum=fence_checksum,
            fingerprint=names[0].decode(),
            namespace=names[1].decode(),
            segment_id=names[2].decode(),
        )


def read_header(path: Path) -> SegmentHeader:
    """The header of a segment file. O(1). Raises SegmentCorrupt, FormatVersion, OSError."""
    with open_segment_file(path) as file:
        return SegmentHeader.from_bytes(path, file.read(HEADER_LENGTH))


def open_segment_file(path: Path) -> BinaryIO:
    """The file, to be read. Raises SegmentCorrupt where it is no regular one, and OSError."""
    try:
        return open_file(path)
    except NotAFileError:
        raise corrupt(path, "it is no regular file") from None


def corrupt(path: Path, what: str) -> SegmentCorrupt:
    """That ``path`` is damaged, in words that say what to do."""
    return SegmentCorrupt(
        f"{path} is damaged: {what}. Delete it, or restore it from a copy, or rebuild it with `ssd-cache build`"
    )
