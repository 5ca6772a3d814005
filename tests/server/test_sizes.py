"""Numbers as people write them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.command.flags import number, spelled

FACTORS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


@given(whole=st.integers(0, 10**6), fraction=st.from_regex(r"[0-9]{0,4}", fullmatch=True), data=st.data())
def test_a_number_is_its_digits_times_its_unit(whole: int, fraction: str, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(FACTORS)))
    exact = Fraction(f"{whole}.{fraction or 0}") * FACTORS[unit]
    text = f"{whole}{f'.{fraction}' if fraction else ''}{unit}"
    if exact.denominator == 1:
        assert number(text) == exact
    else:
        with pytest.raises(ValueError):
            number(text)


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_an_error_of_one_line(text: str) -> None:
    try:
        assert number(text) >= 0
    except ValueError as error:
        assert "\n" not in str(error)


@given(st.integers(0, 1 << 60) | st.integers(0, 1 << 20).map(lambda count: count << 20))
def test_what_is_spelled_is_read_again(count: int) -> None:
    assert number(spelled(count)) == count


def test_a_short_spelling_is_taken_where_it_is_exact() -> None:
    assert [spelled(n) for n in (0, 1000, 1024, 8 << 20, 1 << 30)] == ["0", "1000", "1K", "8M", "1G"]
