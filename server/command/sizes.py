"""Numbers as people write them: ``32k`` tokens, ``4GiB`` of memory."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping

_NUMBER = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))? ?([a-zA-Z]*)")
_LETTERS = "kmgt"
_COUNTS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{letter.upper(): 1024**power for power, letter in enumerate(_LETTERS, 1)},
}
_BYTES = {
    **_COUNTS,
    "B": 1,
    "kB": 1000,
    **{f"{letter.upper()}B": 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{f"{letter.upper()}iB": 1024**power for power, letter in enumerate(_LETTERS, 1)},
}


def count(text: str) -> int:
    """A whole number, as ``vllm serve`` reads it: ``k m g t`` are thousands, ``K M G T`` powers of 1,024.

    Raises ArgumentTypeError.
    """
    return _read(text, _COUNTS, "a whole number such as 32768, 32k (thousands) or 32K (times 1,024)")


def num_bytes(text: str) -> int:
    """A number of bytes: as a count, or with ``kB MB GB TB`` (thousands) or ``KiB MiB GiB TiB`` (powers of 1,024).

    Raises ArgumentTypeError.
    """
    return _read(text, _BYTES, "a number of bytes such as 4294967296, 4G, 4GiB (times 1,024) or 4GB (thousands)")


def spelled(number: int) -> str:
    """``number`` as `count` reads it, as short as is exact: 8388608 is ``8M``."""
    for letter, power in zip(reversed(_LETTERS), (4, 3, 2, 1), strict=True):
        if number and number % 1024**power == 0:
            return f"{number // 1024**power}{letter.upper()}"
    return str(number)


def _read(text: str, units: Mapping[str, int], expected: str) -> int:
    found = _NUMBER.fullmatch(text.strip())
    if found is not None and found[3] in units:
        whole, fraction, factor = found[1], found[2] or "", units[found[3]]
        # In integers: a float would not hold every number of bytes.
        number, rest = divmod(int(whole + fraction) * factor, int("1" + "0" * len(fraction)))
        if rest == 0:
            return number
    raise ArgumentTypeError(f"expected {expected}, got {text[:80]!r}")
