"""Reading and writing of one Redis stream.

A stream assigns growing ids, and any writer may choose one. After the largest possible id, a stream accepts no entry
any more, and is replaced by a new stream under the same key. Replicas need no coordination for this: each deletes the
stream in a transaction, which fails if another client has modified the stream since it was found to be full. Then all
append to the new stream. Replicas that had not read the old stream's entries lose them. The ids of the new stream start
at the server's clock again; ``subscriber`` regularly checks the stream and detects that its ids have become smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import redis


FIELD = b"e"
"""The name of the only field of each entry of a replication stream. The field's value is the output of ``pack_entry``.
"""


def append_entries(
    client: redis.Redis, key: str, values: Sequence[bytes], *, max_entries: int
) -> list[Exception | None]:
    """Append values to a Redis stream; return None for each value that was written, else the error that it caused.

    The stream is trimmed to about ``max_entries`` entries. If the connection fails, an error is raised, and any of the
    values may have been written.
    """
    answers = _append(client, key, values, max_entries)
    if not any(_is_full(answer) for answer in answers):
        return answers
    _delete_full(client, key)
    left = [index for index, answer in enumerate(answers) if answer is not None]
    for index, answer in zip(left, _append(client, key, [values[i] for i in left], max_entries), strict=True):
        answers[index] = answer
    return answers


def is_cluster(client: redis.Redis) -> bool:
    """Return whether a client is connected to a Redis cluster, where a command may fail for some of the keys only."""
    from redis.cluster import RedisCluster

    return isinstance(client, RedisCluster)


def _append(client: redis.Redis, key: str, values: Sequence[bytes], max_entries: int) -> list[Exception | None]:
    """Append values to a Redis stream, in one pipeline unless the server is a cluster.

    In a cluster each value is a command of its own, because redis-py's cluster pipeline repeats failed commands.
    """
    from redis.exceptions import ClusterDownError, ResponseError

    # Subscribers enforce the bound in tokens. This bound applies even without a subscriber.
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


def _is_full(answer: Exception | None) -> bool:
    return answer is not None and "last possible ID" in str(answer)


def _delete_full(client: redis.Redis, key: str) -> None:
    """Delete a Redis stream that has reached the largest possible id and therefore accepts no more entries.

    The stream is kept if another client has changed it meanwhile.
    """
    from redis.exceptions import ResponseError, WatchError

    with client.pipeline(transaction=True) as transaction:
        transaction.watch(key)  # type: ignore[no-untyped-call]
        try:
            # This never adds an entry: the stream is full, or 0-1 is below its newest id, or it does not exist.
            transaction.xadd(key, {FIELD: b""}, id="0-1", nomkstream=True)
            return
        except ResponseError as error:
            if not _is_full(error):
                return
        transaction.multi()
        transaction.delete(key)
        try:
            transaction.execute()
        except WatchError:
            return


BEGINNING = b"0-0"  # before all entry ids

_LARGEST = (1 << 64) - 1

MAX_REPLY_BYTES = 8 << 20
"""The maximum size of a Redis reply in bytes, eight times the size of a full page of valid stream entries."""

_AT_ONCE = 256

RawEntry = tuple[bytes, dict[bytes, bytes] | None]
"""The id and the fields of a Redis stream entry. The fields are None if the entry was deleted or too large to transfer.
"""


class OversizedReplyError(Exception):
    """Raised if a Redis reply exceeds MAX_REPLY_BYTES. Reading was aborted, and the connection was closed.

    Attributes:
        unfinished: The nested arrays of the reply that were not complete yet, the outermost array first, with the
            elements that had been read completely.
    """

    def __init__(self, unfinished: list[list[Any]]) -> None:
        super().__init__(f"more than {MAX_REPLY_BYTES} bytes")
        self.unfinished = unfinished


class WrongReplyError(Exception):
    """Raised if a Redis reply cannot be the answer to the command, e.g. because entries are out of order."""


class EntryPage(NamedTuple):
    entries: list[RawEntry]
    is_last: bool  # whether there are no more entries now
    was_cut: bool = False  # whether the rest of the page was too large to fetch


def is_entry_id(text: bytes) -> bool:
    return re.fullmatch(rb"\d{1,20}-\d{1,20}", text) is not None and max(id_key(text)) <= _LARGEST


def id_key(entry_id: bytes) -> tuple[int, int]:
    milliseconds, number = entry_id.split(b"-")
    return int(milliseconds), int(number)


def check_entries(entries: Sequence[RawEntry], *, after: bytes) -> None:
    """Raise WrongReplyError unless the stream entries in a reply have increasing ids, all larger than ``after``.

    A subscriber that accepted other ids could get a position in the stream from which it would never read new entries.
    """
    last = id_key(after)
    for entry in entries:
        if type(entry) not in (tuple, list) or len(entry) != 2:
            raise WrongReplyError("the reply of Redis has an element that is not a stream entry")
        entry_id, fields = entry
        if type(entry_id) is not bytes or not is_entry_id(entry_id) or not (fields is None or type(fields) is dict):
            raise WrongReplyError("the reply of Redis has an element that is not a stream entry")
        if (place := id_key(entry_id)) <= last:
            raise WrongReplyError("the reply of Redis has entries that are out of order")
        last = place


def entries_after(client: redis.Redis, key: str, entry_id: bytes, count: int) -> EntryPage:
    """Return at most ``count`` entries of a Redis stream with ids larger than ``entry_id``, oldest first.

    The ids in the reply are not checked here, see `check_entries`.
    """
    if id_key(entry_id) == (_LARGEST, _LARGEST):
        return EntryPage([], is_last=True)
    return _page(client, count, "XRANGE", key, b"(" + entry_id, b"+")


def all_entries(client: redis.Redis, key: str) -> Iterator[RawEntry]:
    """Yield every entry of a Redis stream, oldest first, fetched in pages.

    Raises WrongReplyError if a reply is not a list of entries with increasing ids, see `check_entries`.
    """
    last, count = BEGINNING, _AT_ONCE
    while True:
        page = entries_after(client, key, last, count)
        check_entries(page.entries, after=last)
        yield from page.entries
        if page.is_last or not page.entries:
            return
        last, count = page.entries[-1][0], 1 if page.was_cut else _AT_ONCE


def newest_entries(client: redis.Redis, key: str, count: int) -> list[RawEntry]:
    """Return at most ``count`` entries of a Redis stream, newest first.

    Raises WrongReplyError if the reply is not a list of entries with descending ids, see `check_entries`.
    """
    entries = _page(client, count, "XREVRANGE", key, b"+", b"-").entries
    check_entries(entries[::-1], after=BEGINNING)
    return entries


def entry_at(client: redis.Redis, key: str, entry_id: bytes) -> RawEntry | None:
    """Return the entry with a given id in a Redis stream, or None if there is no such entry.

    Raises WrongReplyError if Redis returns an entry with another id.
    """
    entries = _page(client, 1, "XRANGE", key, entry_id, entry_id).entries
    if entries and entries[0][0] != entry_id:
        raise WrongReplyError("the reply of Redis has an entry that was not requested")
    return entries[0] if entries else None


def _page(client: redis.Redis, count: int, *command: str | bytes) -> EntryPage:
    """Run a Redis range command and return the stream entries in its reply.

    If the reply is too large, only the complete entries at its beginning are returned. If even the first entry is too
    large, it is returned without fields.
    """
    try:
        entries: Any = client.execute_command(*command, "COUNT", count)  # type: ignore[no-untyped-call]
        return EntryPage(entries, is_last=len(entries) < count)
    except OversizedReplyError as error:
        whole, *begun = error.unfinished
        if whole:
            return EntryPage([(entry_id, _fields(fields)) for entry_id, fields in whole], is_last=False, was_cut=True)
        return EntryPage([(begun[0][0], None)], is_last=False, was_cut=True)


def _fields(names_and_values: list[bytes] | None) -> dict[bytes, bytes] | None:
    if names_and_values is None:
        return None
    return dict(zip(names_and_values[::2], names_and_values[1::2], strict=True))


def value_of(raw: RawEntry) -> bytes:
    """Return the value of a stream entry's ``FIELD``; empty if the entry does not have this field."""
    data = (raw[1] or {}).get(FIELD)
    return data if isinstance(data, bytes) else b""
