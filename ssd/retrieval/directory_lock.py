"""Who may write a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from ssd.errors import CacheLocked
from ssd.retrieval.atomic_file import FILE_MODE

LOCK_NAME = "writer.lock"


class DirectoryLock:
    """The right to write a directory, held by one process; the kernel takes it back however that ends."""

    def __init__(self, path: Path, name: str = LOCK_NAME) -> None:
        """``name`` : of the file that is locked. Raises CacheLocked at once when another holds it, and OSError."""
        self._path = path
        self._name = name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor: int | None = os.open(path / name, flags, FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CacheLocked(
                f"{path} is being written by another process. Stop that one, or give this one a directory of its own "
                "(several servers share what they learn through Redis, not through a directory)"
            ) from None
        except OSError:
            self.close()
            raise

    def check(self) -> None:
        """Raises OSError when the directory was removed or replaced: whoever made it anew may be its writer now."""
        with contextlib.suppress(FileNotFoundError):
            there = (self._path / self._name).stat()
            if self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), there):
                return
        raise OSError(
            errno.ESTALE,
            "the directory was removed or replaced while in use and belongs to whoever made it anew. "
            "Start again to write it; a server goes on from memory until then",
            str(self._path),
        )

    def close(self) -> None:
        """Give it back; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
