"""How much of one reply of Redis is read."""

from __future__ import annotations

from typing import Any

MAX_REPLY_BYTES = 8 << 20
"""What one reply may take here, by ``bounded_parser``'s count: eight times what a page of full entries takes."""


class OversizedReplyError(Exception):
    """A reply would take more than MAX_REPLY_BYTES. The rest of it was not read, and the connection was closed.

    ``unfinished`` : the arrays it broke off in, the outermost first, each with the elements that were read whole.
    """

    def __init__(self, unfinished: list[list[Any]]) -> None:
        super().__init__(f"more than {MAX_REPLY_BYTES} bytes")
        self.unfinished = unfinished
