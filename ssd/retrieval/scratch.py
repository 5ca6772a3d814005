"""A private directory for segments that need not outlive the process."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from ssd.errors import CacheLocked
from ssd.retrieval.atomic_file import is_regular
from ssd.retrieval.directory_lock import DirectoryLock

log = logging.getLogger(__name__)

_PREFIX = "ssd-scratch-"
_LOCK_NAME = "scratch.lock"  # only such a directory has one
_MEMORY = Path("/dev/shm")  # a file system in memory: files there cost no disk writes
_STARTING_S = 60.0  # a younger directory may not be locked yet


def make_scratch(num_bytes: int) -> tuple[Path, DirectoryLock] | None:
    """A new directory with room for ``num_bytes``, in memory if possible, and its lock.

    None when there is nowhere to put it. Directories that killed processes left behind are removed first.
    """
    for parent in (_MEMORY, Path(tempfile.gettempdir())):
        try:
            _remove_abandoned(parent)
            if shutil.disk_usage(parent).free >= num_bytes:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                return path, DirectoryLock(path, _LOCK_NAME)
        except OSError as error:
            log.debug("no scratch directory in %s: %s", parent, error)
    return None


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if time.time() - status.st_mtime < _STARTING_S or not is_regular(path / _LOCK_NAME):
                continue
            DirectoryLock(path, _LOCK_NAME).close()
        except (OSError, CacheLocked):
            continue  # it is in use, or another user's
        shutil.rmtree(path, ignore_errors=True)
