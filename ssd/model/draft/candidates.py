"""What a network drafts of what it says: the most promising tokens, and the tree that is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.cost_model.throughput import cost_at
from ssd.drafting.noise import UInt64, gumbel_at
from ssd.drafting.protocol import Draft, SamplingRow
from ssd.jit.addresses import kernel
from ssd.model.sampling.row_choice import LOWEST_TEMPERATURE
from ssd.model.sampling.target_tokens import is_ruled, with_prefix_rules

MOST_CANDIDATES = 32

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def candidates(
    logits: torch.Tensor, rows: Sequence[SamplingRow], draft_to_target: torch.Tensor | None, vocab_size: int
) -> tuple[Ints, Floats]:
    """The most promising tokens after the contexts of ``rows``, int64[R, M], that to draft first.

    And the chance that each comes if the target has the network's law, float64[R, M]: of greedy rows its probability,
    of sampled ones what the very noise that the target will draw with makes of that, by which they are ordered too; 0
    where the request's rules leave a token out. logits : [R, Vd]. draft_to_target : the target's id of each token that
    is scored, int64[Vd]; None where those are its own, of which those from ``vocab_size`` on are left out.
    """
    if draft_to_target is None:
        logits = logits[:, :vocab_size]
    if any(is_ruled(row) for row in rows):  # rules go by the target's ids
        if draft_to_target is not None:
            whole = logits.new_full((len(rows), vocab_size), float("-inf"))
            whole[:, draft_to_target] = logits
            logits, draft_to_target = whole, None
        logits = with_prefix_rules(logits[:, None], rows)[:, 0]
    scores = logits.float()
    is_sampled = np.array([not row.params.greedy for row in rows])
    if is_sampled.any():
        temperatures = [row.params.temperature if row.params.temperature > 0 else 1.0 for row in rows]
        scores = scores / torch.tensor(temperatures, device=scores.device).clamp_min(LOWEST_TEMPERATURE)[:, None]
    best = scores.topk(min(MOST_CANDIDATES, scores.shape[-1]))
    ids = best.indices if draft_to_target is None else draft_to_target[best.indices]
    token_ids: Ints = ids.cpu().numpy()
    logs: Floats = (best.values - scores.logsumexp(-1, keepdim=True)).double().cpu().numpy()
    if is_sampled.any():
        keys = np.array(
            [row.noise_keys()[0] if drawn else 0 for row, drawn in zip(rows, is_sampled, strict=True)], np.uint64
        )
        top_k = np.array([row.params.top_k if row.params.top_k > 0 else MOST_CANDIDATES for row in rows])
        top_p = np.array([row.params.top_p for row in rows])
        min_p = np.array([row.params.min_p for row in rows])
        _favour(token_ids, logs, is_sampled, keys, top_k, top_p, min_p)
    return token_ids, np.exp(logs)


@kernel
def _favour(
    token_ids: Ints, logs: Floats, is_sampled: npt.NDArray[np.bool_], keys: UInt64,
    top_k: Ints, top_p: Floats, min_p: Floats,
) -> None:  # fmt: skip
    """Bring the candidates of sampled rows, which come by probability, into the order of their noisy scores, in place.

    What top-k, top-p and min-p rule out goes to the end, with no chance. The greatest score of all others is Gumbel
    distributed (Maddison et al. 2014, section 3): so with probability p and noise g a token comes with the chance
    exp(-exp(-(log(p / (1 - p)) + g))). O(R M^2): M is small.
    """
    num_rows, most = token_ids.shape
    noisy = np.empty(most)
    for row in range(num_rows):
        if not is_sampled[row]:
            continue
        key, before = keys[row], 0.0
        for i in range(most):
            chance = math.exp(logs[row, i])
            is_kept = i == 0 or (
                i < top_k[row] and before < top_p[row] and chance >= min_p[row] * math.exp(logs[row, 0])
            )
            before += chance
            if not is_kept:
                logs[row, i] = -np.inf
            noisy[i] = logs[row, i] + gumbel_at(key, token_ids[row, i])
        for i in range(1, most):
            score, token, log, place = noisy[i], token_ids[row, i], logs[row, i], i
            while place > 0 and noisy[place - 1] < score:
                noisy[place], token_ids[row, place] = noisy[place - 1], token_ids[row, place - 1]
                logs[row, place] = logs[row, place - 1]
                place -= 1
            noisy[place], token_ids[row, place], logs[row, place] = score, token, log
        for i in range(most):
            logs[row, i] = math.expm1(logs[row, i]) * math.exp(-noisy[i]) if noisy[i] > -np.inf else -np.inf


_SIBLINGS = 3
"""Most tokens proposed beside that of the chain at any depth."""


def comb(token_ids: Sequence[Ints], chances: Sequence[Floats], token_costs: Floats, limit: int) -> Draft:
    """The chain of the first candidates, with the next ones of each depth as leaves where they may pay.

    token_ids, chances : of each depth the candidates, int64[M] and float64[M], after the first of the depth before.
    token_costs : as ``DraftRequest.token_costs``. limit : most tokens in all. The chain comes first, so that a draft
    that is cut keeps it; then the leaves, the likeliest first.
    """
    depth = min(len(token_ids), limit)
    leaves = []
    path = 1.0
    for i in range(depth):
        for rank in range(1, min(_SIBLINGS + 1, len(token_ids[i]))):
            chance = path * float(chances[i][rank])
            if chance > cost_at(token_costs, depth):
                leaves.append((-chance, i, rank))
        path *= float(chances[i][0])
    nodes = [(int(token_ids[i][0]), i - 1, float(chances[i][0])) for i in range(depth)]
    for _chance, i, rank in sorted(leaves)[: limit - depth]:
        nodes.append((int(token_ids[i][rank]), i - 1, float(chances[i][rank])))
    tokens, parents, chances = zip(*nodes, strict=True)
    return Draft(
        np.array(tokens, np.int32),
        probabilities=np.array(chances),
        parents=None if parents == tuple(range(-1, len(parents) - 1)) else np.array(parents, np.int32),
    )
