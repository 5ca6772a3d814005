"""An immutable text with the suffix array of the reversed text, and the file format in which the two are stored.

Token ids take as few bytes as the largest one needs (``width``). An id is stored as id + 1, and ``SEPARATOR`` as 0,
little-endian, with zero bytes before and after the text. With this layout, texts can be compared backwards eight bytes
at a time, for every width: in a 64-bit number loaded from just before a position, the nearest token has the highest
bytes. So comparing such numbers orders positions by the text before them.

Files are written once and verified completely when they are opened. Segments are exchanged only as files.
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
"""The type of an array of token ids in which ``SEPARATOR`` follows each sequence."""
Bytes = npt.NDArray[np.uint8]

WIDTHS = (2, 3, 4)
GUARD_BYTES = 64
"""The number of zero bytes before and after a segment's packed text, so that comparisons may read beyond its ends."""

_HUGE: Final = 1 << 22  # the smallest allocation with huge pages, in bytes, as in numpy
_BLOCK_TOKENS = 1 << 16  # tokens converted at a time, so that the whole text is not copied


def width_for(largest_id: int) -> int:
    """Return the smallest number of bytes per token in which ids up to ``largest_id`` can be stored."""
    if largest_id + 1 < 1 << 16:
        return 2
    return 3 if largest_id + 1 < 1 << 24 else 4


def packed_size(num_tokens: int, width: int) -> int:
    """Return the number of bytes of a packed text with the zero bytes around it, a multiple of 64."""
    return 2 * GUARD_BYTES + -(-num_tokens * width // GUARD_BYTES) * GUARD_BYTES


def pack(tokens: Tokens, width: int) -> Bytes:
    """Store token ids (each >= -1) in ``width`` bytes each, with zero bytes before and after the text."""
    packed = np.empty(packed_size(len(tokens), width), np.uint8)  # np.zeros would not use huge pages
    packed[:GUARD_BYTES] = 0
    packed[GUARD_BYTES + width * len(tokens) :] = 0
    codes = packed[GUARD_BYTES : GUARD_BYTES + width * len(tokens)].reshape(-1, width)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS].astype("<u4") + np.uint32(1)
        codes[start : start + len(block)] = block.view(np.uint8).reshape(-1, 4)[:, :width]
    return packed


def unpack(packed: Bytes, num_tokens: int, width: int, out: Tokens | None = None, *, start: int = 0) -> Tokens:
    """Return ``num_tokens`` tokens of a packed text from token ``start`` on.

    ``out`` (int32[num_tokens]) is filled and returned; None allocates a new array.
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
"""The value that is stored after every sequence. It is never a token id, so no match or draft extends beyond it."""

SPARSE_INDEX_STEP = 32
"""The number of suffix-array ranks per entry of a segment's sparse index. The index takes a quarter byte per token."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """An immutable text of the retrieval cache with the suffix array of the reversed text.

    Attributes:
        text: uint8, whole sequences, each closed by ``SEPARATOR``, packed in ``width`` bytes per token.
        order: int32[n], the suffix array: the positions 1..n, ordered by the text before them, read backwards.
            Positions preceded by the same tokens are neighbours; the more tokens match, the nearer they are.
        sparse_index: uint64[ceil(n / SPARSE_INDEX_STEP)], the eight bytes of packed text before every
            SPARSE_INDEX_STEP-th position of ``order``. A search begins here, in contiguous memory.
        start: The ring-buffer position of the first token; None for a prebuilt segment, which is never evicted.
        segment_id: A name that is unique within its directory.
    """

    text: Bytes
    order: Tokens
    sparse_index: npt.NDArray[np.uint64]
    width: int
    start: int | None
    segment_id: str

    def __len__(self) -> int:
        return len(self.order)

    @property
    def stop(self) -> int | None:
        """The ring-buffer position after the segment's last token; None for a prebuilt segment."""
        return None if self.start is None else self.start + len(self.order)

    @property
    def tokens(self) -> Tokens:
        """The segment's tokens, int32[n], unpacked into a new array at every access."""
        return unpack(self.text, len(self.order), self.width)


def allocate_pages(num_bytes: int) -> mmap.mmap:
    """Allocate memory that returns to the operating system when it is freed, unlike malloc's. Raises MemoryError."""
    try:
        pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory could not be allocated") from error
    if num_bytes >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def allocate_tokens(count: int) -> Tokens:
    """Allocate an array of ``count`` tokens whose memory returns to the operating system. Raises MemoryError."""
    return np.frombuffer(allocate_pages(4 * count), np.int32, count)


def concatenate(segments: Sequence[Segment]) -> Tokens:
    """Return the tokens of several segments, one segment after the other, as one new array.

    Raises MemoryError if the array does not fit in memory.
    """
    tokens = allocate_tokens(sum(map(len, segments)))
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
_PREBUILT_FLAG = 1
_MAX_TOKENS = (1 << 31) - 1  # positions are int32
_MAX_START = 1 << 62

assert _HEADER.size + _CHECKSUM.size == HEADER_LENGTH


def segment_file_size(num_tokens: int, width: int) -> int:
    return sparse_index_offset(num_tokens, width) + 8 * num_samples(num_tokens)


def num_samples(num_tokens: int) -> int:
    return -(-num_tokens // SPARSE_INDEX_STEP)


def order_offset(num_tokens: int, width: int) -> int:
    """Return the offset in a segment's file at which the suffix array begins, after the header and the text."""
    return HEADER_LENGTH + packed_size(num_tokens, width)


def sparse_index_offset(num_tokens: int, width: int) -> int:
    return order_offset(num_tokens, width) + -(-4 * num_tokens // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header of a segment file, with an xxh3-64 checksum of each section of the file.

    ``width`` is the number of bytes per token, and ``start`` the ring-buffer position of the first token (None for a
    prebuilt segment).
    """

    width: int
    num_tokens: int
    start: int | None
    text_checksum: int
    order_checksum: int
    sparse_index_checksum: int
    fingerprint: str
    namespace: str
    segment_id: str

    def to_bytes(self) -> bytes:
        flags = _PREBUILT_FLAG if self.start is None else 0
        numbers = _BYTE_ORDER, self.width, self.num_tokens, self.start or 0, flags, SPARSE_INDEX_STEP
        checksums = self.text_checksum, self.order_checksum, self.sparse_index_checksum
        names = (name.encode("ascii") for name in (self.fingerprint, self.namespace, self.segment_id))
        packed = _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_LENGTH, *numbers, *checksums, *names)
        return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))

    @classmethod
    def from_bytes(cls, path: Path, header: bytes) -> Self:
        """Parse a segment file's header; ``path`` is used in error messages.

        Raises SegmentCorrupt if the header is damaged, and FormatVersion if a newer version wrote it.
        """
        if len(header) < HEADER_LENGTH:
            raise corrupt(path, f"it has {len(header)} bytes, fewer than the {HEADER_LENGTH} bytes of a header")
        unpacked = _HEADER.unpack(header[: _HEADER.size])
        magic, version, header_length, byte_order, width, num_tokens, start, flags, sparse_index_step = unpacked[:9]
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
        if byte_order != _BYTE_ORDER or sparse_index_step != SPARSE_INDEX_STEP or start > _MAX_START:
            raise corrupt(path, "its header has invalid numbers")
        if width not in WIDTHS or not 0 < num_tokens <= _MAX_TOKENS:
            raise corrupt(path, f"its header has {num_tokens} tokens of {width} bytes, which is invalid")
        names = [unpacked[12], *(name.rstrip(b"\0") for name in unpacked[13:])]
        if not all(each.isascii() for each in names) or not is_segment_id(names[2].decode()):
            raise corrupt(path, "its header has invalid names")
        text, order, sparse_index = unpacked[9:12]
        fingerprint, namespace, segment_id = (name.decode() for name in names)
        where = None if flags & _PREBUILT_FLAG else start
        return cls(width, num_tokens, where, text, order, sparse_index, fingerprint, namespace, segment_id)


def corrupt(path: Path, what: str) -> SegmentCorrupt:
    """Return an exception for a damaged segment file; its message says how to recover."""
    return SegmentCorrupt(
        f"{path} is damaged: {what}. Delete it, or restore it from a copy, or rebuild it with `ssd-cache build`"
    )


def write_segment(path: Path, segment: Segment, *, fingerprint: str, namespace: str) -> None:
    """Write a segment file atomically. Raises OSError.

    The bytes are synced to disk before the file gets its name. The name is not synced: the caller must sync the
    directory before it refers to the file.
    """
    text = np.ascontiguousarray(segment.text)
    order = np.ascontiguousarray(segment.order, "<i4")
    sparse_index = np.ascontiguousarray(segment.sparse_index, "<u8")
    header = SegmentHeader(
        width=segment.width,
        num_tokens=len(order),
        start=segment.start,
        text_checksum=xxhash.xxh3_64_intdigest(text.data),
        order_checksum=xxhash.xxh3_64_intdigest(order.data),
        sparse_index_checksum=xxhash.xxh3_64_intdigest(sparse_index.data),
        fingerprint=fingerprint,
        namespace=namespace,
        segment_id=segment.segment_id,
    )
    start, stop = order_offset(len(order), segment.width), sparse_index_offset(len(order), segment.width)
    padding = bytes(stop - start - order.nbytes)
    write_file(path, [header.to_bytes(), text.data, order.data, padding, sparse_index.data], durable=True)


def open_segment(path: Path, *, fingerprint: str, namespace: str | None = None) -> Segment:
    """Read a segment file into memory and verify it completely. Later changes of the file have no effect.

    ``namespace`` is the namespace that the file must have; None accepts any. Checksums prove that the text and the
    suffix array are as written. Bounds are checked, so that no search reads outside the text. The sort order is not
    verified.

    Raises:
        SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch: The file cannot be used.
        MemoryError: There is not enough memory.
        OSError: The file cannot be read.
    """
    try:
        file = open_file(path)
    except NotAFileError:
        raise corrupt(path, "it is not a regular file") from None
    with file:
        content = file.read(HEADER_LENGTH)
        header = _checked_header(path, content, fingerprint, namespace)
        n, width = header.num_tokens, header.width
        size = os.fstat(file.fileno()).st_size
        if size != segment_file_size(n, width):
            raise corrupt(
                path, f"its size of {size} bytes does not match the {n} tokens of {width} bytes in its header"
            )
        pages = allocate_pages(size)
        file.seek(0)
        if file.readinto(pages) != size or pages[:HEADER_LENGTH] != content:
            raise corrupt(path, "it was changed while it was read")
    view = memoryview(pages).toreadonly()
    text = np.frombuffer(view, np.uint8, packed_size(n, width), HEADER_LENGTH)
    order = np.frombuffer(view, "<i4", n, order_offset(n, width))
    sparse_index = np.frombuffer(view, "<u8", num_samples(n), sparse_index_offset(n, width))
    _check_section(path, "text", text, header.text_checksum)
    _check_section(path, "order", order, header.order_checksum)
    _check_section(path, "sparse index", sparse_index, header.sparse_index_checksum)
    _check_text(path, text, n, width)
    if order.min() < 1 or order.max() > n:
        raise corrupt(path, f"its order has a position outside its {n} tokens")
    return Segment(text, order, sparse_index, width, header.start, header.segment_id)


def _checked_header(path: Path, content: bytes, fingerprint: str, namespace: str | None) -> SegmentHeader:
    header = SegmentHeader.from_bytes(path, content)
    if header.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {header.fingerprint}, but the current one is {fingerprint}, in which its "
            "token ids mean other text. Use the tokenizer of the file, or rebuild it with `ssd-cache build`"
        )
    if namespace is not None and header.namespace != namespace:
        raise NamespaceMismatch(
            f"{path} contains text of namespace {header.namespace!r}, not of {namespace!r}, and is skipped. To use it "
            "here on purpose, pass its directory with `ssd-serve --warm`"
        )
    return header


def _check_section(path: Path, section: str, array: npt.NDArray[Any], checksum: int) -> None:
    if xxhash.xxh3_64_intdigest(array.data) != checksum:
        raise corrupt(path, f"the checksum of its {section} does not match")


def _check_text(path: Path, text: Bytes, num_tokens: int, width: int) -> None:
    """Raise SegmentCorrupt unless the text ends with a separator, has zeros around it, and contains only valid ids.

    The separator and the zeros are necessary because they bound searches.
    """
    stop = GUARD_BYTES + width * num_tokens
    if text[:GUARD_BYTES].any() or text[stop - width :].any():
        raise corrupt(path, "its text has no separator at its end, or no zeros around it")
    if width == 4 and text[GUARD_BYTES:stop].view("<u4").max() > 1 << 31:
        raise corrupt(path, "its text contains an invalid token id")
