"""Files for a machine without a network, in parts of bounded size.

``python -m benchmarks.offline pack [PATH...] [--model DIR] [--wheels] [--python 3.12] [--part-mib N] [--out .carry]``
``python -m benchmarks.offline unpack PART... --into DIR [--install]``

``pack`` writes a set of parts: files and directories under their own names, a model under "model", the wheels that
benchmarks.gpu_check needs (its requirements.txt) under "wheels". It loses nothing, and bfloat16 weights take some 72 %
of their bytes. ``unpack`` takes parts in any order, each checked, and says which are missing; files appear when all
parts came. With --install wheels are laid out in DIR/site, for PYTHONPATH.

All parts together are one .tar.xz. A part is ``SSDPART3``, the first half of the SHA-256 of the whole, its own SHA-256,
uint32 number from 1 and uint32 of how many, little-endian, and its bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_REQUIREMENTS: Final = Path(__file__).parent / "gpu_check" / "requirements.txt"
_PLATFORMS = (*(f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
_FRONT: Final = struct.Struct("<8s16s32sII")
_MAGIC: Final = b"SSDPART3"
_BY_PAIRS: Final = [{"id": lzma.FILTER_LZMA2, "preset": 1, "lc": 3, "lp": 1, "pb": 1}]
"""High bytes of weights are nearly alike, low ones are noise: each has statistics of its own."""
_MOST_PARTS: Final = 10_000
_LEAST_PART: Final = 1 << 20
_WAITING: Final = ".carried"


class PartError(ValueError):
    """A part that is torn, or of another set, or files that must not be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a part is torn or a file is not to be had, after one line that says so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("pack", help="write parts").add_argument
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
    try:
        return _pack(args) if args.command == "pack" else _unpack(args)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"offline: {error}", file=sys.stderr)
        return 1


def _pack(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        named = [(path, path.name) for path in args.paths]
        named += [(args.model, "model")] if args.model is not None else []
        if args.wheels:
            _download(args.python, Path(directory))
            named.append((Path(directory), "wheels"))
        if not named:
            raise ValueError("nothing to pack: name files, --model or --wheels")
        parts = pack(named, args.out, int(args.part_mib * (1 << 20)))
    for part in parts:
        print(f"{part} {part.stat().st_size:,} bytes")
    return 0


def _unpack(args: argparse.Namespace) -> int:
    missing: list[int] = []
    for path in args.parts:
        missing = unpack(path, args.into)
        waits = f"missing: part {', '.join(map(str, missing))}" if missing else "all files are there"
        print(f"{path.name}: {waits}")
    if args.install and not missing:
        wheels = sorted((args.into / "wheels").glob("*.whl"))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:  # which keeps what it names below the directory
                archive.extractall(args.into / "site")
        print(f"{len(wheels)} wheels in {args.into / 'site'}")
    return 0


def _download(python: str, into: Path) -> None:
    """The wheels of gpu_check, without what they need: the list is whole. Raises ValueError."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    options += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "-d", str(into), "-r", str(_REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"pip found no wheel: {(done.stderr.strip() or '-').splitlines()[-1][:300]}")


def pack(named: Sequence[tuple[Path, str]], out: Path, part_bytes: int) -> list[Path]:
    """Write files and directories, each with the name it shall have, as parts to ``out``, in place of those there.

    Hidden files of directories stay behind. Raises ValueError where one is not there.
    """
    if part_bytes < _LEAST_PART:
        raise ValueError(f"a part takes at least {_LEAST_PART >> 20} MiB")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*"):
        old.unlink()
    with tempfile.TemporaryFile(dir=out) as whole:
        with lzma.open(whole, "wb", filters=_BY_PAIRS) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
            for path, name in named:
                if not path.exists():
                    raise ValueError(f"{path} is neither a file nor a directory")
                archive.add(path, name, filter=lambda each: None if "/." in each.name else each)
        room = part_bytes - _FRONT.size
        total = -(-whole.tell() // room)
        whole.seek(0)
        set_id = hashlib.file_digest(whole, "sha256").digest()[:16]
        whole.seek(0)
        written = []
        for number in range(1, total + 1):
            data = whole.read(room)
            written.append(out / f"part-{number:02}")
            front = _FRONT.pack(_MAGIC, set_id, hashlib.sha256(data).digest(), number, total)
            written[-1].write_bytes(front + data)
    return written


def unpack(path: Path, into: Path) -> list[int]:
    """Keep a part until all came, then write the files; the numbers of those that are still missing.

    Raises PartError where it is torn or of another set, and where files would be written outside of ``into``.
    """
    content = path.read_bytes()
    if len(content) < _FRONT.size or not content.startswith(_MAGIC):
        raise PartError(f"{path}: this is no part of packed files")
    _, set_id, digest, number, total = _FRONT.unpack_from(content)
    data = content[_FRONT.size :]
    if hashlib.sha256(data).digest() != digest or not 1 <= number <= total <= _MOST_PARTS:
        raise PartError(f"{path}: it is torn")
    place = into / _WAITING / f"{set_id.hex()}-{total}"
    place.mkdir(parents=True, exist_ok=True)
    if any(each != place for each in (into / _WAITING).iterdir()):
        raise PartError(f"{into} waits for parts of another set: name another, or remove {_WAITING} in it")
    kept = [place / str(each) for each in range(1, total + 1)]
    if not (place / "done").exists():
        kept[number - 1].with_suffix(".new").write_bytes(data)
        kept[number - 1].with_suffix(".new").replace(kept[number - 1])
        missing = [each for each, part in enumerate(kept, 1) if not part.exists()]
        if missing:
            return missing
        with tempfile.TemporaryFile(dir=place) as whole:
            for part in kept:
                whole.write(part.read_bytes())
            whole.seek(0)
            if hashlib.file_digest(whole, "sha256").digest()[:16] != set_id:
                raise PartError("the parts are not of one set: unpack them into another directory")
            whole.seek(0)
            try:
                with lzma.open(whole) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
                    archive.extractall(into, filter="data")  # nothing outside of it, no devices, no links that leave it
            except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
                raise PartError(f"the parts hold what must not be written: {error}") from error
        (place / "done").touch()
        for part in kept:
            part.unlink()
    return []


if __name__ == "__main__":
    sys.exit(main())
