"""Immutable text with the suffix array of its reversal: what is stored, sorted once; and its file.

The text is packed: token ids in as few bytes as their largest needs, laid out so that texts compare backwards eight
bytes at a time. An id is stored as the code id + 1, ``SEPARATOR`` as 0, little-endian in ``width`` bytes, between two
guards of zeros. The bytes before any position, read from the last to the first, are then the codes before it from the
last to the first, each from its highest byte to its lowest. So one 64-bit number loaded just before a position orders
it among others by the text before it, whatever the width.

Files are written once, checked whole when they are opened, and the only form segments travel in.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import FormatVersion, NamespaceMismatch, SegmentCorrupt, TokenizerMismatch
from ssd.retrieval.files import MAX_FORMAT, NotAFileError, is_segment_id, open_file, write_file

Tokens = npt.NDArray[np.int32]
"""Token ids, and ``SEPARATOR`` where sequences end."""
Bytes = npt.NDArray[np.uint8]

WIDTHS = (2, 3, 4)
GUARD_BYTES = 64
"""Zeros before the first code and at least as many after the last: a compare may read on without looking."""

_HUGE: Final = 1 << 22  # bytes from which on huge pages are asked for, as numpy does
_BLOCK_TOKENS = 1 << 16  # converted at a time, so that no copy of the whole text is needed


def width_for(largest_id: int) -> int:
    """The narrowest width, in bytes, that holds the code of ``largest_id`` >= -1."""
    if largest_id + 1 < 1 << 16:
        return 2
    return 3 if largest_id + 1 < 1 << 24 else 4


def packed_size(num_tokens: int, width: int) -> int:
    """Bytes of a packed text with its guards, a multiple of 64."""
    return 2 * GUARD_BYTES + -(-num_tokens * width // GUARD_BYTES) * GUARD_BYTES


def pack(tokens: Tokens, width: int) -> Bytes:
    """uint8[packed_size(n, width)] of ``tokens`` : int32[n], each >= -1 with a code that fits ``width``. O(n)."""
    packed = np.empty(packed_size(len(tokens), width), np.uint8)  # not zeros: those come without huge pages
    packed[:GUARD_BYTES] = 0
    packed[GUARD_BYTES + width * len(tokens) :] = 0
    codes = packed[GUARD_BYTES : GUARD_BYTES + width * len(tokens)].reshape(-1, width)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS].astype("<u4") + np.uint32(1)
        codes[start : start + len(block)] = block.view(np.uint8).reshape(-1, 4)[:, :width]
    return packed


def unpack(packed: Bytes, num_tokens: int, width: int, out: Tokens | None = None, *, start: int = 0) -> Tokens:
    """``num_tokens`` of the tokens that ``pack`` was given, from the ``start``-th on. O(num_tokens).

    ``out`` : int32[num_tokens] that is filled and returned; None makes a new array.
    """
    first = GUARD_BYTES + width * start
    codes = packed[first : first + width * num_tokens].reshape(-1, width)
    tokens = np.empty(num_tokens, np.int32) if out is None else out
    for done in range(0, num_tokens, _BLOCK_TOKENS):
        block = codes[done : done + _BLOCK_TOKENS]
        wide = np.zeros((len(block), 4), np.uint8)
        wide[:, :width] = block
        tokens[done : done + len(block)] = (wide.view("<u4")[:, 0] - np.uint32(1)).view(np.int32)
    return tokens


SEPARATOR = -1
"""Ends every stored sequence. Never a token id, so no match and no continuation runs across it."""

FENCE_STEP = 32
"""One post of a segment's fence for this many positions: a quarter byte a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Immutable text with the suffix array of its reversal.

    ``text`` : uint8, whole sequences, each closed by ``SEPARATOR``, packed in ``width`` bytes a token, see above.
    ``order`` : int32[n], the positions 1..n of the text ordered by what stands before them, read backwards from the
        position. Positions preceded by the same tokens are neighbours, and the more tokens agree the nearer they are.
    ``fence`` : uint64[ceil(n / FENCE_STEP)], the eight bytes of packed text before every FENCE_STEP-th position of the
        order: a search begins there, in memory that lies together.
    ``start`` : absolute ring position of the first token, or None for a static segment, which the ring never evicts.
    ``segment_id`` : unique name within its directory.
    """

    text: Bytes
    order: Tokens
    fence: npt.NDArray[np.uint64]
    width: int
    start: int | None
    segment_id: str

    def __len__(self) -> int:
        return len(self.order)

    @property
    def stop(self) -> int | None:
        """One past the last absolute ring position, or None for a static segment."""
        return None if self.start is None else self.start + len(self.order)

    @property
    def tokens(self) -> Tokens:
        """int32[n], unpacked: a new array at every call. O(n)."""
        return unpack(self.text, len(self.order), self.width)


def own_pages(num_bytes: int) -> mmap.mmap:
    """Memory that goes back to the system with it: of what was malloc's a process keeps much. Raises MemoryError."""
    try:
        pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes} bytes") from error
    if num_bytes >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def own_tokens(count: int) -> Tokens:
    """int32[count] in pages of their own. Raises MemoryError."""
    return np.frombuffer(own_pages(4 * count), np.int32, count)


def concatenate(segments: Sequence[Segment]) -> Tokens:
    """int32: the tokens of ``segments``, one after the other. O(their sum). Raises MemoryError."""
    tokens = own_tokens(sum(map(len, segments)))
    start = 0
    for segment in segments:
        unpack(segment.text, len(segment), segment.width, tokens[start : start + len(segment)])
        start += len(segment)
    return tokens


# Files

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


@dataclass(frozen=True, slots=True)
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

    def to_bytes(self) -> bytes:
        """HEADER_LENGTH of them."""
        flags = _STATIC if self.start is None else 0
        numbers = _BYTE_ORDER, self.width, self.num_tokens, self.start or 0, flags, FENCE_STEP
        checksums = self.text_checksum, self.order_checksum, self.fence_checksum
        names = (name.encode("ascii") for name in (self.fingerprint, self.namespace, self.segment_id))
        packed = _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_LENGTH, *numbers, *checksums, *names)
        return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))

    @classmethod
    def from_bytes(cls, path: Path, header: bytes) -> Self:
        """What ``to_bytes`` made. ``path`` : for messages. Raises SegmentCorrupt, FormatVersion."""
        if len(header) < HEADER_LENGTH:
            raise corrupt(path, f"{len(header)} bytes are fewer than its header's {HEADER_LENGTH}")
        unpacked = _HEADER.unpack(header[: _HEADER.size])
        magic, version, header_length, byte_order, width, num_tokens, start, flags, fence_step = unpacked[:9]
        if magic != _MAGIC:
            raise corrupt(path, f"it begins with {magic!r}, not {_MAGIC!r}")
        checksum = _CHECKSUM.unpack(header[_HEADER.size : HEADER_LENGTH])[0]
        as_ours = header[:8] + FORMAT_VERSION.to_bytes(4, "little") + header[12 : _HEADER.size]
        is_whole = checksum == xxhash.xxh3_64_intdigest(as_ours)
        if FORMAT_VERSION < version <= MAX_FORMAT and not is_whole:
            raise FormatVersion(
                f"{path} has format {version}, this version reads {FORMAT_VERSION}. Rebuild it with `ssd-cache build`, "
                "or use the version of ssd that wrote it"
            )
        if header_length != HEADER_LENGTH or version != FORMAT_VERSION or not is_whole:
            raise corrupt(path, "the checksum of its header does not match")
        if byte_order != _BYTE_ORDER or fence_step != FENCE_STEP or start > _MAX_START:
            raise corrupt(path, "its header has numbers that no writer writes")
        if width not in WIDTHS or not 0 < num_tokens <= _MAX_TOKENS:
            raise corrupt(path, f"no segment has {num_tokens} tokens of {width} bytes")
        names = [unpacked[12], *(name.rstrip(b"\0") for name in unpacked[13:])]
        if not all(each.isascii() for each in names) or not is_segment_id(names[2].decode()):
            raise corrupt(path, "its header has names that no writer writes")
        text, order, fence = unpacked[9:12]
        fingerprint, namespace, segment_id = (name.decode() for name in names)
        where = None if flags & _STATIC else start
        return cls(width, num_tokens, where, text, order, fence, fingerprint, namespace, segment_id)


def corrupt(path: Path, what: str) -> SegmentCorrupt:
    """That ``path`` is damaged, in words that say what to do."""
    return SegmentCorrupt(
        f"{path} is damaged: {what}. Delete it, or restore it from a copy, or rebuild it with `ssd-cache build`"
    )


def write_segment(path: Path, segment: Segment, *, fingerprint: str, namespace: str) -> None:
    """Write ``segment`` to ``path``, which appears whole or not at all; raises OSError.

    The bytes are synced to disk before they get their name. The name itself is not: whoever refers to the file syncs
    the directory first.
    """
    text = np.ascontiguousarray(segment.text)
    order = np.ascontiguousarray(segment.order, "<i4")
    fence = np.ascontiguousarray(segment.fence, "<u8")
    header = SegmentHeader(
        width=segment.width,
        num_tokens=len(order),
        start=segment.start,
        text_checksum=xxhash.xxh3_64_intdigest(text.data),
        order_checksum=xxhash.xxh3_64_intdigest(order.data),
        fence_checksum=xxhash.xxh3_64_intdigest(fence.data),
        fingerprint=fingerprint,
        namespace=namespace,
        segment_id=segment.segment_id,
    )
    start, stop = order_offset(len(order), segment.width), fence_offset(len(order), segment.width)
    padding = bytes(stop - start - order.nbytes)
    write_file(path, [header.to_bytes(), text.data, order.data, padding, fence.data], durable=True)


def open_segment(path: Path, *, fingerprint: str, namespace: str | None = None) -> Segment:
    """Read a segment file into this process' memory, whatever becomes of the file, and check all of it. O(n).

    ``namespace`` : whose text it must be, None for anyone's. Raises SegmentCorrupt, FormatVersion, TokenizerMismatch,
    NamespaceMismatch, MemoryError, and OSError when it cannot be read at all. That the order is right is not checked: a
    checksum says it is what was written, the bounds that no reader can leave the text.
    """
    try:
        file = open_file(path)
    except NotAFileError:
        raise corrupt(path, "it is no regular file") from None
    with file:
        content = file.read(HEADER_LENGTH)
        header = _checked_header(path, content, fingerprint, namespace)
        n, width = header.num_tokens, header.width
        size = os.fstat(file.fileno()).st_size
        if size != segment_file_size(n, width):
            raise corrupt(path, f"{size} bytes do not fit the {n} tokens of {width} bytes of its header")
        pages = own_pages(size)
        file.seek(0)
        if file.readinto(pages) != size or pages[:HEADER_LENGTH] != content:
            raise corrupt(path, "it was changed while it was read")
    view = memoryview(pages).toreadonly()
    text = np.frombuffer(view, np.uint8, packed_size(n, width), HEADER_LENGTH)
    order = np.frombuffer(view, "<i4", n, order_offset(n, width))
    fence = np.frombuffer(view, "<u8", num_posts(n), fence_offset(n, width))
    _check_section(path, "text", text, header.text_checksum)
    _check_section(path, "order", order, header.order_checksum)
    _check_section(path, "fence", fence, header.fence_checksum)
    _check_text(path, text, n, width)
    if order.min() < 1 or order.max() > n:
        raise corrupt(path, f"its order has a position outside its {n} tokens")
    return Segment(text, order, fence, width, header.start, header.segment_id)


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
