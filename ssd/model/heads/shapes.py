"""The trees that a head's candidates make: a chain with siblings at every depth, or what is most probable of all."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.drafting.protocol import Draft
from ssd.pricing.rate import price_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SOURCE = "head"
"""``Draft.source`` of what a draft head proposes."""

_SIBLINGS = 3
"""Most tokens proposed beside that of the chain at any depth."""


def comb(token_ids: Sequence[Ints], chances: Sequence[Floats], prices: Floats, limit: int) -> Draft:
    """The chain of the first candidates, with the next ones of each depth as leaves where they may pay.

    token_ids, chances : of each depth the candidates, int64[M] and float64[M], after the first of the depth before.
    prices : as ``DraftRequest.prices``. limit : most tokens in all. The chain comes first, so that a draft that is cut
    keeps it; then the leaves, the likeliest first.
    """
    depth = min(len(token_ids), limit)
    leaves = []
    path = 1.0
    for i in range(depth):
        for rank in range(1, min(_SIBLINGS + 1, len(token_ids[i]))):
            chance = path * float(chances[i][rank])
            if chance > price_of(prices, depth):
                leaves.append((-chance, i, rank))
        path *= float(chances[i][0])
    nodes = [(int(token_ids[i][0]), i - 1, float(chances[i][0])) for i in range(depth)]
    for _chance, i, rank in sorted(leaves)[: limit - depth]:
        nodes.append((int(token_ids[i][rank]), i - 1, float(chances[i][rank])))
    return _draft(nodes)


def product(token_ids: Ints, chances: Floats, prices: Floats, limit: int) -> Draft:
    """The likeliest paths where each depth has candidates of its own, whatever came before: one token at least.

    token_ids, chances : int64[K, M] and float64[K, M]. prices, limit : as for `comb`, and the same order.
    O(limit log limit).
    """
    nodes: list[tuple[int, int, float]] = []
    chain: list[int] = []
    found = [
        (-float(chances[0, 0]), 0, 0, 0, -1, 1.0)
    ]  # chance of the path, serial number, depth, rank, parent, before
    serial = 0
    while found and len(nodes) < limit:
        negative, _, depth, rank, parent, before = heapq.heappop(found)
        if nodes and -negative <= price_of(prices, len(nodes)):
            continue
        if rank == 0 and parent == (chain[-1] if chain else -1):
            chain.append(len(nodes))
        nodes.append((int(token_ids[depth, rank]), parent, float(chances[depth, rank])))
        followers = [(depth, rank + 1, parent, before), (depth + 1, 0, len(nodes) - 1, -negative)]
        for next_depth, next_rank, next_parent, chance in followers:
            if next_depth < len(token_ids) and next_rank < token_ids.shape[1]:
                serial += 1
                path = chance * float(chances[next_depth, next_rank])
                heapq.heappush(found, (-path, serial, next_depth, next_rank, next_parent, chance))
    order = chain + sorted(set(range(len(nodes))) - set(chain))
    new = {old: index for index, old in enumerate(order)} | {-1: -1}
    return _draft([(nodes[old][0], new[nodes[old][1]], nodes[old][2]) for old in order])


def _draft(nodes: Sequence[tuple[int, int, float]]) -> Draft:
    tokens, parents, chances = zip(*nodes, strict=True)
    return Draft(
        np.array(tokens, np.int32),
        source=SOURCE,
        probabilities=np.array(chances),
        parents=None if parents == tuple(range(-1, len(parents) - 1)) else np.array(parents, np.int32),
    )
