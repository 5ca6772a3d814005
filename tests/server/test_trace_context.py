"""Which ``traceparent`` headers name a span."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.base.record import TraceContext, read_trace_context

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def read(*values: str, state: str | None = None) -> TraceContext | None:
    headers = [(b"traceparent", value.encode("latin-1")) for value in values]
    return read_trace_context([*headers, *([] if state is None else [(b"tracestate", state.encode())])])


def test_a_parent_and_its_state() -> None:
    assert read(f"00-{TRACE}-{PARENT}-01", state="a=1") == (TRACE, PARENT, True, "a=1")
    assert read(f"00-{TRACE}-{PARENT}-00") == (TRACE, PARENT, False, "")
    assert read(f"00-{TRACE}-{PARENT}-02") == (TRACE, PARENT, False, "")


def test_later_versions_may_say_more() -> None:
    assert read(f"cc-{TRACE}-{PARENT}-01-what-will-come") == (TRACE, PARENT, True, "")


def test_a_state_that_is_too_long_is_left_out() -> None:
    assert read(f"00-{TRACE}-{PARENT}-01", state="a" * 513) == (TRACE, PARENT, True, "")


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"cc-{TRACE}-{PARENT}-01.more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00_{TRACE}_{PARENT}_01",
    ],
)
def test_what_is_none_is_taken_for_none(value: str) -> None:
    assert read(value) is None


def test_two_parents_are_none() -> None:
    value = f"00-{TRACE}-{PARENT}-01"
    assert read(value, value) is None and read() is None


def slow_twin(value: str) -> tuple[str, str, bool] | None:
    """The recommendation, field by field."""
    parts = value.strip(" \t").split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2]:
        return None
    if any(set(part) - set("0123456789abcdef") for part in parts[:4]):
        return None
    version, trace, parent, flags = parts[:4]
    if version == "ff" or (version == "00" and len(parts) > 4) or not int(trace, 16) or not int(parent, 16):
        return None
    return trace, parent, bool(int(flags, 16) & 1)


@given(
    st.one_of(
        st.text(alphabet="0123456789abcdefg-\u00e9 ", max_size=80),
        st.from_regex(r"\A[ ]?(00|01|ff)-(0{32}|[0-9a-f]{32})-(0{16}|[0-9a-f]{16})-[0-9a-f]{2}(-[a-z0-9]{0,4})?\Z"),
    )
)
def test_whatever_comes_is_read_as_the_recommendation_says(value: str) -> None:
    found = read(value)
    assert (None if found is None else found[:3]) == slow_twin(value)
