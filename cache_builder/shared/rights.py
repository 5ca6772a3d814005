"""Which commands that sharing needs the user of a URL may give, without giving any.

A server checks rights when it queues a command of a transaction. So each is queued and the connection closed, which
gives the transaction up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cache_builder.shared.text import shown
from ssd.sharing.keys import namespace_key
from ssd.sharing.nodes import server_of

if TYPE_CHECKING:
    import redis

_KEY = namespace_key("0" * 32, "status")  # nobody's


class Right(NamedTuple):
    """``is_given`` : None where that cannot be told."""

    command: str
    needed_for: str
    is_given: bool | None


_NEEDED: tuple[tuple[str, tuple[tuple[str | int, ...], ...]], ...] = (
    (
        "sharing",
        (
            ("XADD", _KEY, "*", "e", ""),
            ("XREAD", "COUNT", 1, "STREAMS", _KEY, "0-0"),
            ("XRANGE", _KEY, "-", "+", "COUNT", 1),
            ("XREVRANGE", _KEY, "+", "-", "COUNT", 1),
            ("XTRIM", _KEY, "MAXLEN", 1),
            ("DEL", _KEY),
            ("PING",),
        ),
    ),
    (
        "joining warm, push and pull",
        (
            ("GET", _KEY),
            ("GETRANGE", _KEY, 0, 1),
            ("SET", _KEY, ""),
            ("INCR", _KEY),
            ("PEXPIRE", _KEY, 1),
            ("HGET", _KEY, "a"),
            ("HSET", _KEY, "a", ""),
            ("HDEL", _KEY, "a"),
            ("HKEYS", _KEY),
            ("HLEN", _KEY),
        ),
    ),
    ("API keys", (("HMGET", _KEY, "a"), ("HINCRBY", _KEY, "a", 1))),
    ("the delay in /metrics", (("TIME",),)),
)


def rights_of(client: redis.Redis) -> tuple[str, list[Right]]:
    """The user's name, and each right. Raises a lost connection."""
    from redis.exceptions import NoPermissionError, ResponseError

    server = server_of(client, _KEY)
    pool = server.connection_pool
    connection = pool.get_connection()
    try:
        user = _answer(connection, "ACL", "WHOAMI")
        name = "default" if isinstance(user, ResponseError) else shown(user)
        watching = _answer(connection, "WATCH", _KEY)
        begun = _answer(connection, "MULTI")
        has_begun = not isinstance(begun, Exception)
        rights = [
            Right("WATCH", "sharing", not isinstance(watching, NoPermissionError)),
            Right("MULTI", "sharing", not isinstance(begun, NoPermissionError)),
        ]
        for purpose, commands in _NEEDED:
            for command in commands:
                answer = _answer(connection, *command) if has_begun else None
                is_given = None if not has_begun else not isinstance(answer, NoPermissionError)
                rights.append(Right(str(command[0]), purpose, is_given))
        rights.insert(2, Right("EXEC", "sharing", _may_execute(server)))
        return name, rights
    finally:
        connection.disconnect()  # type: ignore[no-untyped-call]
        pool.release(connection)


def _may_execute(server: redis.Redis) -> bool | None:
    """Of a transaction that only asks for a sign of life."""
    from redis.exceptions import NoPermissionError, ResponseError

    try:
        with server.pipeline() as pipeline:
            pipeline.ping()
            pipeline.execute()
        return True
    except NoPermissionError as error:
        return False if "'exec'" in str(error).lower() else None
    except ResponseError:
        return None


def _answer(connection: Any, *command: str | int) -> Any:
    from redis.exceptions import ResponseError

    connection.send_command(*command)
    try:
        return connection.read_response()
    except ResponseError as error:
        return error
