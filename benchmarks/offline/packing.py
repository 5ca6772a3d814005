"""Files into parts of at most so many bytes."""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from benchmarks.offline.parts import CHUNK_BYTES, Chunk, File, Part, set_id_of, write_part
from benchmarks.offline.planes import encode

_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}
_HEAD_BYTES = 1 << 16
"""Kept free in a part for its head, and as much again for every thousand chunks of the set."""


def collect(root: Path, below: str) -> list[tuple[Path, str]]:
    """The files under a directory, or one file, and the path that each shall have. Raises ValueError for a link."""
    if root.is_file():
        return [(root, f"{below}/{root.name}" if below else root.name)]
    if not root.is_dir():
        raise ValueError(f"{root} is neither a file nor a directory")
    found = []
    for path in sorted(root.rglob("*")):
        if path.is_symlink() and not path.is_file():
            raise ValueError(f"{path} is a link to what is no file")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            found.append((path, "/".join(filter(None, [below, path.relative_to(root).as_posix()]))))
    return found


def pack(files: Sequence[tuple[Path, str]], out: Path, part_bytes: int, threads: int = 2) -> list[Path]:
    """Write ``files``, each with the path it shall have, as parts to ``out``; returns theirs, in order.

    Replaces the parts that lie there. Raises ValueError where a part would hold less than a chunk.
    """
    if part_bytes < 2 * (CHUNK_BYTES + 2 * _HEAD_BYTES):
        raise ValueError(f"a part must have {2 * (CHUNK_BYTES + 2 * _HEAD_BYTES) >> 20} MiB or more")
    said = tuple(File(name, path.stat().st_size) for path, name in files)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=out) as directory, ThreadPoolExecutor(threads) as pool:
        payloads: list[tuple[Path, list[Chunk]]] = []
        room, current = 0, None
        head_bytes = _HEAD_BYTES * (2 + sum(file.size for file in said) // CHUNK_BYTES // 1000) + 200 * len(said)
        for chunk, data in _in_order(pool, _chunks(files), threads):
            if current is None or len(data) + 200 > room:
                if current is not None:
                    current.close()
                payloads.append((Path(directory) / str(len(payloads)), []))
                current, room = payloads[-1][0].open("wb"), part_bytes - head_bytes
            current.write(data)
            payloads[-1][1].append(chunk)
            room -= len(data) + 200
        if current is not None:
            current.close()
        set_id = set_id_of(said, [chunk.digest for _, chunks in payloads for chunk in chunks])
        written = []
        for number, (path, chunks) in enumerate(payloads, 1):
            written.append(out / f"part-{number:02}")
            with path.open("rb") as payload:
                write_part(written[-1], Part(set_id, number, len(payloads), said, tuple(chunks)), payload)
            path.unlink()
    return written


def _chunks(files: Sequence[tuple[Path, str]]) -> Iterator[tuple[int, int, bytes, int]]:
    """Index of the file, start, bytes, and the width of the numbers in them."""
    for index, (path, _) in enumerate(files):
        with path.open("rb") as file:
            size = path.stat().st_size
            cuts = _tensors(file, size) if path.suffix == ".safetensors" else [(0, 1)]
            for (start, width), end in zip(cuts, [*(cut for cut, _ in cuts[1:]), size], strict=True):
                for at in range(start, end, CHUNK_BYTES):
                    file.seek(at)
                    yield index, at, file.read(min(CHUNK_BYTES, end - at)), width


def _tensors(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Where the head and each tensor begin, and the width of its numbers; the whole file where it is not understood."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if not 0 < length <= min(size, 100 << 20):
            raise ValueError
        said = json.loads(file.read(length))
        tensors = [value for name, value in said.items() if name != "__metadata__"]
        starts = sorted((8 + length + int(t["data_offsets"][0]), _WIDTHS.get(t["dtype"], 1)) for t in tensors)
    except (ValueError, KeyError, TypeError, struct.error):
        return [(0, 1)]
    return [(0, 1), *((start, width) for start, width in starts if 0 < start < size)]


def _in_order(
    pool: ThreadPoolExecutor, chunks: Iterable[tuple[int, int, bytes, int]], threads: int
) -> Iterator[tuple[Chunk, bytes]]:
    """Chunks made smaller beside each other, in their order."""
    waiting = iter(chunks)
    running = [pool.submit(_made, *each) for each in islice(waiting, 2 * threads)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(_made, *each) for each in islice(waiting, 1)]


def _made(file: int, start: int, data: bytes, width: int) -> tuple[Chunk, bytes]:
    way, written = encode(data, width)
    chunk = Chunk(file, start, len(data), way, len(written), hashlib.sha256(data).hexdigest())
    return replace(chunk), written
