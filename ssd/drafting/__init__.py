"""Drafters propose draft tokens for speculative decoding, which the target model accepts or rejects."""

from __future__ import annotations

from ssd.config import DraftConfig
from ssd.drafting.hybrid_drafter import HybridDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftOutcome, DraftRequest, NoDrafter, SamplingContext
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.errors import ConfigError

DRAFTER_NAMES = ("ssd", "none")


def make_drafter(name: str, config: DraftConfig) -> Drafter:
    """Create the drafter that is called ``name``: "none", or a `SuffixDrafter` with the settings of ``config``.

    Raises:
        ConfigError: If ``name`` is not in DRAFTER_NAMES.
    """
    if name not in DRAFTER_NAMES:
        raise ConfigError(f"unknown drafter {name!r}; use one of {', '.join(DRAFTER_NAMES)}")
    if name == "none":
        return NoDrafter()
    return SuffixDrafter(
        max_match_length=config.max_match_length,
        min_match_length=config.min_match_length,
        recycling=config.recycling,
        retrieval=config.retrieval,
    )


__all__ = [
    "DRAFTER_NAMES",
    "EMPTY_DRAFT",
    "Draft",
    "DraftOutcome",
    "DraftRequest",
    "Drafter",
    "HybridDrafter",
    "SamplingContext",
    "make_drafter",
]
