"""Parses and formats integers with suffixes such as 4M, 32k and 64GiB."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))? ?([a-zA-Z]*)")
_LETTERS = "kmgt"
_UNITS = {"": 1, "B": 1, "kB": 1000}
for _power, _letter in enumerate(_LETTERS, 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter.upper()}B": 1000**_power}
    _UNITS |= {_letter.upper(): 1024**_power, f"{_letter.upper()}iB": 1024**_power}


def parse_number(text: str) -> int:
    """Parse an integer with an optional suffix as in vLLM, e.g. 32k (32,000), 32K (32,768) or 4GiB.

    Lower-case k, m, g, t are powers of 1,000, upper-case letters powers of 1,024. With a B, kB, MB ... are powers of
    1,000 and KiB, MiB ... powers of 1,024. Raises ValueError for any other text and for results that are not integers.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is not None and found[3] in _UNITS:
        whole, fraction, factor = found[1], found[2] or "", _UNITS[found[3]]
        # Integers, because floats cannot represent all numbers of bytes.
        result, rest = divmod(int(whole + fraction) * factor, int("1" + "0" * len(fraction)))
        if rest == 0:
            return result
    raise ValueError(f"expected a whole number such as 32768, 32k (thousands), 32K or 4GiB, got {text[:80]!r}")


def format_number(value: int) -> str:
    """Format an integer in the shortest exact form that `parse_number` reads, e.g. 8388608 as ``8M``."""
    for power, letter in reversed(list(enumerate(_LETTERS, 1))):
        if value and value % 1024**power == 0:
            return f"{value // 1024**power}{letter.upper()}"
    return str(value)
