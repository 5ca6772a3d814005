"""One Redis stream: appending to it, and pages of it.

A stream gives out growing ids, and whoever writes to it may choose one. After the last possible id it takes no entry
ever again, so it gives way to a new one under the same key. Replicas do that without agreeing on it: each deletes the
stream only in a transaction that fails if another has touched it since it was found to be full, then all append to
the new one. What the old one held is lost to those that had not read it. Ids begin at the server's clock again; that
they are smaller than those that were read is seen by the readers' regular comparison (``reader``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import redis


FIELD = b"e"
"""The one field of a stream entry; its value is what ``pack_entry`` made."""


def append(client: redis.Redis, key: str, values: Sequence[bytes], *, max_entries: int) -> list[Exception | None]:
    """Append an entry for each of ``values``: None for each that was written, the server's refusal for the others.

    ``max_entries`` : the stream is not longer than about this afterwards. Raises what ends the connection; then any of
    the entries may have been written.
    """
    answers = _append(client, key, values, max_entries)
    if not any(_says_full(answer) for answer in answers):
        return answers
    _begin_anew(client, key)
    left = [index for index, answer in enumerate(answers) if answer is not None]
    for index, answer in zip(left, _append(client, key, [values[i] for i in left], max_entries), strict=True):
        answers[index] = answer
    return answers


def is_cluster(client: redis.Redis) -> bool:
    """Whether a failure concerns some keys only, as others are on other nodes."""
    from redis.cluster import RedisCluster

    return isinstance(client, RedisCluster)


def _append(client: redis.Redis, key: str, values: Sequence[bytes], max_entries: int) -> list[Exception | None]:
    """One exchange with one server. To a cluster one by one: its pipeline would try each again that failed."""
    from redis.exceptions import ClusterDownError, ResponseError

    # The bound in tokens is the reader's work; this one holds even if no reader lives.
    commands = [("XADD", key, "MAXLEN", "~", max_entries, "*", FIELD, value) for value in values]
    answers: list[Any] = []
    if is_cluster(client):
        for command in commands:
            try:
                answers.append(client.execute_command(*command))  # type: ignore[no-untyped-call]
            except ResponseError as error:
                if isinstance(error, ClusterDownError):
                    raise
                answers.append(error)
    else:
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        answers = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, ResponseError):
            raise answer
    return [answer if isinstance(answer, Exception) else None for answer in answers]


def _says_full(answer: Exception | None) -> bool:
    return answer is not None and "last possible ID" in str(answer)


def _begin_anew(client: redis.Redis, key: str) -> None:
    """Delete the stream unless it takes entries again, or another client is doing the same."""
    from redis.exceptions import ResponseError, WatchError

    with client.pipeline(transaction=True) as transaction:
        transaction.watch(key)  # type: ignore[no-untyped-call]
        try:
            # Takes no entry whatever the stream is: it is full, or 0-1 is not above its newest id, or it is not there.
            transaction.xadd(key, {FIELD: b""}, id="0-1", nomkstream=True)
            return
        except ResponseError as error:
            if not _says_full(error):
                return
        transaction.multi()
        transaction.delete(key)
        try:
            transaction.execute()
        except WatchError:
            return


BEGINNING = b"0-0"
"""The id before all entries."""

_LARGEST = (1 << 64) - 1

MAX_REPLY_BYTES = 8 << 20
"""What one reply may take here, by ``clients.BoundedParser``'s count: eight times what a page of full entries takes."""

_AT_ONCE = 256

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


def all_entries(client: redis.Redis, key: str) -> Iterator[RawEntry]:
    """Every entry, oldest first, some at a time. Raises WrongReplyError."""
    last, count = BEGINNING, _AT_ONCE
    while True:
        page = entries_after(client, key, last, count)
        check_entries(page.entries, after=last)
        yield from page.entries
        if page.is_last or not page.entries:
            return
        last, count = page.entries[-1][0], 1 if page.was_cut else _AT_ONCE


def newest_entries(client: redis.Redis, key: str, count: int) -> list[RawEntry]:
    """At most ``count`` entries, newest first. Raises WrongReplyError."""
    entries = _page(client, count, "XREVRANGE", key, b"+", b"-").entries
    check_entries(entries[::-1], after=BEGINNING)
    return entries


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


def value_of(raw: RawEntry) -> bytes:
    """What an entry holds; empty when it has not our field."""
    data = (raw[1] or {}).get(FIELD)
    return data if isinstance(data, bytes) else b""
