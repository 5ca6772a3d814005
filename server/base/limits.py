"""How much one request, and all together, may ask for. Checked by count, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, TypeVar

from cyclopts import Parameter

from ssd.errors import ConfigError

N = TypeVar("N", int, float)
_Fixed = Annotated[N, Parameter(parse=False)]
"""Of no option: what nobody changes."""

SMALL_BODY_BYTES = 64 << 10
"""A body up to here is parsed where it arrives, in about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request is refused for when it goes beyond; the defaults leave room above what clients send in earnest."""

    max_body_bytes: int = 8 << 20
    """Bytes of a request's body, headers and extensions of its chunks included."""
    # While a string is read from JSON the process's other threads stand still, at worst 5 ms for each megabyte.
    max_body_values: _Fixed[int] = 1 << 18
    """Values, names and brackets in a body's JSON; twice the context where that is more."""
    # Other threads stand still for them, up to 60 ms; a prompt of token ids can always be sent.
    max_body_seconds: _Fixed[float] = 20.0
    """Longest a body may stall; see ``min_bytes_per_second``."""
    max_bodies_bytes: _Fixed[int] = 128 << 20
    """Bytes of all bodies above 64 KiB that are arriving or being checked; a tenant has half of what others leave."""
    max_answers_bytes: _Fixed[int] = 1 << 30
    """Bytes of all whole answers above 256 KiB that their clients have not taken yet, shared as those of bodies."""
    max_choices: int = 1024
    """Choices of a request: prompts times ``n``."""
    max_request_tokens: int = 1 << 18
    """Prompt tokens of a request; the context where that is more."""
    max_queued_tokens: int = 1 << 23
    """Tokens of prompts and predictions, for each choice, of all requests in the service, shared as bytes of bodies."""
    max_grammar_characters: int = 1 << 16
    """Characters of a schema, choices or a grammar."""
    max_messages: int = 4096
    """Messages of a conversation."""
    max_tools: int = 512
    """Functions that a model is told of."""
    max_connections: int = 1 << 14
    """Connections at once, fewer where the system allows fewer files."""
    max_idle_seconds: float = 75.0
    """How long a connection may be open without a request."""
    # Longer than the clients' and proxies' own limits, mostly 5 to 60 s: none sends on what is being closed.
    max_head_seconds: float = 20.0
    """Time for a request's head to arrive."""
    max_send_seconds: float = 30.0
    """Longest a client may take nothing of what waits for it."""
    min_bytes_per_second: _Fixed[int] = 8192
    """Who sends a body, or reads an answer, at this rate is waited for as long as it takes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")


class Patience:
    """A bucket of ``seconds`` that leaks all the time and is filled by bytes that moved, at ``bytes_per_s``."""

    def __init__(self, seconds: float, bytes_per_s: float, now: float) -> None:
        self._seconds, self._bytes_per_s = seconds, bytes_per_s
        self.until = now + seconds
        """When patience ends."""

    def moved(self, num_bytes: int, now: float) -> None:
        """So many bytes have come, or gone, since the last call. O(1)."""
        self.until = min(now + self._seconds, self.until + num_bytes / self._bytes_per_s)
