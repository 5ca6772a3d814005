"""Numbers that replicas count up together."""

from __future__ import annotations

from typing import Any, Final

from ssd.sharing.connection import connect

KEY: Final = "ssd:1:generations"
_MOST: Final = 1 << 53


class RedisCounters:
    """A Redis hash of numbers, one connection; what is not a number there counts as 0. Any call may raise."""

    def __init__(self, url: str) -> None:
        """Nothing is sent yet. Raises ConfigError."""
        self._client = connect(url)

    def read(self, names: list[str]) -> list[int]:
        """Each number."""
        answer: Any = self._client.hmget(KEY, names)
        return [_number(value) for value in answer]

    def add(self, name: str, amount: int) -> int:
        """The number after ``amount`` was added to it."""
        return int(self._client.hincrby(KEY, name, amount))

    def raise_to(self, name: str, number: int) -> int:
        """The number, at least ``number`` from now on: replicas that tell an emptied Redis at once do not add up."""
        with self._client.pipeline() as pipeline:
            pipeline.watch(KEY)  # type: ignore[no-untyped-call]
            found: Any = pipeline.hget(KEY, name)
            if (counted := _number(found)) >= number:
                return counted
            pipeline.multi()
            pipeline.hset(KEY, name, str(number))
            pipeline.execute()
        return number

    def close(self) -> None:
        """Give the connection back."""
        self._client.close()


def _number(value: bytes | None) -> int:
    if value is None or len(value) > 16 or not value.isdigit():
        return 0
    return min(int(value), _MOST - 1)
