"""Drafters: they propose tokens, the target decides."""

from __future__ import annotations

from collections.abc import Callable

from ssd.config import DraftConfig
from ssd.drafting.arbiter import Arbiter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.prompt_lookup import LOOKUP_LENGTH, PromptLookupDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest, NoDrafter, SamplingRow
from ssd.errors import ConfigError

_MAKERS: dict[str, Callable[[DraftConfig], Drafter]] = {
    "ssd": lambda config: SuffixDrafter(
        max_match_length=config.max_match_length,
        min_match_length=config.min_match_length,
        recycling=config.recycling,
        retrieval=config.retrieval,
    ),
    "prompt-lookup": lambda config: PromptLookupDrafter(
        max_match_length=min(LOOKUP_LENGTH, config.max_match_length),
        min_match_length=min(LOOKUP_LENGTH, config.min_match_length),
    ),
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
