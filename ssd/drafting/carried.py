"""What another source drafted, carried on by the first one: it looks up what goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ssd.drafting.grafting import Graft
from ssd.drafting.protocol import Draft, DraftRequest, Prices
from ssd.drafting.source import Source

_MOST_PREFIXES: Final = 5
_MOST_TOKENS: Final = 4
"""Tokens carried on behind each prefix: more of them crowd out better ones."""


def carry(
    first: Source, request: DraftRequest, prices: Prices, graft: Graft, draft: Draft, nodes: Sequence[int]
) -> None:
    """Add to ``graft`` what ``first`` drafts behind the beginnings of ``draft``, whose tokens are its ``nodes``.

    One call for all beginnings, each as if it were a request of its own that ends at once: what comes of it teaches
    nothing, as most go on from a wrong token. O(context) for one copy of it.
    """
    chain = [i for i in _likeliest(draft)[:_MOST_PREFIXES] if nodes[i] >= 0]
    length = len(request.context)
    chain = [i for depth, i in enumerate(chain, 1) if graft.chances[nodes[i]] > prices[0] and depth < request.limit]
    if not chain:
        return
    text = np.concatenate([request.context, draft.token_ids[chain]])
    behind = [
        DraftRequest(
            f"{request.request_id}\0{depth}",
            text[: length + depth],
            request.prompt_length,
            request.snapshot,
            min(_MOST_TOKENS, request.limit - depth),
            prices=prices / graft.chances[nodes[i]],
            tree=True,
            sampling=request.sampling,
            learned=request.learned,
            may_teach=request.may_teach,
        )
        for depth, i in enumerate(chain, 1)
    ]
    for each, i, found in zip(behind, chain, first.ask(behind), strict=True):
        graft.add(found, nodes[i])
        first.finish(each.request_id)


def _likeliest(draft: Draft) -> list[int]:
    """The first of the context's successors, the first of its own, and so on."""
    path, last = list[int](), -1
    for node, parent in enumerate(draft.parents_of_all()):
        if parent == last:
            path.append(node)
            last = node
    return path
