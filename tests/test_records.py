"""Records: what Python writes by a name kernels read by it, and the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Float64, Int32, Int64, Record, Records, Uint64, dtype_of, kernel, view_of, views_of


class Inner(Record):
    """A record inside others."""

    number: Int32
    large: Uint64


class Outer(Record):
    """A record with one of every kind of field."""

    count: Int32
    share: Float64
    inner: Inner
    row: Annotated[npt.NDArray[np.int32], np.int32, 3]
    table: Annotated[npt.NDArray[np.float64], np.float64, (2, 3)]
    inners: Annotated[Sequence[Inner], Inner, 2]
    last: Int64


outer_at, outers_at = view_of(Outer), views_of(Outer)


@kernel
def write(at: int) -> None:
    outer = outer_at(at)
    outer.count, outer.share, outer.last = 3, 0.5, -7
    outer.inner.large = outer.inner.number + 1
    outer.row[:2] = 9
    outer.table[1, 2] = 2.5
    outer.inners[1].number = outer.count


@kernel
def sum_of_last(at: int, length: int) -> int:
    total, outers = 0, outers_at(at, length)
    for i in range(length):
        total += outers[i].last
    return total


def test_both_sides_read_what_the_other_wrote() -> None:
    records = Records(Outer, 3)
    records[1].inner.number = 41
    write(records.address + dtype_of(Outer).itemsize)
    outer = records[1]
    assert (outer.count, outer.share, outer.last, outer.inner.large) == (3, 0.5, -7, 42)
    assert list(outer.row) == [9, 9, 0] and outer.table[1][2] == 2.5
    assert [each.number for each in outer.inners] == [0, 3]
    assert records.array["last"].tolist() == [0, -7, 0] and records.array["row"].shape == (3, 3)
    records[2].last = 10
    assert sum_of_last(records.address, 3) == 3 and sum_of_last(records.address, 0) == 0
    assert (len(records), [each.count for each in records]) == (3, [0, 3, 0])


def test_no_records_are_an_address_and_nothing_there() -> None:
    records = Records(Outer, 0)
    assert len(records) == 0 and list(records) == [] and sum_of_last(records.address, 0) == 0
