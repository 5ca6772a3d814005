"""Options of the page at /, and of what streams say about drafts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """As in `ServerSettings`."""

    page: bool
    allow_draft_details: bool


def add_page_options(parser: argparse.ArgumentParser) -> None:
    """The group "page"."""
    add = parser.add_argument_group("page").add_argument
    add("--no-page", action="store_true", help="no page at /, and no details of drafts in streams (default: both)")
    add(
        "--allow-draft-details", action="store_true",
        help="with --no-page: streams may still say which tokens were drafted (`stream_options.include_drafts`)",
    )  # fmt: skip


def page_options_of(found: argparse.Namespace) -> PageOptions:
    """What was asked for."""
    return PageOptions(page=not found.no_page, allow_draft_details=found.allow_draft_details)
