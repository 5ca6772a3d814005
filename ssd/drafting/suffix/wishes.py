"""What a request asks for beyond its context, where the kernels find it."""

from __future__ import annotations

from typing import Self

import numpy as np

from ssd.compiled.addresses import TokenIds, address
from ssd.drafting.protocol import DraftRequest, Prices
from ssd.retrieval.pattern import as_context

_INT32 = np.dtype(np.int32)
_NO_TOKENS = np.zeros(0, np.int32)


class Wishes:
    """Prediction, prices, a tree.

    ``address`` : of int64[5], the last columns of a row. Keeps alive what these point to.
    """

    def __init__(self, prices: Prices, prediction: TokenIds | None = None, tree: bool = False) -> None:
        self._prices = np.ascontiguousarray(prices, np.float64)
        self._prediction = _NO_TOKENS if prediction is None else contiguous(prediction)
        held, asked = self._prediction, self._prices
        self._words = np.array([address(held), len(held), address(asked), len(asked), int(tree)], np.int64)
        self.address = address(self._words)

    def of(self, request: DraftRequest, spare: Wishes) -> Wishes:
        """Those of a request; itself, the usual ones, when it has none of its own.

        ``spare`` : made with one price; it is changed and returned where that is enough, as at most steps.
        """
        if request.prices is None and request.prediction is None and not request.tree:
            return self
        prices = self._prices if request.prices is None or not len(request.prices) else request.prices
        if request.prediction is None and len(prices) == 1:
            return spare._with(float(prices[0]), request.tree)
        return Wishes(prices, request.prediction, request.tree)

    def _with(self, price: float, tree: bool) -> Self:
        self._prices[0], self._words[4] = price, tree
        return self


def contiguous(context: TokenIds) -> TokenIds:
    """``context`` as the kernels take it: itself, or a copy. Ids that int32 cannot hold become -1, which is no token.

    A copy also of what is read-only: the kernels are compiled for one kind of array.
    """
    if context.dtype is _INT32 and context.flags.carray:
        return context
    context = as_context(context)
    return context if context.flags.writeable else context.copy()
