"""Where a cache is made: beside its place, so that it is there whole or not at all and a killed build goes on."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from ssd.errors import CacheLocked, ConfigError
from ssd.retrieval.directory import is_of_a_cache
from ssd.retrieval.files import LOCK_NAME, MANIFEST_NAME, DirectoryLock, make_directory
from ssd.retrieval.static import DEFAULT_SEGMENT_TOKENS, StaticWriter

_SUFFIX = ".unfinished"
_OLD = "old"


def unfinished_directory(out: Path) -> Path:
    """Where a build of ``out`` works: beside it, and beside what it links to."""
    out = out.resolve()
    return out.parent / f".{out.name}{_SUFFIX}"


@contextmanager
def working_directory(out: Path, *, fresh: bool) -> Iterator[Path]:
    """The directory, with ``new`` and ``journal`` in it; removed at the end, unless an error comes and
    a block with segments is finished.

    ``fresh`` : nothing of an earlier build is kept. Raises ConfigError if the directory cannot be created, CacheLocked
    if another process builds ``out``, OSError.
    """
    path = unfinished_directory(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        make_directory(path)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({out.parent}: {error.strerror}): give another directory"
        ) from error
    with _locked(path, out):
        _put_back(out, path)
        if (path / _OLD).exists() and (path / "new" / MANIFEST_NAME).exists():
            raise ConfigError(
                f"{path / _OLD} is what {out} held before a command that was to replace it was killed, and another "
                "cache was made there since: move one of them away"
            )
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


@contextmanager
def _locked(working: Path, out: Path) -> Iterator[None]:
    lock = os.open(working, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheLocked(f"another process builds {out} now: wait for it, or give another --out") from None
        yield
    finally:
        os.close(lock)


def left_for_later(out: Path) -> Path | None:
    """Where a build of ``out`` that ended has left what the same command goes on with; None where there is nothing, or
    another process is at work."""
    working = unfinished_directory(out)
    if not working.exists() or (working / _OLD).exists():
        return None
    try:
        with _locked(working, out):
            return working
    except CacheLocked:
        return None


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
    out = check_new(out, force=force)
    with working_directory(out, fresh=True) as working:
        with StaticWriter(
            working / "new", fingerprint=fingerprint, namespace=namespace, segment_tokens=segment_tokens
        ) as writer:
            yield writer
        replace_directory(out, working)


def check_new(out: Path, *, force: bool) -> Path:
    """Where ``out`` is, without links; what a killed command had taken away is back. ``force`` : a cache there is
    replaced. Raises ConfigError, or CacheLocked, where it is not to be written.
    """
    given, out = out, out.resolve()
    working = unfinished_directory(out)
    if (working / _OLD).exists():
        with _locked(working, out):
            _put_back(out, working)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{given} is a file: give a directory with --out")
    if os.path.ismount(out):
        raise ConfigError(
            f"{given} is a mount point, which no finished cache can take the place of: give a directory below it with "
            f"--out, such as {given / 'cache'}"
        )
    if (out / MANIFEST_NAME).exists():
        if not force:
            raise ConfigError(
                f"{given} holds a cache already: --force replaces it, or give another directory with --out; `ssd-cache "
                "merge` makes one of two"
            )
        if others := sorted(path.name for path in out.iterdir() if not (path.is_file() and is_of_a_cache(path))):
            raise ConfigError(
                f"{given} holds {', '.join(others[:3])} beside a cache, which --force would remove: give another "
                "directory with --out"
            )
        DirectoryLock(out).close()
    elif out.exists() and any(path.name != LOCK_NAME for path in out.iterdir()):
        raise ConfigError(f"{given} is not empty and holds no cache: give another directory with --out")
    return out
