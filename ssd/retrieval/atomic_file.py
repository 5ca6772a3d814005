"""Files that are there whole or not at all, and that only their owner reads: what is stored is what people said.

Nothing else is read either: a pipe in the place of a file would keep its reader waiting for a writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

_TEMPORARY = re.compile(r"(?:[0-9a-z-]{1,64}\.seg|manifest\.json|learned\.bin)\.\d{1,10}\.tmp")


def write_file(path: Path, parts: Sequence[bytes | memoryview], *, durable: bool) -> None:
    """Put ``parts`` at ``path`` atomically: readers see the old file or the new one. Raises OSError.

    The bytes go to a temporary name in the same directory, which is renamed; ``durable`` : once they are on disk.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(_create(temporary), "wb") as file:
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # a process that is told to end leaves nothing behind either
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def make_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Put ``parts`` at ``path`` atomically and on disk, unless something is there: then that stays. Raises OSError."""
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    write_file(made, parts, durable=True)
    try:
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(made, path)
    finally:
        made.unlink()


def _create(path: Path) -> int:
    """A new file that no link leads elsewhere; what an earlier process of our number left there goes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, FILE_MODE)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, FILE_MODE)


class NotAFileError(OSError):
    """A path leads to a directory, a pipe, a socket or a device."""


def open_file(path: Path) -> BinaryIO:
    """A regular file, or one that a link leads to, to be read. Never waits. Raises NotAFileError and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def is_temporary(path: Path) -> bool:
    """Whether ``path`` is a file with a name that ``write_file`` gives while it writes. Raises OSError."""
    return _TEMPORARY.fullmatch(path.name) is not None and is_regular(path)


def is_regular(path: Path) -> bool:
    """Whether ``path`` itself is a file, no link to one; not one that another process just removed. Raises OSError."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def sync_directory(path: Path) -> None:
    """Make renames and removals in ``path`` survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make ``path`` and what is missing above it, for its owner alone; what is there stays as it is. Raises OSError."""
    for missing in [*reversed(path.parents), path]:
        if not missing.is_dir():
            try:
                missing.mkdir(mode=DIRECTORY_MODE)
            except FileExistsError:  # another process was faster, or it is something else
                if not missing.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(missing)) from None
