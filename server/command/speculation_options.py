"""Options of speculation: how drafts are made and by what."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ssd.config import DRAFT_SHAPES, DraftConfig
from ssd.text.load_tokenizer import HubOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Checked."""

    draft_model: str | None
    """A directory or an id, as is that of the head."""
    draft_head: str | None
    draft_hub: HubOptions
    draft: DraftConfig


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """The group "speculation"."""
    draft = DraftConfig()
    add = parser.add_argument_group("speculation").add_argument
    add(
        "--num-speculative-tokens", type=int, default=draft.num_speculative_tokens, metavar="K",
        help="most draft tokens per step (default: %(default)s)",
    )  # fmt: skip
    add(
        "--max-match-length", type=int, default=draft.max_match_length, metavar="N",
        help="longest context tail looked up, in tokens (default: %(default)s)",
    )  # fmt: skip
    add(
        "--draft-model",
        metavar="MODEL",
        help="smaller model with the same tokenizer that drafts where the cache does not",
    )
    add(
        "--draft-head",
        metavar="HEAD",
        help="draft head trained for this model (EAGLE, EAGLE-3, Medusa, multi-token prediction) that drafts from its "
        "hidden states where the cache does not",
    )
    add(
        "--draft-shape", default=draft.draft_shape, choices=DRAFT_SHAPES,
        help="whether drafts may branch where the next token is uncertain (default: %(default)s)",
    )  # fmt: skip
    add(
        "--no-recycling",
        action="store_true",
        help="do not draft what the model held likely before, after the same tokens",
    )
    add(
        "--no-retrieval",
        action="store_true",
        help="look nothing up: draft from other sources alone",
    )
    add("--no-speculation", action="store_true", help="plain decoding: no drafts")


def speculation_options_of(found: argparse.Namespace) -> SpeculationOptions:
    """What was asked for; raises ConfigError."""
    limit = found.num_speculative_tokens
    return SpeculationOptions(
        draft_model=None if found.no_speculation else found.draft_model,
        draft_head=None if found.no_speculation else found.draft_head,
        draft_hub=HubOptions(cache_dir=found.download_dir, trust_remote_code=found.trust_remote_code),
        draft=DraftConfig(
            num_speculative_tokens=0 if found.no_speculation else limit,
            max_match_length=found.max_match_length,
            draft_shape=found.draft_shape,
            recycling=not found.no_recycling,
            retrieval=not found.no_retrieval,
        ),
    )
