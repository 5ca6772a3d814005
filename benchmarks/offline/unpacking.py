"""Parts into files, in any order; a file appears when all of it is there."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.offline.parts import Chunk, Part, chunks_of, read_part
from benchmarks.offline.planes import decode
from benchmarks.offline.streams import PartError

_WAITING = ".carried"


@dataclass(frozen=True, slots=True)
class State:
    """``missing_parts`` : numbers that have not come. ``complete``, ``incomplete`` : paths of files."""

    missing_parts: tuple[int, ...]
    complete: tuple[str, ...]
    incomplete: tuple[str, ...]

    def __str__(self) -> str:
        if not self.missing_parts:
            return f"all {len(self.complete)} files are there"
        return (
            f"{len(self.complete)} files are there, {len(self.incomplete)} are not; missing: "
            f"part {', '.join(map(str, self.missing_parts))}"
        )


def unpack(path: Path, into: Path, threads: int | None = None) -> State:
    """Put what a part holds in its place and say what is still missing.

    Raises PartError, nothing of the part being in a file that is whole, where it is torn or of another set.
    """
    with path.open("rb") as file:
        part = read_part(file)
        place = into / _WAITING / part.set_id
        place.mkdir(parents=True, exist_ok=True)
        others = [each.name for each in (into / _WAITING).iterdir() if each.is_dir() and each.name != part.set_id]
        if others:
            raise PartError(
                f"{into} waits for parts of another set: name another directory, or remove {_WAITING} in it"
            )
        if not (place / f"part-{part.number}").exists():
            with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
                waiting = iter(chunks_of(part, file))
                at_once = 4 * (threads or os.cpu_count() or 1)
                while running := [pool.submit(_put, part, place, *each) for each in islice(waiting, at_once)]:
                    for each in running:
                        each.result()
            if file.read(1):
                raise PartError("there is more in it than its head says")
            (place / f"part-{part.number}").touch()
    return _finish(part, place, into)


def _put(part: Part, place: Path, chunk: Chunk, data: bytes) -> None:
    made = decode(chunk.way, data, chunk.size)
    name = part.files[chunk.file].path
    if hashlib.sha256(made).hexdigest() != chunk.digest:
        raise PartError(f"a chunk of {name} is torn")
    descriptor = os.open(place / f"file-{chunk.file}", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, made, chunk.start)
    finally:
        os.close(descriptor)


def _finish(part: Part, place: Path, into: Path) -> State:
    """Once all parts came, every file goes to its place."""
    missing = tuple(number for number in range(1, part.total + 1) if not (place / f"part-{number}").exists())
    paths = tuple(file.path for file in part.files)
    if missing:
        return State(missing, (), paths)
    for index, file in enumerate(part.files):
        waiting, goal = place / f"file-{index}", into / file.path
        if not waiting.exists() and goal.is_file() and goal.stat().st_size == file.size:
            continue  # an earlier call was broken off here
        if not waiting.exists() and file.size == 0:
            waiting.touch()
        if not waiting.exists() or waiting.stat().st_size != file.size:
            raise PartError(f"{file.path} is not whole, though all parts came: unpack into another directory")
        if not goal.resolve().is_relative_to(into.resolve()):
            raise PartError(f"{file.path} would be written outside of {into}")
        goal.parent.mkdir(parents=True, exist_ok=True)
        waiting.replace(goal)
    return State((), paths, ())
