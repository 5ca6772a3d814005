"""Numbers of rows in which a product gives each row the same bits, found by trying them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch.nn.functional import pad

Product = Callable[[torch.Tensor], torch.Tensor]
"""Of rows [n, in], n >= 1, a tensor [n, out]."""

EXACT_ROWS: Final = 16
_FEW: Final = (1, 2, 3, 4, 8, 12, EXACT_ROWS)
"""Least rows of one product: MKL gives two threads of an EPYC parts of 5 rows that are computed in another order."""
_MOST: Final = (512, 256, 64, 32, 16)
"""Most rows, tried in this order."""
_MOST_WORK = 1 << 35
"""Weights of a layer times rows that are tried and then computed at once; 64 are always tried."""
_LARGE = 1 << 21
"""Weights of a layer whose products take long enough to be timed."""
_ROUNDS = 5
_WORTH = 0.9
"""Of the time that the fewest rows take, what more rows may take: two rows of some layers take less than one."""
_SOME = 16
"""Different rows that are tried, at least."""
_NUMBERS = 256
_ROUNDED_NUMBERS = 1 << 16
"""Results that are compared for each number of rows, at least: two of two may be equal by chance. Sums in another order
differ in every other float32, and in one of some thousands once they are rounded to a shorter type.
"""


class RowPlan(NamedTuple):
    """``least``, ``most`` : rows of one product. ``is_exact`` : whether all these numbers gave the same bits."""

    least: int = 1
    most: int = _MOST[0]
    is_exact: bool = True

    def product(self, compute: Product, x: torch.Tensor) -> torch.Tensor:
        """``compute`` of rows [n, in], in parts of allowed numbers of rows: [n, out]."""
        count = len(x)
        if count <= self.most:
            wanted = max(self.least, rounded_rows(count))
            return compute(x) if wanted == count else compute(pad(x, (0, 0, 0, wanted - count)))[:count]
        return torch.cat([self.product(compute, part) for part in torch.split(x, self.most)])


PLAIN: Final = RowPlan(1, 1 << 30, is_exact=False)
"""What is computed at once is what is asked for."""


def rounded_rows(num_rows: int) -> int:
    """How many rows are computed: up to 16 as many, above one of eight numbers between a power of two and the next.

    oneDNN makes machine code for each number of rows, which takes longer than a pass of a small model, and keeps that
    of the last thousand products. So there are few numbers; the rows added are an eighth at most.
    """
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


def row_counts(most: int) -> list[int]:
    """All numbers of rows that products of up to ``most`` have."""
    return sorted({rounded_rows(count) for count in range(1, most + 1)})


@torch.inference_mode()
def find_rows(compute: Product, size: int, num_outputs: int, dtype: torch.dtype) -> RowPlan:
    """The plan of a layer [num_outputs, size]: the most rows that can be, and the least that take the least time.

    O(products of 6,000 rows in all), fewer for layers of more than 64 million weights.
    """
    numbers = _NUMBERS if dtype == torch.float32 else _ROUNDED_NUMBERS
    num_rows = -(-numbers // (num_outputs * _SOME)) * _SOME
    some = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.cat([compute(part) for part in torch.split(some, _SOME)])
    allowed = [most for most in _MOST if most <= 64 or most * size * num_outputs <= _MOST_WORK]
    good = {count for count in row_counts(allowed[0]) if _is_same(compute, some, count, wanted, numbers)}
    for most in allowed:
        if good.issuperset(count for count in row_counts(most) if count >= _FEW[-1]):
            few = [count for count in _FEW if good.issuperset(range(count, _FEW[-1]))]
            least = few[0]
            if size * num_outputs >= _LARGE:
                seconds = {count: seconds_of(compute, some[:count]) for count in few[:4]}
                best = min(seconds, key=seconds.__getitem__)
                least = best if seconds[best] < _WORTH * seconds[least] else least
            return RowPlan(least, most)
    return RowPlan(1, allowed[0], is_exact=False)


def _is_same(compute: Product, some: torch.Tensor, count: int, wanted: torch.Tensor, numbers: int) -> bool:
    """Whether ``count`` rows, of ``some`` or these again and again, give each time and place what was ``wanted``."""
    again = -(-count // len(some))
    rows, results = some.repeat(again, 1), wanted.repeat(again, 1)
    tried = min(-(-numbers // wanted.shape[1]), len(rows) - count + 1)
    return all(
        torch.equal(compute(rows[first : first + count]), results[first : first + count])
        for first in range(0, tried, count)
    )


def seconds_of(compute: Product, x: torch.Tensor) -> float:
    """The least time of some products of ``x``."""
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        compute(x)
        found.append(time.perf_counter() - began)
    return min(found)
