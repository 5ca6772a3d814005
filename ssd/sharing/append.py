"""Appending to a stream, also to one that somebody filled up to its last id.

A stream gives out growing ids, and whoever writes to it may choose one. After the last possible id it takes no entry
ever again, so it gives way to a new one under the same key. Replicas do that without agreeing on it: each deletes the
stream only in a transaction that fails if another has touched it since it was found to be full, then all append to
the new one. What the old one held is lost to those that had not read it. Ids begin at the server's clock again; that
they are smaller than those that were read is seen by the readers' regular comparison (``reader``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


def _append(client: redis.Redis, key: str, values: Sequence[bytes], max_entries: int) -> list[Exception | None]:
    from redis.exceptions import ResponseError

    pipeline = client.pipeline(transaction=False)
    for value in values:
        # The bound in tokens is the reader's work; this one holds even if no reader lives.
        pipeline.xadd(key, {FIELD: value}, maxlen=max_entries, approximate=True)
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, ResponseError):
            raise answer
    return [answer if isinstance(answer, Exception) else None for answer in answers]


def _says_full(answer: Exception | None) -> bool:
    return answer is not None and "last possible ID" in str(answer)


def _begin_anew(client: redis.Redis, key: str) -> None:
    """Delete the stream unless it takes entries again, or another client is doing the same."""
    from redis.exceptions import ResponseError, WatchError

    with client.pipeline() as transaction:
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
