"""How much one request, and all together, may ask for. Checked by count, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ssd.errors import ConfigError

SMALL_BODY_BYTES = 64 << 10
"""A body up to here is parsed where it arrives, in about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request is refused for when it goes beyond; the defaults leave room above what clients send in earnest."""

    max_body_bytes: int = 8 << 20
    """Bytes of a request's body: two million tokens as text. While a string is read from JSON the process's other
    threads stand still, at worst 5 ms for each of these megabytes."""

    max_body_values: int = 1 << 18
    """Values, names and brackets in a body's JSON, for which they stand still up to 60 ms; twice the context where that
    is more, so that a prompt of token ids can always be sent."""

    max_body_seconds: float = 20.0
    """Longest a body may stall; bytes that arrive win time back at ``min_bytes_per_second``."""

    max_bodies_bytes: int = 128 << 20
    """Bytes of all bodies above 64 KiB that are arriving or being checked, so that many large ones fill no memory."""

    max_choices: int = 1024
    """Choices of a request, prompts times ``n``: as many as may wait for a slot by default."""

    max_request_tokens: int = 1 << 18
    """Prompt tokens of a request, all its prompts together; the context where that is more."""

    max_queued_tokens: int = 1 << 23
    """Tokens of prompts, predictions and outputs to come of all choices in the service, which take about 10 bytes each;
    one choice always has room."""

    max_logprob_entries: int = 1 << 20
    """Log-probabilities that a request may be answered with, alternatives included: 0.1 kB each while it runs."""

    max_logit_bias: int = 1024
    """Entries of ``logit_bias``; OpenAI takes 300."""

    max_allowed_token_ids: int = 1 << 17
    """Entries of ``allowed_token_ids``: most of any vocabulary."""

    max_bad_words: int = 1000
    """Entries of ``bad_words``; each is compared at each position."""

    max_bad_words_characters: int = 1 << 14
    """Characters of ``bad_words`` together, tokenised twice."""

    max_stop_characters: int = 1 << 12
    """Characters of ``stop`` together; each string is sought in every piece of text."""

    max_grammar_characters: int = 1 << 16
    """Characters of a schema, a regular expression, choices or a grammar; compiling takes seconds for more."""

    max_regex_characters: int = 1 << 13
    """Characters of a regular expression, for which compiling may take the square."""

    max_messages: int = 4096
    """Messages of a conversation; some templates look at all of them for each."""

    max_tools: int = 512
    """Functions that a model is told of; OpenAI takes 128."""

    max_tools_characters: int = 1 << 18
    """Characters of their names, descriptions and schemas together. Of those that are forced by a grammar
    ``max_grammar_characters`` counts as well."""
    max_connections: int = 1 << 14
    """Connections at once, fewer where the system allows fewer files; 10 to 20 kB each while idle."""

    max_idle_seconds: float = 75.0
    """A connection may be open this long between requests, or before the first. Longer than the clients' and proxies'
    own limits, mostly 5 to 60 s, so that none sends a request on a connection that is being closed."""

    max_head_seconds: float = 20.0
    """Time for a request's head to arrive."""

    max_send_seconds: float = 30.0
    """Longest a client may take nothing of what waits to be sent to it; what it takes wins time back, as for bodies."""

    min_bytes_per_second: int = 8192
    """Who sends a body, or reads an answer, at this rate is waited for as long as it takes: 64 kbit/s."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")
