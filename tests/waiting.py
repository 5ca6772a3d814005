"""Waiting for what another thread or process does: as long as a busy machine needs, and no longer than it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""For what takes a moment on an idle machine."""
START_S = 800.0
"""For what starts: with all kernels to compile beside others, a server takes minutes. A test may take longer."""


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Poll until a claim about another thread or process holds."""
    began, pause_s = time.monotonic(), 0.005
    while not condition():
        assert time.monotonic() < began + timeout_s, "waited too long"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.1)  # to ask takes something of a busy machine, too
