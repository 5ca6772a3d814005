"""Which node of a cluster serves which keys. Needs redis-py, so only clients of clusters import it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.crc import key_slot

from ssd.sharing.addresses import Host
from ssd.sharing.sentinels import read_host

NUM_SLOTS = 16384

_KEYLESS = frozenset(
    {"ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "FLUSHALL", "INFO", "PING", "ROLE", "SCAN", "TIME"}
)
_KEY_IS_THIRD = frozenset({"OBJECT", "MEMORY", "XINFO"})  # where the subcommand is a word of its own
_KEY_IS_FOURTH = frozenset({"EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO"})


def slot_of(command: Sequence[Any]) -> int | None:
    """The slot of a command's first key, which decides for all its keys; None for a command without."""
    name = str(command[0]).upper()
    if name.partition(" ")[0] in _KEYLESS:
        return None
    if name == "XREAD":
        words = [_bytes(word).upper() for word in command]
        return slot_of_key(command[words.index(b"STREAMS") + 1])
    at = 2 if name in _KEY_IS_THIRD else 3 if name in _KEY_IS_FOURTH else 1
    return slot_of_key(command[at])


def slot_of_key(key: str | bytes) -> int:
    """0 ... 16,383. O(length)."""
    return key_slot(_bytes(key))


def read_slots(answer: Any, asked: Host) -> list[Host | None]:
    """The master of each of the 16,384 slots, from what CLUSTER SLOTS answered, whatever that is.

    ``asked`` : the node that answered, which may leave out its own name. Raises ValueError, and ConnectionError for a
    name that is none.
    """
    owners: list[Host | None] = [None] * NUM_SLOTS
    num_left = NUM_SLOTS
    if not isinstance(answer, list):
        raise ValueError("no list of slots")
    for part in answer:
        if not isinstance(part, list) or len(part) < 3 or not isinstance(part[2], list) or len(part[2]) < 2:
            raise ValueError("no list of slots")
        first, last, (name, port, *_) = part[0], part[1], part[2]
        if type(first) is not int or type(last) is not int or not 0 <= first <= last < NUM_SLOTS:
            raise ValueError("slots that are none")
        num_left -= last + 1 - first
        if num_left < 0:
            raise ValueError("slots that are named twice")
        if name == b"?":
            continue
        owners[first : last + 1] = [read_host(name or asked[0].encode(), port)] * (last + 1 - first)
    return owners


def _bytes(word: object) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()
