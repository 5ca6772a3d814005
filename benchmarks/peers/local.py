"""What a peer looks like in its process."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from benchmarks.walk import Proposal

TokenIds = npt.NDArray[np.int32]

Setting = dict[str, float | str]
"""Names and values of a peer's own knobs; a boolean counts as a number."""


class LocalPeer(Protocol):
    """One drafter. Token ids are contiguous, writable int32[n]; the caller may not change them later."""

    distributions: tuple[str, ...]
    """What it is made of: the installed packages whose versions identify it."""

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        """Who drafts under a setting: itself where what it knows depends on texts alone, else a new peer that knows
        nothing."""

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Begin a request."""

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        """Draft for a running request whose prompt and output so far are ``context``; its own call is timed inside."""

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Tell a running request what was accepted."""

    def stop(self, request_id: str) -> None:
        """End a request, whose output stays for later ones where the peer keeps any."""
