"""The working directory of a build, next to its output. The output appears complete, and a killed build can resume."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from ssd.errors import CacheLocked, ConfigError
from ssd.retrieval.directory import is_cache_file
from ssd.retrieval.files import LOCK_NAME, MANIFEST_NAME, DirectoryLock, make_directory
from ssd.retrieval.prebuilt import DEFAULT_SEGMENT_TOKENS, PrebuiltWriter

_SUFFIX = ".unfinished"
_OLD = "old"


def resumable_directory(out: Path) -> Path:
    """Return the path of a build's working directory, next to ``out`` (if ``out`` is a link, next to its target)."""
    out = out.resolve()
    return out.parent / f".{out.name}{_SUFFIX}"


@contextmanager
def working_directory(out: Path, *, fresh: bool) -> Iterator[Path]:
    """Yield the working directory of a build, locked against other builds, and delete it when the context ends.

    If an exception ends the context and at least one block is finished, the directory is kept, so that the next build
    resumes from it. ``fresh`` deletes the files of an earlier build first. Raises ConfigError or OSError if the
    directory cannot be used, and CacheLocked if another process uses it.
    """
    path = resumable_directory(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        make_directory(path)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({out.parent}: {error.strerror}): give another directory"
        ) from error
    with _hold_lock(path, out):
        _restore_output(out, path)
        if (path / _OLD).exists() and (path / "new" / MANIFEST_NAME).exists():
            raise ConfigError(
                f"a command was killed while it replaced {out}. The former content is in {path / _OLD}, but {out} "
                "now contains another cache: move one of the two away"
            )
        for child in path.iterdir():
            if fresh or child.name not in ("new", "journal"):
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        for name in ("new", "journal"):
            make_directory(path / name)
        try:
            yield path
        except BaseException:
            _restore_output(out, path)
            if not all(any((path / name).glob("*")) for name in ("new", "journal")):  # "new" may have been moved
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _hold_lock(working: Path, out: Path) -> Iterator[None]:
    lock = os.open(working, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheLocked(f"another process is building {out}: wait for it, or give another --out") from None
        yield
    finally:
        os.close(lock)


def find_resumable(out: Path) -> Path | None:
    """Return the working directory of an interrupted build of ``out``; None if none exists or a process uses it."""
    working = resumable_directory(out)
    if not working.exists() or (working / _OLD).exists():
        return None
    try:
        with _hold_lock(working, out):
            return working
    except CacheLocked:
        return None


def _restore_output(out: Path, working: Path) -> None:
    """Move the old cache back to ``out`` if `replace_directory` was interrupted between its two renames."""
    if (working / _OLD).exists() and not out.exists():
        (working / _OLD).rename(out)


def replace_directory(out: Path, working: Path) -> None:
    """Replace the cache at ``out`` by the new cache in the working directory, with two renames.

    Raises CacheLocked if a server writes to ``out``.
    """
    with closing(DirectoryLock(out)) if out.exists() else nullcontext():
        if out.exists():
            out.rename(working / _OLD)
        (working / "new").rename(out)


@contextmanager
def new_cache(
    out: Path, *, fingerprint: str, namespace: str, force: bool, segment_tokens: int = DEFAULT_SEGMENT_TOKENS
) -> Iterator[PrebuiltWriter]:
    """Yield a writer of segments for a new cache, and move the finished cache to ``out`` at the end of the context.

    With ``force``, an existing cache is replaced. Servers may read the old cache meanwhile, but not write to it. Raises
    ConfigError if ``out`` cannot be used, and CacheError or OSError if the cache cannot be written. After any
    exception, ``out`` is unchanged.
    """
    out = check_output(out, force=force)
    with working_directory(out, fresh=True) as working:
        with PrebuiltWriter(
            working / "new", fingerprint=fingerprint, namespace=namespace, segment_tokens=segment_tokens
        ) as writer:
            yield writer
        replace_directory(out, working)


def check_output(out: Path, *, force: bool) -> Path:
    """Check that a cache may be written to ``out``, and return ``out`` with symbolic links resolved.

    If a killed command had moved the old cache away, the old cache is restored first. Raises ConfigError if ``out`` is
    not a cache, or is a cache and ``force`` is not set, and CacheLocked if a server or another build uses it.
    """
    given, out = out, out.resolve()
    working = resumable_directory(out)
    if (working / _OLD).exists():
        with _hold_lock(working, out):
            _restore_output(out, working)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{given} is a file: give a directory with --out")
    if os.path.ismount(out):
        raise ConfigError(
            f"{given} is a mount point, so the new cache cannot replace it: give a directory below it with "
            f"--out, such as {given / 'cache'}"
        )
    if (out / MANIFEST_NAME).exists():
        if not force:
            raise ConfigError(
                f"{given} contains a cache already: replace it with --force, or give another directory with --out; "
                "`ssd-cache merge` merges two caches"
            )
        if others := sorted(path.name for path in out.iterdir() if not (path.is_file() and is_cache_file(path))):
            raise ConfigError(
                f"besides a cache, {given} contains other files ({', '.join(others[:3])}), and --force would remove "
                "them too: give another directory with --out"
            )
        DirectoryLock(out).close()
    elif out.exists() and any(path.name != LOCK_NAME for path in out.iterdir()):
        raise ConfigError(f"{given} is not empty and contains no cache: give another directory with --out")
    return out
