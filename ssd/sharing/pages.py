"""Pages of a stream, whatever its entries weigh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import redis

BEGINNING = b"0-0"
"""The id before all entries."""

_LARGEST = (1 << 64) - 1

MAX_REPLY_BYTES = 8 << 20
"""What one reply may take here, by ``bounded_parser``'s count: eight times what a page of full entries takes."""

RawEntry = tuple[bytes, dict[bytes, bytes] | None]
"""Id and fields of an entry. None for the fields: too large to be fetched, or deleted meanwhile."""


class OversizedReplyError(Exception):
    """A reply would take more than MAX_REPLY_BYTES. The rest of it was not read, and the connection was closed.

    ``unfinished`` : the arrays it broke off in, the outermost first, each with the elements that were read whole.
    """

    def __init__(self, unfinished: list[list[Any]]) -> None:
        super().__init__(f"more than {MAX_REPLY_BYTES} bytes")
        self.unfinished = unfinished


class WrongReplyError(Exception):
    """An answer that is none to what was asked: nothing of it is to be used."""


class Page(NamedTuple):
    """``entries`` in the order they were asked for. ``is_last`` : there are no more of them now.

    ``was_cut`` : the rest of the page was too large to be fetched.
    """

    entries: list[RawEntry]
    is_last: bool
    was_cut: bool = False


def is_entry_id(text: bytes) -> bool:
    """Whether this is a stream id as Redis writes it."""
    return re.fullmatch(rb"\d{1,20}-\d{1,20}", text) is not None and max(order(text)) <= _LARGEST


def order(entry_id: bytes) -> tuple[int, int]:
    """A stream id as Redis compares it."""
    milliseconds, number = entry_id.split(b"-")
    return int(milliseconds), int(number)


def id_before(entry_id: bytes) -> bytes:
    """The largest id smaller than this one, which is not 0-0."""
    milliseconds, number = order(entry_id)
    return b"%d-%d" % ((milliseconds, number - 1) if number else (milliseconds - 1, _LARGEST))


def check_entries(entries: Sequence[RawEntry], *, after: bytes) -> None:
    """Raises WrongReplyError unless these have ids, each larger than the one before it, the first than ``after``.

    A reader that took anything else for the place it has read up to would never find its way again.
    """
    last = order(after)
    for entry in entries:
        if type(entry) not in (tuple, list) or len(entry) != 2:
            raise WrongReplyError("no entry of a stream")
        entry_id, fields = entry
        if type(entry_id) is not bytes or not is_entry_id(entry_id) or not (fields is None or type(fields) is dict):
            raise WrongReplyError("no entry of a stream")
        if (place := order(entry_id)) <= last:
            raise WrongReplyError("entries out of order")
        last = place


def entries_after(client: redis.Redis, key: str, entry_id: bytes, count: int) -> Page:
    """At most ``count`` entries with larger ids, oldest first."""
    if order(entry_id) == (_LARGEST, _LARGEST):
        return Page([], is_last=True)
    return _page(client, count, "XRANGE", key, b"(" + entry_id, b"+")


def entries_before(client: redis.Redis, key: str, entry_id: bytes | None, count: int) -> Page:
    """At most ``count`` entries with smaller ids, or of all where it is None, newest first. Raises WrongReplyError."""
    end = b"+" if entry_id is None else b"(" + entry_id
    page = _page(client, count, "XREVRANGE", key, end, b"-")
    check_entries(page.entries[::-1], after=BEGINNING)
    if page.entries and entry_id is not None and order(page.entries[0][0]) >= order(entry_id):
        raise WrongReplyError("entries that were not asked for")
    return page


def entry_at(client: redis.Redis, key: str, entry_id: bytes) -> RawEntry | None:
    """The entry with this id, if the stream holds it. Raises WrongReplyError."""
    entries = _page(client, 1, "XRANGE", key, entry_id, entry_id).entries
    if entries and entries[0][0] != entry_id:
        raise WrongReplyError("an entry that was not asked for")
    return entries[0] if entries else None


def _page(client: redis.Redis, count: int, *command: str | bytes) -> Page:
    """Entries that were read whole before one was too large; that one itself if it is the first."""
    try:
        entries: Any = client.execute_command(*command, "COUNT", count)  # type: ignore[no-untyped-call]
        return Page(entries, is_last=len(entries) < count)
    except OversizedReplyError as error:
        whole, *begun = error.unfinished
        if whole:
            return Page([(entry_id, _fields(fields)) for entry_id, fields in whole], is_last=False, was_cut=True)
        return Page([(begun[0][0], None)], is_last=False, was_cut=True)


def _fields(names_and_values: list[bytes] | None) -> dict[bytes, bytes] | None:
    if names_and_values is None:
        return None
    return dict(zip(names_and_values[::2], names_and_values[1::2], strict=True))
