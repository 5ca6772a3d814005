"""Limits for one request and for all requests together, which are checked before memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, TypeVar

from cyclopts import Parameter

from ssd.errors import ConfigError

N = TypeVar("N", int, float)
_Fixed = Annotated[N, Parameter(parse=False)]
"""The type of a field in `Limits` that is not a command line option."""

SMALL_BODY_BYTES = 64 << 10
"""The maximum size of a request body that is parsed on the event loop, because parsing it takes only about a
millisecond.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits above which requests are rejected. The defaults exceed the needs of ordinary clients."""

    max_body_bytes: int = 8 << 20
    """Maximum size of a request's body in bytes, including HTTP chunk headers and extensions."""
    # Parsing a string in JSON blocks all threads of the process, for up to 5 ms per megabyte.
    max_body_values: _Fixed[int] = 1 << 18
    """The maximum number of values, names and brackets in a body's JSON, or twice the context length if that is more.
    """
    # Parsing this many values blocks other threads for up to 60 ms; any prompt of token ids is allowed.
    max_body_seconds: _Fixed[float] = 20.0
    """The maximum time in seconds for receiving a body that arrives more slowly than ``min_bytes_per_second``. A faster
    body has no time limit.
    """
    max_bodies_bytes: _Fixed[int] = 128 << 20
    """The maximum total size of request bodies above 64 KiB that are being received or parsed. Several such bodies of
    one tenant may together have at most half of the size that remains after subtracting the bodies of other tenants.
    """
    max_answers_bytes: _Fixed[int] = 1 << 30
    """The maximum total size of complete responses above 256 KiB that clients have not read yet. Several such responses
    of one tenant may together have at most half of the size that remains after subtracting the responses of other
    tenants.
    """
    max_choices: int = 1024
    """Maximum number of choices of a request, which is the number of prompts times `n`."""
    max_request_tokens: int = 1 << 18
    """Maximum number of tokens in all prompts of a request together. It is never less than the context length."""
    max_queued_tokens: int = 1 << 23
    """Maximum number of prompt and prediction tokens of all waiting and running requests together, counted once per
    choice. The requests of one tenant may together have at most half of the tokens that remain after subtracting those
    of other tenants.
    """
    max_grammar_characters: int = 1 << 16
    """Maximum number of characters of a grammar, a JSON schema or a list of choices that constrains the output."""
    max_messages: int = 4096
    """Maximum number of messages of a conversation."""
    max_tools: int = 512
    """Maximum number of tools of a request."""
    max_connections: int = 1 << 14
    """Maximum number of open connections, or fewer if the system allows fewer open files."""
    max_idle_seconds: float = 75.0
    """Time in seconds after which the server closes a connection on which no request arrives."""
    # Longer than the idle limits of clients and proxies (5 to 60 s), so that none sends on a closing connection.
    max_head_seconds: float = 20.0
    """Time in seconds within which a request's headers must arrive."""
    max_send_seconds: float = 30.0
    """Time in seconds after which the server disconnects a client that does not read its response."""
    min_bytes_per_second: _Fixed[int] = 8192
    """The minimum rate in bytes per second at which clients must send bodies and read responses. A client that keeps
    this rate never times out.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")


class LeakyBucket:
    """A deadline (``until``) by which a slow client is disconnected.

    Each transferred byte postpones the deadline by 1 / ``bytes_per_s`` seconds, but never to later than ``seconds``
    from now. So a client that keeps this rate is never disconnected.
    """

    def __init__(self, seconds: float, bytes_per_s: float, now: float) -> None:
        self._seconds, self._bytes_per_s = seconds, bytes_per_s
        self.until = now + seconds

    def extend_deadline(self, num_bytes: int, now: float) -> None:
        self.until = min(now + self._seconds, self.until + num_bytes / self._bytes_per_s)
