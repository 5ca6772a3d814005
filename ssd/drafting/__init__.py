"""Drafters: they propose tokens, the target decides."""

from __future__ import annotations

from collections.abc import Callable

from ssd.config import DraftConfig
from ssd.drafting.arbiter import Arbiter
from ssd.drafting.baselines.frequency import FrequencyDrafter
from ssd.drafting.baselines.none import NoDrafter
from ssd.drafting.baselines.prompt_lookup import PromptLookupDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest, SamplingRow
from ssd.drafting.suffix.drafter import SuffixDrafter
from ssd.errors import ConfigError

SEED_MATCH_LENGTH = 10
"""Longest tail that the seed policy and prompt lookup look up, whatever the configuration allows beyond it."""


def _short(config: DraftConfig) -> dict[str, int]:
    longest = min(SEED_MATCH_LENGTH, config.max_match_length)
    return {"max_match_length": longest, "min_match_length": min(config.min_match_length, longest)}


_MAKERS: dict[str, Callable[[DraftConfig], Drafter]] = {
    "ssd": lambda config: SuffixDrafter(
        max_match_length=config.max_match_length,
        min_match_length=config.min_match_length,
        recycling=config.recycling,
        retrieval=config.retrieval,
    ),
    "frequency": lambda config: FrequencyDrafter(**_short(config)),
    "prompt-lookup": lambda config: PromptLookupDrafter(**_short(config)),
    "none": lambda _config: NoDrafter(),
}

DRAFTER_NAMES = tuple(_MAKERS)


def make_drafter(name: str, config: DraftConfig) -> Drafter:
    """The drafter called ``name``, one of DRAFTER_NAMES. Raises ConfigError for another name."""
    if name not in _MAKERS:
        raise ConfigError(f"unknown drafter {name!r}; use one of {', '.join(DRAFTER_NAMES)}")
    return _MAKERS[name](config)


__all__ = [
    "DRAFTER_NAMES",
    "EMPTY_DRAFT",
    "Arbiter",
    "Draft",
    "DraftRequest",
    "Drafter",
    "SamplingRow",
    "make_drafter",
]
