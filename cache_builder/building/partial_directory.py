"""A directory beside another one, in which that is made: never left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX = ".partial"


@contextmanager
def partial_directory(out: Path) -> Iterator[Path]:
    """A new directory beside ``out``, removed at the end; so are those of builds of ``out`` that were killed.

    Who makes one holds a lock on it, which ends with the process, however that ends.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}."
    for left in out.parent.glob(f"{prefix}*{_SUFFIX}"):
        _remove_if_left(left)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=out.parent))
    lock = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _remove_if_left(directory: Path) -> None:
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except OSError:  # another build is at work in it
        pass
    finally:
        os.close(lock)
