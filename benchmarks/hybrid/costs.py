"""What passes and drafts take: a model fitted on an H100 with Llama-3.1-8B.

Its source is the simulator of "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580), which published the
recordings too. Only our own drafter's time is measured here: with 50 of these requests in the index its call took
13 us, one that drafts behind four prefixes 38 us. The arbiter's own Python is not charged.
"""

from __future__ import annotations

from typing import Final

_FIXED_S: Final = 5.88590713e-3 + 1.20683946e-3
"""Of a pass, and around it."""
_CACHED_TOKEN_S: Final = 3.92645679e-8
_DRAFT_S: Final = 2.13526175e-3
_DRAFTED_TOKEN_S: Final = 8.4e-7

POSITION_S: Final = 2.10103129e-5
"""Of one more position in a pass."""
LOOKUP_S: Final = 1.3e-5
"""Of a call of our drafter."""
CARRYING_S: Final = 3.8e-5
"""Of one more call that carries the other's draft on."""


def pass_seconds(num_positions: int, num_cached: int) -> float:
    """Of a pass over so many positions behind ``num_cached`` tokens."""
    return _FIXED_S + POSITION_S * num_positions + _CACHED_TOKEN_S * num_cached


def draft_seconds(num_tokens: int) -> float:
    """Of a draft of the other drafter."""
    return _DRAFT_S + _DRAFTED_TOKEN_S * num_tokens
