"""The directory in which a build works: kept where it ends early, so that the next one goes on."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd.errors import CacheLocked
from ssd.retrieval.files import make_directory

_SUFFIX = ".unfinished"
_OLD = "old"


def unfinished_directory(out: Path) -> Path:
    """Where a build of ``out`` works: beside it."""
    return out.parent / f".{out.name}{_SUFFIX}"


@contextmanager
def working_directory(out: Path, *, fresh: bool) -> Iterator[Path]:
    """The directory, with ``new`` and ``journal`` in it; removed at the end, unless an error comes after a segment.

    ``fresh`` : nothing of an earlier build is kept. Raises CacheLocked where another build is at work, OSError.
    """
    path = unfinished_directory(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    make_directory(path)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheLocked(f"another process builds {out} now: wait for it, or give another --out") from None
        if (path / _OLD).exists() and not out.exists():  # it ended between two renames
            (path / _OLD).rename(out)
        for child in path.iterdir():
            if fresh or child.name not in ("new", "journal"):
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        for name in ("new", "journal"):
            make_directory(path / name)
        try:
            yield path
        except BaseException:
            if not _has_finished(path):
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def replace_directory(out: Path, working: Path) -> None:
    """Put ``new`` of ``working`` in the place of ``out``."""
    if out.exists():
        out.rename(working / _OLD)
    (working / "new").rename(out)


def _has_finished(path: Path) -> bool:
    """Whether any segment was written."""
    return next((path / "new").glob("*.seg"), None) is not None
