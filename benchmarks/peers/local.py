"""What both ends know: which peers there are, and what a peer looks like in its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

PEER_NAMES = ("arctic", "vllm-ngram", "prompt-lookup", "sglang-ngram", "llama-cpp")

TokenIds = npt.NDArray[np.int32]

Setting = dict[str, float | str]
"""Names and values of a peer's own knobs; a boolean counts as a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """One draft as the peer gave it. ``ns`` : nanoseconds of the peer's own call, nothing else."""

    ns: int
    token_ids: list[int]
    parents: list[int]
    """Index of each token's parent in ``token_ids``; -1 follows the context. A chain is -1, 0, 1, ..."""


class LocalPeer(Protocol):
    """One drafter. Token ids are contiguous, writable int32[n]; the caller may not change them later."""

    distributions: tuple[str, ...]
    """What it is made of: the installed packages whose versions identify it."""
    has_store: bool
    """Whether it learns from finished requests; `insert` does nothing where it does not."""
    full_draft: Setting
    """The setting under which a draft is only as short as ``max_tokens`` and the evidence make it."""

    def insert(self, sequence: TokenIds) -> tuple[int, int]:
        """Learn one finished request; returns (nanoseconds of its own calls, tokens now held for later requests)."""

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        """Who drafts under a setting: itself where what it knows depends on texts alone, else a new peer that knows
        nothing."""

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Begin a request."""

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Speculation:
        """Draft for a running request whose prompt and output so far are ``context``; timed inside."""

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Tell a running request what was accepted."""

    def stop(self, request_id: str, keep: bool) -> None:
        """End a request; its output stays for later requests if ``keep``."""


def chain(num_tokens: int) -> list[int]:
    """Parents of a draft without branches."""
    return list(range(-1, num_tokens - 1))
