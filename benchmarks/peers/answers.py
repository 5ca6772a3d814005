"""What a peer answers, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.peers.frames import TokenIds


class PeerError(Exception):
    """The peer refused a call, or its library raised; it can be asked again."""


class PeerUnavailable(PeerError):
    """The peer is not installed, did not start or has died. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """What it took a peer to learn sequences; all zero for a peer without a store."""

    seconds: float
    """The peer's own calls, added up."""
    num_tokens: int
    """Tokens it can now draft from for other requests; less than it was given where it does not store prompts."""
    resident_growth_bytes: int
    """Growth of its resident memory, once freed memory was given back."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Answers to a list of contexts, in order."""

    us: npt.NDArray[np.float64]
    """float64[n], microseconds."""
    drafts: list[TokenIds]
    """n of int32[<= max_tokens]; empty where the peer had nothing to say."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft of a running request."""

    us: float
    token_ids: TokenIds
    """int32[n]."""
    parents: TokenIds
    """int32[n], index of each token's parent in ``token_ids``; -1 follows the context. A chain is -1, 0, 1, ..."""
    probs: npt.NDArray[np.float64] | None
    """float64[n], the peer's estimates, where it gives any."""
    match_length: int | None
    """Length of the match behind the draft, where the peer tells."""
