"""Tests with which numbers of rows the matrix products of a CPU library are bit-identical."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

import torch
from torch.nn.functional import pad

Product = Callable[[torch.Tensor], torch.Tensor]  # maps rows [n, in], n >= 1, to [n, out]

EXACT_ROWS: Final = 16
# Candidates for the minimum number of rows of a product: MKL on an EPYC gives each of two threads parts of 5 rows that
# are summed in another order.
_MIN_ROWS: Final = (1, 2, 3, 4, 8, 12, EXACT_ROWS)
_MAX_ROWS: Final = (512, 256, 64, 32, 16)  # candidates for the maximum number of rows, in order of preference
_MAX_WORK = 1 << 35  # the maximum of weights times rows of a product that is tested and used; 64 rows are always tested
_ROUNDS = 5
_MAX_TIMED_ROUNDS = 20  # products are timed as often if that takes at most _TIMED_S seconds
_TIMED_S = 0.3
# A product of more rows is preferred below this relative time: with some layers four rows are a fifth faster than two.
_MAX_RELATIVE_TIME = 0.95
# Numbers of rows, and to how many they are padded. With 5 or more as the minimum, batches of 4 would be slower.
_TIMED_ROWS = ((1, 1), (2, 2), (3, 3), (1, 2), (1, 3), (1, 4))
_DIFFERENT_ROWS = 16  # the minimum number of different rows that are tested
_RESULTS = 256
# The minimum number of results to compare for each number of rows, because two sums may be equal by chance. Sums in
# another order differ in every other float32, but only in one of several thousand values after rounding to a shorter
# dtype.
_ROUNDED_RESULTS = 1 << 16


class RowPlan(NamedTuple):
    """The range of batch sizes, ``min_rows`` to ``max_rows``, in which a matrix product is batch-invariant.

    A row's result then has the same bits at all of these batch sizes. At others, libraries may sum in another order,
    which changes the rounding. So smaller batches are padded to ``min_rows``, and larger ones are split.
    """

    min_rows: int = 1
    max_rows: int = _MAX_ROWS[0]
    is_exact: bool = True  # whether all these numbers of rows gave the same bits

    def product(self, compute: Product, x: torch.Tensor) -> torch.Tensor:
        """Compute a matrix product of rows [n, in], padded or split to batch sizes within the plan."""
        count = len(x)
        if count <= self.max_rows:
            wanted = max(self.min_rows, rounded_rows(count))
            return compute(x) if wanted == count else compute(pad(x, (0, 0, 0, wanted - count)))[:count]
        return torch.cat([self.product(compute, part) for part in torch.split(x, self.max_rows)])


UNPADDED: Final = RowPlan(1, 1 << 30, is_exact=False)
"""The `RowPlan` of layers that are not batch-invariant, for which rows are neither padded nor split."""


def rounded_rows(num_rows: int) -> int:
    """Round a batch size up, so that oneDNN generates machine code for only a few batch sizes.

    Generating code takes longer than a pass of a small model, and oneDNN caches the code of the last thousand products.
    Batch sizes up to 16 are not rounded. Larger ones are rounded to one of eight sizes between two powers of two, so at
    most an eighth of the rows is padding.
    """
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


def row_counts(max_rows: int) -> list[int]:
    """Return all batch sizes that `rounded_rows` returns for 1 to ``max_rows`` rows, in ascending order."""
    return sorted({rounded_rows(count) for count in range(1, max_rows + 1)})


@torch.inference_mode()
def find_invariant_shapes(compute: Product, size: int, num_outputs: int, dtype: torch.dtype) -> RowPlan:
    """Test at which batch sizes a matrix product is batch-invariant, and return them as a `RowPlan`.

    ``compute`` multiplies rows by a weight [num_outputs, size]. It is tested with random rows, about 6,000 in total,
    and fewer if the layer has more than 64 million weights. The plan has the largest ``max_rows`` that passes the test.
    If none passes, the plan's ``is_exact`` is False.
    """
    numbers = _RESULTS if dtype == torch.float32 else _ROUNDED_RESULTS
    num_rows = -(-numbers // (num_outputs * _DIFFERENT_ROWS)) * _DIFFERENT_ROWS
    some = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.cat([compute(part) for part in torch.split(some, _DIFFERENT_ROWS)])
    allowed = [max_rows for max_rows in _MAX_ROWS if max_rows <= 64 or max_rows * size * num_outputs <= _MAX_WORK]
    good = {count for count in row_counts(allowed[0]) if _is_invariant(compute, some, count, wanted, numbers)}
    for max_rows in allowed:
        if good.issuperset(count for count in row_counts(max_rows) if count >= _MIN_ROWS[-1]):
            min_rows = next(count for count in _MIN_ROWS if good.issuperset(range(count, _MIN_ROWS[-1])))
            return RowPlan(min_rows, max_rows)
    return RowPlan(1, allowed[0], is_exact=False)


def _is_invariant(compute: Product, some: torch.Tensor, count: int, wanted: torch.Tensor, numbers: int) -> bool:
    again = -(-count // len(some))
    rows, results = some.repeat(again, 1), wanted.repeat(again, 1)
    tried = min(-(-numbers // wanted.shape[1]), len(rows) - count + 1)
    return all(
        torch.equal(compute(rows[first : first + count]), results[first : first + count])
        for first in range(0, tried, count)
    )


@torch.inference_mode()
def with_fastest_rows(
    plans: Mapping[str, RowPlan], products: Sequence[tuple[str, Product, torch.Tensor]]
) -> dict[str, RowPlan]:
    """Raise the minimum number of rows of plans whose products of 1 to 3 rows are then faster; return all plans.

    The time of padding counts, which exceeds the gain for small layers. ``products`` are the name of a plan, a product,
    and at least 3 rows to multiply. All are computed in this order, again for each number of rows, so each finds its
    weights in memory or in a cache as in a forward pass.
    """
    seconds: dict[tuple[str, int, int], list[float]] = {}
    number, end = 0, time.perf_counter() + _TIMED_S
    while number < _ROUNDS or (number < _MAX_TIMED_ROUNDS and time.perf_counter() < end):
        turn, number = number % len(_TIMED_ROWS), number + 1
        for count, padded in _TIMED_ROWS[turn:] + _TIMED_ROWS[:turn]:
            took = defaultdict[str, float](float)
            for name, compute, rows in products:
                if padded >= plans[name].min_rows:
                    plan = plans[name]._replace(min_rows=padded)
                    began = time.perf_counter()
                    plan.product(compute, rows[:count])
                    took[name] += time.perf_counter() - began
            for name, total in took.items():
                seconds.setdefault((name, count, padded), []).append(total)
    found, typical = dict(plans), {case: median(those) for case, those in seconds.items()}
    for name, plan in plans.items():
        totals = {
            min_rows: sum(
                typical[(name, 1, min_rows) if count < min_rows else (name, count, count)] for count in (1, 2, 3)
            )
            for min_rows in range(max(1, plan.min_rows), 5)
        }
        best = min(totals, key=totals.__getitem__, default=plan.min_rows)
        if best > plan.min_rows and totals[best] < _MAX_RELATIVE_TIME * totals[plan.min_rows]:
            found[name] = plan._replace(min_rows=best)
    return found


def seconds_of(compute: Product, x: torch.Tensor) -> float:
    """Measure the time of the matrix product of ``x`` several times, and return the shortest time in seconds."""
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        compute(x)
        found.append(time.perf_counter() - began)
    return min(found)
