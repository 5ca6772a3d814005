"""Files for a machine without a network, in parts of bounded size.

``python -m benchmarks.offline pack [PATH...] [--model DIR] [--wheels] [--python 3.12] [--part-mib N] [--out .carry]``
``python -m benchmarks.offline unpack PART... --into DIR [--install]``

``pack`` writes a set of parts: files and directories under their own names, a model under "model", the wheels that
benchmarks.gpu_check needs (its requirements.txt) under "wheels". It loses nothing, and bfloat16 weights take 70 % of
their bytes: their exponents are alike, and lie apart from their noise. ``unpack`` takes parts in any order, each
checked, and says which are missing; files appear when all parts came. With --install wheels are laid out in DIR/site,
for PYTHONPATH.

A part is ``SSDPART2``, uint32 length of its head, the SHA-256 of the head, the head as JSON (all files of the set, and
the chunks that are here), and the chunks one behind the other; little-endian.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

import numpy as np

CHUNK_BYTES: Final = 4 << 20
"""Of a file, as it is packed and checked."""

_REQUIREMENTS = Path(__file__).parent / "gpu_check" / "requirements.txt"
_PLATFORMS = (*(f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
_FRONT: Final = struct.Struct("<8sI32s")
_MAGIC: Final = b"SSDPART2"
_MOST_HEAD_BYTES: Final = 32 << 20
_MOST_FILES, _MOST_BYTES = 10_000, 256 << 30
_SAMPLED: Final = 1 << 17
_WAITING: Final = ".carried"


class PartError(ValueError):
    """A part that is torn, or of another set, or that names what must not be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a part is torn or a file is not to be had, after one line that says so."""
    args = _parse(argv)
    try:
        return _pack(args) if args.command == "pack" else _unpack(args)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"offline: {error}", file=sys.stderr)
        return 1


def _pack(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        files = [found for path in args.paths for found in collect(path, "" if path.is_file() else path.name)]
        files += collect(args.model, "model") if args.model is not None else []
        if args.wheels:
            files += [(wheel, f"wheels/{wheel.name}") for wheel in _download(args.python, Path(directory))]
        if not files:
            raise ValueError("nothing to pack: name files, --model or --wheels")
        parts = pack(files, args.out, int(args.part_mib * (1 << 20)))
    for part in parts:
        print(f"{part} {part.stat().st_size:,} bytes")
    return 0


def _unpack(args: argparse.Namespace) -> int:
    missing: list[int] = []
    for path in args.parts:
        try:
            missing = unpack(path, args.into)
        except PartError as error:
            raise PartError(f"{path}: {error}") from error
        waits = f"missing: part {', '.join(map(str, missing))}" if missing else "all files are there"
        print(f"{path.name}: {waits}")
    if args.install and not missing:
        wheels = sorted((args.into / "wheels").glob("*.whl"))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:  # which keeps what it names below the directory
                archive.extractall(args.into / "site")
        print(f"{len(wheels)} wheels in {args.into / 'site'}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = (packing := commands.add_parser("pack", help="write parts")).add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="files and directories")
    add("--model", type=Path, default=None, metavar="DIR", help="a model's directory, to be unpacked as model/")
    add("--wheels", action="store_true", help="the wheels that benchmarks.gpu_check needs, by pip")
    add("--python", default="3.12", help="version that the wheels are for (default: %(default)s)")
    add("--part-mib", type=float, default=56.0, help="most MiB of a part (default: %(default)s)")
    add("--out", type=Path, default=Path(".carry"), help="directory of the parts (default: %(default)s)")
    add = commands.add_parser("unpack", help="put parts together").add_argument
    add("parts", nargs="+", type=Path, metavar="PART")
    add("--into", type=Path, required=True, metavar="DIR")
    add("--install", action="store_true", help="lay out the wheels in DIR/site once all parts came")
    args = parser.parse_args(argv)
    if args.command == "pack" and args.part_mib * (1 << 20) < 2 * CHUNK_BYTES:
        packing.error(f"--part-mib takes numbers from {2 * CHUNK_BYTES >> 20}")
    return args


def _download(python: str, into: Path) -> list[Path]:
    """The wheels of gpu_check, without what they need: the list is whole. Raises ValueError."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    options += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "-d", str(into), "-r", str(_REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"pip found no wheel: {(done.stderr.strip() or '-').splitlines()[-1][:300]}")
    return sorted(into.glob("*.whl"))


def collect(root: Path, below: str) -> list[tuple[Path, str]]:
    """The files under a directory, or one file, and the path that each shall have. Raises ValueError."""
    if root.is_file():
        return [(root, f"{below}/{root.name}" if below else root.name)]
    if not root.is_dir():
        raise ValueError(f"{root} is neither a file nor a directory")
    names = ((path, path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file())
    return [
        (path, f"{below}/{name.as_posix()}")
        for path, name in names
        if not any(part.startswith(".") for part in name.parts)
    ]


def pack(files: Sequence[tuple[Path, str]], out: Path, part_bytes: int) -> list[Path]:
    """Write ``files``, each with the path it shall have, as parts to ``out``, in the place of those that lie there."""
    said = [{"path": name, "size": path.stat().st_size} for path, name in files]
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*"):
        old.unlink()
    room = part_bytes - (1 << 16) - len(json.dumps(said))  # of a part, beside its head
    with tempfile.TemporaryDirectory(dir=out) as directory:
        heads: list[list[dict[str, Any]]] = [[]]
        payloads = [Path(directory) / "0"]
        left = room
        for chunk, data in _chunks(files):
            if heads[-1] and len(data) + 300 > left:
                heads.append([])
                payloads.append(Path(directory) / str(len(payloads)))
                left = room
            with payloads[-1].open("ab") as payload:
                payload.write(data)
            heads[-1].append(chunk)
            left -= len(data) + 300
        payloads[0].touch()
        set_id = hashlib.sha256(json.dumps([said, heads]).encode()).hexdigest()[:24]
        written = []
        for number, (chunks, payload_path) in enumerate(zip(heads, payloads, strict=True), 1):
            head = {"set": set_id, "number": number, "total": len(heads), "files": said, "chunks": chunks}
            text = json.dumps(head, separators=(",", ":")).encode()
            written.append(out / f"part-{number:02}")
            with written[-1].open("wb") as part, payload_path.open("rb") as payload:
                part.write(_FRONT.pack(_MAGIC, len(text), hashlib.sha256(text).digest()) + text)
                while block := payload.read(1 << 20):
                    part.write(block)
    return written


def _chunks(files: Sequence[tuple[Path, str]]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """What a head says of each chunk, and its bytes as they are packed."""
    for index, (path, _) in enumerate(files):
        with path.open("rb") as file:
            start = 0
            while data := file.read(CHUNK_BYTES):
                width = _best_width(data)
                packed = zlib.compress(_by_planes(data, width), 6)
                yield (
                    {
                        "file": index,
                        "start": start,
                        "size": len(data),
                        "width": width,
                        "length": len(packed),
                        "digest": hashlib.sha256(data).hexdigest(),
                    },
                    packed,
                )
                start += len(data)


def _best_width(data: bytes) -> int:
    """Bytes of the numbers by whose planes the first of ``data`` become the smallest."""
    widths = [width for width in (1, 2, 4) if len(data) % width == 0]
    return min(widths, key=lambda width: len(zlib.compress(_by_planes(data[:_SAMPLED], width), 6)))


def _by_planes(data: bytes, width: int) -> bytes:
    """All first bytes of numbers of ``width`` bytes, then all second ones: high bytes of weights are nearly alike."""
    whole = len(data) // width * width
    return np.frombuffer(data[:whole], np.uint8).reshape(-1, width).T.tobytes() + data[whole:]


def _from_planes(data: bytes, width: int) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(width, -1).T.tobytes() if len(data) % width == 0 else b""


def unpack(path: Path, into: Path) -> list[int]:
    """Put what a part holds in its place; the numbers of those that are still missing.

    Raises PartError, nothing of the part being in a file that is whole, where it is torn or of another set.
    """
    with path.open("rb") as file:
        head = _read_head(file)
        place = into / _WAITING / head["set"]
        place.mkdir(parents=True, exist_ok=True)
        if any(each.name != head["set"] for each in (into / _WAITING).iterdir()):
            raise PartError(f"{into} waits for parts of another set: name another, or remove {_WAITING} in it")
        if not (place / f"part-{head['number']}").exists():
            for chunk in head["chunks"]:
                _put(place, chunk, file.read(chunk["length"]))
            if file.read(1):
                raise PartError("there is more in it than its head says")
            (place / f"part-{head['number']}").touch()
    missing = [number for number in range(1, head["total"] + 1) if not (place / f"part-{number}").exists()]
    if not missing:
        _finish(head["files"], place, into)
    return missing


def _put(place: Path, chunk: Mapping[str, Any], data: bytes) -> None:
    try:
        made = _from_planes(zlib.decompressobj().decompress(data, chunk["size"] + 1), chunk["width"])
    except zlib.error:
        made = b""
    if len(data) != chunk["length"] or hashlib.sha256(made).hexdigest() != chunk["digest"]:
        raise PartError(f"a chunk of file {chunk['file']} is torn")
    descriptor = os.open(place / f"file-{chunk['file']}", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, made, chunk["start"])
    finally:
        os.close(descriptor)


def _finish(files: Sequence[Mapping[str, Any]], place: Path, into: Path) -> None:
    """All parts came: every file goes to its place."""
    for index, file in enumerate(files):
        waiting, goal = place / f"file-{index}", into / file["path"]
        if not waiting.exists() and goal.is_file() and goal.stat().st_size == file["size"]:
            continue  # an earlier call was broken off here
        if file["size"] == 0:
            waiting.touch()
        if not waiting.exists() or waiting.stat().st_size != file["size"]:
            raise PartError(f"{file['path']} is not whole, though all parts came: unpack into another directory")
        if not goal.resolve().is_relative_to(into.resolve()):
            raise PartError(f"{file['path']} would be written outside of {into}")
        goal.parent.mkdir(parents=True, exist_ok=True)
        waiting.replace(goal)


def _read_head(file: BinaryIO) -> dict[str, Any]:
    """``file`` is left where the chunks begin. Raises PartError where the head is torn or not to be believed."""
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size or not front.startswith(_MAGIC):
        raise PartError("this is no part of packed files")
    _, length, digest = _FRONT.unpack(front)
    text = file.read(min(length, _MOST_HEAD_BYTES))
    if hashlib.sha256(text).digest() != digest:
        raise PartError("its head is torn")
    try:
        head: dict[str, Any] = json.loads(text)
        _check(head)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise error if isinstance(error, PartError) else PartError(f"its head is not understood: {error}") from error
    return head


def _check(head: Mapping[str, Any]) -> None:
    files, chunks = head["files"], head["chunks"]
    sizes = [int(file["size"]) for file in files]
    if len(files) > _MOST_FILES or min(sizes, default=0) < 0 or sum(sizes) > _MOST_BYTES:
        raise PartError("it names more files or bytes than a set may hold")
    for file in files:
        pure = PurePosixPath(file["path"])
        is_inside = pure.parts and not pure.is_absolute() and ".." not in pure.parts and "\\" not in file["path"]
        if not is_inside or str(pure) != file["path"] or pure.parts[0].startswith(_WAITING):
            raise PartError(f"it names a place that it must not write to: {file['path'][:80]!r}")
    for chunk in chunks:
        start, size, length = (int(chunk[name]) for name in ("start", "size", "length"))
        if not (0 <= chunk["file"] < len(files) and start >= 0 and 0 < size <= CHUNK_BYTES):
            raise PartError("it names a chunk that cannot be")
        is_known = chunk["width"] in (1, 2, 4) and 0 <= length <= 2 * CHUNK_BYTES
        if start + size > sizes[chunk["file"]] or not is_known:
            raise PartError("it names a chunk beyond its file")
    is_named = str(head["set"]).isalnum() and len(head["set"]) <= 64
    if not (is_named and 1 <= head["number"] <= head["total"] <= _MOST_FILES):
        raise PartError("its number or its set cannot be")


if __name__ == "__main__":
    sys.exit(main())
