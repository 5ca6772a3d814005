"""Which servers have a namespace open, and whether they have forgotten it when that was demanded.

A server says so in a key of its own that expires; a demand is a key with a random token, which each server that has
the namespace open answers once with what became of it. So whoever demands knows when the last one has obeyed.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ssd.sharing.keys import member_key, purge_key

if TYPE_CHECKING:
    import redis

MEMBER_MS: Final = 30_000
"""Three looks of a joiner."""

DEMAND_S: Final = 600
"""A server that was just being started again hears of a demand as well."""

TOKEN_CHARACTERS: Final = 32
_TOKEN: Final = re.compile(rb"[0-9a-f]{32}")
_MOST_MEMBERS: Final = 1 << 14


class Answer(NamedTuple):
    """``token`` : of the demand that was answered last, empty for none; ``is_gone`` : whether all was forgotten."""

    token: bytes
    is_gone: bool


class Presence:
    """What one process says of the namespaces it has open. Any call may raise what redis-py raises."""

    def __init__(self, client: redis.Redis, fingerprint: str) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._id = secrets.token_hex(8)

    def demand(self, namespace: str) -> bytes:
        """The token of a demand to forget it; empty where there is none."""
        found: Any = self._client.getrange(purge_key(self._fingerprint, namespace), 0, TOKEN_CHARACTERS)
        return found if _TOKEN.fullmatch(found) else b""

    def tell(self, namespace: str, answer: Answer) -> None:
        """It is open here, or was until just now."""
        value = b"%s %s" % (answer.token, b"gone" if answer.is_gone else b"kept")
        self._client.set(member_key(self._fingerprint, namespace, self._id), value, px=MEMBER_MS)


def demand(client: redis.Redis, fingerprint: str, namespace: str) -> bytes:
    """Have all servers that have a namespace open forget it; the token of the demand."""
    token = secrets.token_hex(TOKEN_CHARACTERS // 2).encode()
    client.set(purge_key(fingerprint, namespace), token, ex=DEMAND_S)
    return token


def answers(client: redis.Redis, fingerprint: str, namespace: str) -> list[Answer]:
    """What each server said last that has the namespace open, or had it half a minute ago."""
    found: list[Answer] = []
    for key in client.scan_iter(match=member_key(fingerprint, namespace, "*"), count=1000):
        value: Any = client.getrange(key, 0, TOKEN_CHARACTERS + 8)
        if value and len(found) < _MOST_MEMBERS:
            token, _, state = value.partition(b" ")
            found.append(Answer(token, state == b"gone"))
    return found
