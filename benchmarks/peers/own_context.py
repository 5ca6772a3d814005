"""What drafters without a store have in common: a request is the context they are handed, nothing is learned."""

from __future__ import annotations

from typing import Self

from benchmarks.peers.frames import TokenIds
from benchmarks.peers.local import Setting


class OwnContext:
    """Book-keeping of running requests for peers that look at one request's own text alone."""

    has_store = False
    shares_state = True

    def __init__(self) -> None:
        self._running: set[str] = set()

    def insert(self, sequence: TokenIds) -> tuple[int, int]:
        """Nothing is kept: no time, no tokens."""
        return 0, 0

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        return self

    def start(self, request_id: str, prompt: TokenIds) -> None:
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is already running")
        self._running.add(request_id)

    def require_running(self, request_id: str) -> None:
        """Raises ValueError unless the request was started and not yet stopped."""
        if request_id not in self._running:
            raise ValueError(f"request {request_id!r} is not running")

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        self.require_running(request_id)

    def stop(self, request_id: str, keep: bool) -> None:
        self.require_running(request_id)
        self._running.remove(request_id)


def refuse_settings(name: str, setting: Setting) -> None:
    """Raises ValueError if any setting is given: these peers are set up once, by options."""
    if setting:
        raise ValueError(f"{name} has no settings, got {sorted(setting)}")
