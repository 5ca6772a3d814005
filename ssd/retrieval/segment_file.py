"""Segment files: written once, checked whole when they are opened, the only form segments travel in.

What their bytes mean is said in ``segment_header``, where they lie while they are searched in ``file_bytes``.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import FormatVersion, NamespaceMismatch, SegmentCorrupt, TokenizerMismatch
from ssd.retrieval.file_bytes import CopyBudget, read_bytes
from ssd.retrieval.files import NotAFileError, is_segment_id, open_file, write_file
from ssd.retrieval.segment import FENCE_STEP, GUARD_BYTES, WIDTHS, Segment, Tokens, packed_size, text_checksum, unpack

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


Bytes = npt.NDArray[np.uint8]


def write_segment(path: Path, segment: Segment, *, fingerprint: str, namespace: str, durable: bool = True) -> None:
    """Write ``segment`` to ``path``, which appears whole or not at all; raises OSError.

    ``durable`` : the bytes are synced to disk before they get their name. The name itself is not: whoever refers to the
    file syncs the directory first. The text's checksum is the segment's own, so that a byte that changed since the
    segment was built is noticed by whoever reads the file.
    """
    text = np.ascontiguousarray(segment.text)
    order = np.ascontiguousarray(segment.order, "<i4")
    fence = np.ascontiguousarray(segment.fence, "<u8")
    header = SegmentHeader(
        width=segment.width,
        num_tokens=len(order),
        start=segment.start,
        text_checksum=text_checksum(text) if segment.checksum is None else segment.checksum,
        order_checksum=xxhash.xxh3_64_intdigest(order.data),
        fence_checksum=xxhash.xxh3_64_intdigest(fence.data),
        fingerprint=fingerprint,
        namespace=namespace,
        segment_id=segment.segment_id,
    )
    start, stop = order_offset(len(order), segment.width), fence_offset(len(order), segment.width)
    padding = bytes(stop - start - order.nbytes)
    write_file(path, [header.to_bytes(), text.data, order.data, padding, fence.data], durable=durable)


def open_segment(
    path: Path, *, fingerprint: str, namespace: str | None = None, budget: CopyBudget | None = None, leaving: int = 0
) -> Segment:
    """Read a segment file and check all of it. O(n).

    ``namespace`` : whose text it must be, None for anyone's. ``budget`` : what a private copy may take, ``leaving`` so
    much of it; without room for it the file is mapped, and the segment has a ``shared`` that says when to give it up.

    Raises SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch, and OSError when it cannot be read at
    all. That the order is right is not checked: a checksum says it is what was written, the bounds that no reader can
    leave the text.
    """
    with open_segment_file(path) as file:
        content = file.read(HEADER_LENGTH)
        header = _checked_header(path, content, fingerprint, namespace)
        n, width = header.num_tokens, header.width
        size = os.fstat(file.fileno()).st_size
        if size != segment_file_size(n, width):
            raise corrupt(path, f"{size} bytes do not fit the {n} tokens of {width} bytes of its header")
        held = read_bytes(file.fileno(), path, budget, leaving=leaving)
    if len(held.view) != size or held.view[:HEADER_LENGTH] != content:
        raise corrupt(path, "it was changed while it was read")
    text = np.frombuffer(held.view, np.uint8, packed_size(n, width), HEADER_LENGTH)
    order = np.frombuffer(held.view, "<i4", n, order_offset(n, width))
    fence = np.frombuffer(held.view, "<u8", num_posts(n), fence_offset(n, width))
    sections: tuple[tuple[str, npt.NDArray[Any], int], ...] = (
        ("text", text, header.text_checksum),
        ("order", order, header.order_checksum),
        ("fence", fence, header.fence_checksum),
    )
    for section, array, checksum in sections:
        _check_section(path, section, array, checksum)
    _check_text(path, text, n, width)
    if order.min() < 1 or order.max() > n:
        raise corrupt(path, f"its order has a position outside its {n} tokens")
    return Segment(text, order, fence, width, header.start, header.segment_id, header.text_checksum, held.shared)


def read_tokens(path: Path, *, fingerprint: str, namespace: str | None = None) -> Tokens:
    """int32[n], the text of a segment file, which is all of it that a merge needs. O(n), in memory of the caller's.

    Reads no further: a file without order and fence, see ``keep_text_only``, is as good. Raises as ``open_segment``.
    """
    with open_segment_file(path) as file:
        header = _checked_header(path, file.read(HEADER_LENGTH), fingerprint, namespace)
        n, width = header.num_tokens, header.width
        text = np.frombuffer(file.read(packed_size(n, width)), np.uint8)
    if len(text) != packed_size(n, width):
        raise corrupt(path, f"it ends within the {n} tokens of {width} bytes of its header")
    _check_section(path, "text", text, header.text_checksum)
    _check_text(path, text, n, width)
    return unpack(text, n, width)


def keep_text_only(path: Path, segment: Segment) -> None:
    """Give back the room of order and fence in the file of ``segment``, which is a copy of it. Raises OSError."""
    assert segment.shared is None
    os.truncate(path, order_offset(len(segment), segment.width))


def _checked_header(path: Path, content: bytes, fingerprint: str, namespace: str | None) -> SegmentHeader:
    header = SegmentHeader.from_bytes(path, content)
    if header.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {header.fingerprint}, this one is {fingerprint}: its token ids mean other "
            "text. Use the tokenizer it was made with, or rebuild it with `ssd-cache build`"
        )
    if namespace is not None and header.namespace != namespace:
        raise NamespaceMismatch(
            f"{path} holds text of namespace {header.namespace!r}, not of {namespace!r}: it is left alone. To use it "
            "here on purpose, give its directory to `ssd-serve --warm`"
        )
    return header


def _check_section(path: Path, section: str, array: npt.NDArray[Any], checksum: int) -> None:
    if xxhash.xxh3_64_intdigest(array.data) != checksum:
        raise corrupt(path, f"the checksum of its {section} does not match")


def _check_text(path: Path, text: Bytes, num_tokens: int, width: int) -> None:
    """Guards and the last separator are what keeps a reader inside."""
    stop = GUARD_BYTES + width * num_tokens
    if text[:GUARD_BYTES].any() or text[stop - width :].any():
        raise corrupt(path, "its text is not closed by a separator and guarded by zeros")
    if width == 4 and text[GUARD_BYTES:stop].view("<u4").max() > 1 << 31:
        raise corrupt(path, "its text holds what is no token id")
