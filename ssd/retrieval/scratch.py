"""A private directory for segments that need not outlive the process."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from pathlib import Path

from ssd.errors import CacheLocked
from ssd.retrieval.directory import LOCK_NAME, DirectoryLock

log = logging.getLogger(__name__)

_PREFIX = "ssd-cache-"
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
                return path, DirectoryLock(path)
        except OSError as error:
            log.debug("no scratch directory in %s: %s", parent, error)
    return None


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < _STARTING_S or not (path / LOCK_NAME).exists():
                continue
            DirectoryLock(path).close()
        except (OSError, CacheLocked):
            continue  # it is in use, or another user's
        shutil.rmtree(path, ignore_errors=True)
