"""How much there is in a JSON text, before it is parsed: a parser makes an object of every value, and keeps the
interpreter's lock while it does."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import kernel

_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_COMMA: Final = ord(",")
_COLON: Final = ord(":")
_BRACKET: Final = ord("[")
_BRACE: Final = ord("{")


def num_values(content: bytes | bytearray) -> int:
    """Commas, colons and opening brackets outside strings: at least as many as there are values, less one.

    Of a text that is no JSON, some number. O(bytes), about a nanosecond each, without the interpreter's lock.
    """
    return int(_num_values(np.frombuffer(content, np.uint8)))


@kernel
def _num_values(content: npt.NDArray[np.uint8]) -> int:
    count = 0
    in_string = False
    at, n = 0, len(content)
    while at < n:
        byte = content[at]
        at += 1
        if in_string:
            if byte == _BACKSLASH:
                at += 1
            elif byte == _QUOTE:
                in_string = False
        elif byte == _QUOTE:
            in_string = True
        elif byte in (_COMMA, _COLON, _BRACKET, _BRACE):
            count += 1
    return count
