"""A part of a set of files: a head that says what all of them are and which chunks are here, then the chunks.

Any order of parts will do, and one that comes twice changes nothing. Little-endian: ``SSDPART1``, uint32 length of the
head, SHA-256 of the head, the head as JSON, the chunks one behind the other.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

from benchmarks.offline.streams import MOST_BYTES, PartError

MAGIC: Final = b"SSDPART1"
CHUNK_BYTES: Final = 4 << 20
"""Of a file, as it is packed and checked."""

_FRONT: Final = struct.Struct("<8sI32s")
_MOST_HEAD_BYTES: Final = 32 << 20
_MOST_FILES: Final = 10_000
_MOST_TOTAL_BYTES: Final = 256 << 30


@dataclass(frozen=True, slots=True)
class File:
    """``path`` : relative, with slashes. ``size`` : bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """``file`` : its index. ``start``, ``size`` : bytes of it. ``length`` : bytes here. ``digest`` : SHA-256."""

    file: int
    start: int
    size: int
    way: str
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Part:
    """``number`` : from 1 to ``total``. ``set_id`` : of all parts that belong together."""

    set_id: str
    number: int
    total: int
    files: tuple[File, ...]
    chunks: tuple[Chunk, ...]


def write_part(path: Path, part: Part, chunks: BinaryIO) -> None:
    """The part with its chunks, which are read to their end."""
    head = json.dumps(asdict(part), separators=(",", ":")).encode()
    with path.open("wb") as out:
        out.write(_FRONT.pack(MAGIC, len(head), hashlib.sha256(head).digest()) + head)
        while block := chunks.read(1 << 20):
            out.write(block)


def read_part(file: BinaryIO) -> Part:
    """The head; ``file`` is left where the chunks begin. Raises PartError where it is torn or not to be believed."""
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size or not front.startswith(MAGIC):
        raise PartError("this is no part of packed files")
    _, length, digest = _FRONT.unpack(front)
    if length > _MOST_HEAD_BYTES:
        raise PartError("its head is longer than a head may be")
    head = file.read(length)
    if hashlib.sha256(head).digest() != digest:
        raise PartError("its head is torn")
    try:
        return _part(json.loads(head))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise error if isinstance(error, PartError) else PartError(f"its head is not understood: {error}") from error


def chunks_of(part: Part, file: BinaryIO) -> Iterator[tuple[Chunk, bytes]]:
    """Each chunk with its bytes, as they are packed. Raises PartError where one is torn off."""
    for chunk in part.chunks:
        data = file.read(chunk.length)
        if len(data) != chunk.length:
            raise PartError(f"it ends within a chunk of {part.files[chunk.file].path}")
        yield chunk, data


def set_id_of(files: Sequence[File], digests: Sequence[str]) -> str:
    """Names a set by what is in it. digests : of all chunks, in their order."""
    said = json.dumps([[asdict(file) for file in files], list(digests)])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def _part(said: Mapping[str, Any]) -> Part:
    files = tuple(File(_checked(str(each["path"])), int(each["size"])) for each in said["files"])
    sizes = [file.size for file in files]
    if len(files) > _MOST_FILES or min(sizes, default=0) < 0 or sum(sizes) > _MOST_TOTAL_BYTES:
        raise PartError("it names more files or bytes than a set may hold")
    if len({file.path for file in files}) != len(files):
        raise PartError("it names a file twice")
    chunks = tuple(
        Chunk(int(c["file"]), int(c["start"]), int(c["size"]), str(c["way"]), int(c["length"]), str(c["digest"]))
        for c in said["chunks"]
    )
    for chunk in chunks:
        if not (0 <= chunk.file < len(files) and chunk.start >= 0 and 0 < chunk.size <= CHUNK_BYTES):
            raise PartError("it names a chunk that cannot be")
        if chunk.start + chunk.size > files[chunk.file].size or not 0 <= chunk.length <= MOST_BYTES:
            raise PartError("it names a chunk beyond its file")
    set_id, number, total = str(said["set_id"]), int(said["number"]), int(said["total"])
    if not (set_id.isalnum() and len(set_id) <= 64 and 1 <= number <= total <= _MOST_FILES):
        raise PartError("its number or its set cannot be")
    return Part(set_id, number, total, files, chunks)


def _checked(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\\" in path or "\0" in path or len(path) > 500:
        raise PartError(f"it names a place that it must not write to: {path[:80]!r}")
    if str(pure) != path or pure.parts[0].startswith(".carried"):
        raise PartError(f"it names a place that it must not write to: {path[:80]!r}")
    return path
