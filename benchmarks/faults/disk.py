"""Faults of files: no room, no right to write, and files that somebody else changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.faults.scene import NAMESPACE, Scene, SkippedError

_HEADER = 256  # bytes of a segment file
_LEARNED_HEADER = 32


def full(scene: Scene) -> None:
    """No byte left on the disk for a while."""
    filler = scene.directory / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        scene.hold(4.0)
    filler.unlink()


def immutable(scene: Scene) -> None:
    """Nothing can be created, renamed or removed in the directory for a while."""
    directory = scene.directory / NAMESPACE
    if os.geteuid() != 0:
        directory.chmod(0o500)
        scene.hold(4.0)
        directory.chmod(0o700)
        return
    if not _chattr("+i", directory):
        raise SkippedError("root writes to every directory, and chattr +i does not work on this file system")
    try:
        scene.hold(4.0)
    finally:
        _chattr("-i", directory)


def segment_truncated(scene: Scene) -> None:
    """Mapped segments lose their second half."""
    for path in _segments(scene):
        os.truncate(path, path.stat().st_size // 2)
    scene.hold(3.0)


def segment_overwritten(scene: Scene) -> None:
    """All but the header of mapped segments is written over with random bytes."""
    for path in _segments(scene):
        with path.open("r+b") as file:
            file.seek(_HEADER)
            file.write(scene.chance.randbytes(path.stat().st_size - _HEADER))
    scene.hold(3.0)


def learned_hostile(scene: Scene) -> None:
    """Between two lives, what was learned is replaced by numbers of the worst kind under a right checksum."""
    with scene.load.outage():
        scene.promise_committed()
        scene.close_server()
        path = scene.directory / NAMESPACE / "learned.bin"
        if path.exists():
            content = path.read_bytes()[:-8]
            num_floats = (len(content) - _LEARNED_HEADER) // 4
            worst = scene.chance.choice([float("nan"), float("inf"), 1e30, -1e30, 0.0, 1e-30])
            content = content[:_LEARNED_HEADER] + np.full(num_floats, worst, "<f4").tobytes()
            path.write_bytes(content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little"))
        scene.server.start()


def _segments(scene: Scene) -> list[Path]:
    """The segments of the server, once there is one; what they held is not promised any more."""
    deadline = time.monotonic() + 20
    while not (found := list((scene.directory / NAMESPACE).glob("*.seg"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    scene.is_damaged = True
    return found


def _chattr(flag: str, directory: Path) -> bool:
    if shutil.which("chattr") is None:
        return False
    return subprocess.run(["chattr", flag, str(directory)], capture_output=True, check=False).returncode == 0
