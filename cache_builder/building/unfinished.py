"""Where a cache is made: beside its place, so that it is there whole or not at all and a killed build goes on."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from ssd.errors import CacheLocked, ConfigError
from ssd.retrieval.files import LOCK_NAME, MANIFEST_NAME, DirectoryLock, make_directory
from ssd.retrieval.static import DEFAULT_SEGMENT_TOKENS, StaticWriter

_SUFFIX = ".unfinished"
_OLD = "old"


def unfinished_directory(out: Path) -> Path:
    """Where a build of ``out`` works: beside it."""
    return out.parent / f".{out.name}{_SUFFIX}"


@contextmanager
def working_directory(out: Path, *, fresh: bool) -> Iterator[Path]:
    """The directory, with ``new`` and ``journal`` in it; removed at the end, unless an error comes and
    a block with segments is finished.

    ``fresh`` : nothing of an earlier build is kept. Raises CacheLocked where another process is at work, OSError.
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
        _put_back(out, path)
        for child in path.iterdir():
            if fresh or child.name not in ("new", "journal"):
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        for name in ("new", "journal"):
            make_directory(path / name)
        try:
            yield path
        except BaseException:
            _put_back(out, path)
            if not all(any((path / name).glob("*")) for name in ("new", "journal")):  # "new" may be ``out`` already
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _put_back(out: Path, working: Path) -> None:
    """What ``replace_directory`` took away, where it ended between its two renames."""
    if (working / _OLD).exists() and not out.exists():
        (working / _OLD).rename(out)


def replace_directory(out: Path, working: Path) -> None:
    """Put ``new`` of ``working`` in the place of ``out``; raises CacheLocked where a server writes that."""
    with closing(DirectoryLock(out)) if out.exists() else nullcontext():
        if out.exists():
            out.rename(working / _OLD)
        (working / "new").rename(out)


@contextmanager
def new_cache(
    out: Path, *, fingerprint: str, namespace: str, force: bool, segment_tokens: int = DEFAULT_SEGMENT_TOKENS
) -> Iterator[StaticWriter]:
    """A writer of what becomes the cache ``out`` when the block ends without an exception.

    ``force`` : a cache that is there already is replaced; it may be read meanwhile, but no server may write it.
    ``segment_tokens`` : size of a segment. Raises ConfigError, CacheError, OSError; then ``out`` is as it was before.
    """
    check_new(out, force=force)
    with working_directory(out, fresh=True) as working:
        with StaticWriter(
            working / "new", fingerprint=fingerprint, namespace=namespace, segment_tokens=segment_tokens
        ) as writer:
            yield writer
        replace_directory(out, working)


def check_new(out: Path, *, force: bool) -> None:
    """Raises ConfigError, or CacheLocked, where ``out`` is not to be written. ``force`` : a cache there is replaced."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: give a directory with --out")
    if os.path.ismount(out):
        raise ConfigError(
            f"{out} is a mount point, which no finished cache can take the place of: give a directory below it with "
            f"--out, such as {out / 'cache'}"
        )
    if (out / MANIFEST_NAME).exists():
        if not force:
            raise ConfigError(
                f"{out} holds a cache already: --force replaces it, or give another directory with --out; `ssd-cache "
                "merge` makes one of two"
            )
        DirectoryLock(out).close()
    elif out.exists() and any(path.name != LOCK_NAME for path in out.iterdir()):
        raise ConfigError(f"{out} is not empty and holds no cache: give another directory with --out")
