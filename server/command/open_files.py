"""Open files: every mapped segment and every connection takes one."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from dataclasses import replace

from server.base.settings import ServerSettings

log = logging.getLogger(__name__)

_OWN_FILES = 1024
"""Open files that are not for connections."""


def allow_open_files() -> int:
    """As many as the system allows: every mapped segment and every connection takes one. Returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return allowed if allowed != resource.RLIM_INFINITY else sys.maxsize


def within_files(settings: ServerSettings, num_files: int) -> ServerSettings:
    """Connections must leave files to the cache, its worker and Redis."""
    most = num_files - min(_OWN_FILES, num_files // 2)
    if settings.limits.max_connections <= most:
        return settings
    log.warning("%d open files are allowed: at most %d connections are taken (ulimit -n)", num_files, most)
    return replace(settings, limits=replace(settings.limits, max_connections=most))
