"""Files for a machine without a network, in parts of bounded size.

``python -m benchmarks.offline pack [PATH...] [--model DIR] [--wheels] [--python 3.12] [--part-mib N] [--out .carry]``
``python -m benchmarks.offline unpack PART... --into DIR [--install]``

``pack`` writes a set of parts: files and directories under their own names, a model under "model", the wheels that
benchmarks.gpu_check needs (its requirements.txt) under "wheels". What it writes is smaller and loses nothing: bfloat16
weights take 70 % of their bytes, weights that were quantised once and unpacked little more than they did before.
``unpack`` takes parts in any order, each checked, and says which are missing; files appear when all parts came. With
--install wheels are laid out in DIR/site, for PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.offline.packing import collect, pack
from benchmarks.offline.streams import PartError
from benchmarks.offline.unpacking import unpack
from benchmarks.offline.wheels import download, install

REQUIREMENTS = Path(__file__).parent.parent / "gpu_check" / "requirements.txt"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 where a part is torn or a file is not to be had, after one line that says so."""
    args = _parse(argv)
    try:
        return _pack(args) if args.command == "pack" else _unpack(args)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"offline: {error}", file=sys.stderr)
        return 1


def _pack(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        files = [found for path in args.paths for found in collect(path, "" if path.is_file() else path.name)]
        if args.model is not None:
            files += collect(args.model, "model")
        if args.wheels:
            files += [(wheel, f"wheels/{wheel.name}") for wheel in download(REQUIREMENTS, args.python, Path(directory))]
        if not files:
            raise ValueError("nothing to pack: name files, --model or --wheels")
        parts = pack(files, args.out, int(args.part_mib * (1 << 20)), args.threads)
        before = sum(path.stat().st_size for path, _ in files)
    after = sum(part.stat().st_size for part in parts)
    print(
        f"{len(files)} files, {before:,} bytes, in {len(parts)} parts, {after:,} bytes, "
        f"{time.perf_counter() - began:.0f} s"
    )
    for part in parts:
        print(f"  {part} {part.stat().st_size:,} bytes")
    return 0


def _unpack(args: argparse.Namespace) -> int:
    args.into.mkdir(parents=True, exist_ok=True)
    for path in args.parts:
        try:
            state = unpack(path, args.into)
        except PartError as error:
            raise PartError(f"{path}: {error}") from error
        print(f"{path.name}: {state}")
    if args.install and not state.missing_parts:
        wheels = sorted((args.into / "wheels").glob("*.whl"))
        install(wheels, args.into / "site")
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
    add("--threads", type=int, default=2, help="(default: %(default)s)")
    add("--out", type=Path, default=Path(".carry"), help="directory of the parts (default: %(default)s)")
    add = commands.add_parser("unpack", help="put parts together").add_argument
    add("parts", nargs="+", type=Path, metavar="PART")
    add("--into", type=Path, required=True, metavar="DIR")
    add("--install", action="store_true", help="lay out the wheels in DIR/site once all parts came")
    args = parser.parse_args(argv)
    if args.command == "pack" and (args.part_mib <= 0 or args.threads < 1):
        packing.error("--part-mib and --threads take numbers above 0")
    return args
