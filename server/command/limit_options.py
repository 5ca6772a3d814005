"""The limits as options of the command line: ``--max-body-bytes`` sets `Limits.max_body_bytes`, and so on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields

from server.base.limits import Limits
from server.command.sizes import count, num_bytes, spelled

_HELP = {
    "max_body_bytes": "longest body of a request",
    "max_body_values": "most values, names and brackets in a body's JSON; twice the context where that is more",
    "max_body_seconds": "longest a body may stall; bytes that arrive win time back",
    "max_bodies_bytes": "memory for large bodies that are arriving or being read, together",
    "max_choices": "most choices of a request, prompts times n",
    "max_request_tokens": "most prompt tokens of a request; the context where that is more",
    "max_queued_tokens": "most prompt and prediction tokens of all choices that run or wait; more are answered 503",
    "max_logprob_entries": "most log-probabilities in an answer",
    "max_logit_bias": "most entries of logit_bias",
    "max_allowed_token_ids": "most entries of allowed_token_ids",
    "max_bad_words": "most entries of bad_words",
    "max_bad_words_characters": "most characters of bad_words together",
    "max_stop_characters": "most characters of stop together",
    "max_grammar_characters": "longest schema, choices or grammar",
    "max_regex_characters": "longest regular expression",
    "max_messages": "most messages of a conversation",
    "max_tools": "most functions that a model is told of",
    "max_tools_characters": "most characters of their names, descriptions and schemas together",
    "max_connections": "most connections at once; requests on more are answered 503",
    "max_idle_seconds": "time a connection may be open between requests",
    "max_head_seconds": "time for the head of a request to arrive",
    "max_send_seconds": "longest a client may take nothing of what was sent to it; what it takes wins time back",
    "min_bytes_per_second": "who sends a body or takes an answer at this rate is waited for",
}


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """One option for every limit."""
    add = parser.add_argument_group("limits", "what one request, and all together, may ask for").add_argument
    for field in fields(Limits):
        option = f"--{field.name.replace('_', '-')}"
        shown = spelled(field.default) if isinstance(field.default, int) else field.default
        add(
            option, type=_type(field.name), default=field.default, metavar="N",
            help=f"{_HELP[field.name]} (default: {shown})",
        )  # fmt: skip


def _type(name: str) -> Callable[[str], float]:
    if name.endswith("_bytes"):
        return num_bytes
    return float if name.endswith("_seconds") else count


def limits_of(found: argparse.Namespace) -> Limits:
    """The limits that were asked for; raises ConfigError."""
    return Limits(**{field.name: getattr(found, field.name) for field in fields(Limits)})
