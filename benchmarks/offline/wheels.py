"""Wheels for another machine's Python, by pip, and their contents without it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from benchmarks.offline.streams import PartError

_PLATFORMS = (
    *(f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
_MOST_BYTES = 4 << 30


def download(requirements: Path, python: str, into: Path) -> Sequence[Path]:
    """The wheels that ``requirements`` lists, without what they need: the list is whole. Raises ValueError."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for platform in _PLATFORMS:
        options += ["--platform", platform]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, "-d", str(into), "-r", str(requirements)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"pip found no wheel: {(done.stderr.strip() or '-').splitlines()[-1][:300]}")
    return sorted(into.glob("*.whl"))


def install(wheels: Sequence[Path], site: Path) -> None:
    """Lay out what the wheels hold in ``site``, for PYTHONPATH. Raises PartError for one that reaches out of it."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [PurePosixPath(name) for name in archive.namelist()]
            if any(name.is_absolute() or ".." in name.parts for name in names):
                raise PartError(f"{wheel.name} names a place outside of itself")
            if sum(each.file_size for each in archive.infolist()) > _MOST_BYTES:
                raise PartError(f"{wheel.name} holds more than a wheel may")
            archive.extractall(site)
