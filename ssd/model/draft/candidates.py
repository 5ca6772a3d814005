"""The most probable next tokens of a draft head or draft model, and the draft tree built from these tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.cost_model.throughput import cost_at
from ssd.drafting.noise import UInt64, gumbel_at
from ssd.drafting.protocol import Draft, SamplingContext
from ssd.jit.addresses import kernel
from ssd.model.cpu.cpu_sampling import LOWEST_TEMPERATURE
from ssd.model.sampling.target_tokens import has_rules, logits_with_rules

MAX_CANDIDATES = 32

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def best_candidates(
    logits: torch.Tensor, rows: Sequence[SamplingContext], draft_to_target: torch.Tensor | None, vocab_size: int
) -> tuple[Ints, Floats]:
    """Return the most probable next tokens of R requests, [R, M], and the probabilities that the target accepts them.

    The acceptance probabilities assume that the target predicts the same distribution as the draft network, whose
    ``logits`` are [R, Vd]. For a greedy request, a token's acceptance probability is its probability. For a sampled
    request, it is the probability that the target samples the token with its Gumbel noise, which is known in advance;
    the tokens are in descending order of score plus noise. Tokens that the request's rules exclude have probability 0.
    M is at most 32. ``draft_to_target`` is the target's id of each token of the draft vocabulary, int64[Vd]. If it is
    None, the ids are the same, and logits from ``vocab_size`` on are padding, which is left out.
    """
    if draft_to_target is None:
        logits = logits[:, :vocab_size]
    if any(has_rules(row) for row in rows):  # rules refer to the target's ids
        if draft_to_target is not None:
            whole = logits.new_full((len(rows), vocab_size), float("-inf"))
            whole[:, draft_to_target] = logits
            logits, draft_to_target = whole, None
        logits = logits_with_rules(logits[:, None], rows)[:, 0]
    scores = logits.float()
    is_sampled = np.array([not row.params.greedy for row in rows])
    if is_sampled.any():
        temperatures = [row.params.temperature if row.params.temperature > 0 else 1.0 for row in rows]
        scores = scores / torch.tensor(temperatures, device=scores.device).clamp_min(LOWEST_TEMPERATURE)[:, None]
    best = scores.topk(min(MAX_CANDIDATES, scores.shape[-1]))
    ids = best.indices if draft_to_target is None else draft_to_target[best.indices]
    token_ids: Ints = ids.cpu().numpy()
    logs: Floats = (best.values - scores.logsumexp(-1, keepdim=True)).double().cpu().numpy()
    if is_sampled.any():
        keys = np.array(
            [row.noise_keys()[0] if drawn else 0 for row, drawn in zip(rows, is_sampled, strict=True)], np.uint64
        )
        top_k = np.array([row.params.top_k if row.params.top_k > 0 else MAX_CANDIDATES for row in rows])
        top_p = np.array([row.params.top_p for row in rows])
        min_p = np.array([row.params.min_p for row in rows])
        _sort_candidates(token_ids, logs, is_sampled, keys, top_k, top_p, min_p)
    return token_ids, np.exp(logs)


@kernel
def _sort_candidates(
    token_ids: Ints,
    logs: Floats,
    is_sampled: npt.NDArray[np.bool_],
    keys: UInt64,
    top_k: Ints,
    top_p: Floats,
    min_p: Floats,
) -> None:
    """Sort the candidate tokens of sampled requests in place, in descending order of log-probability plus Gumbel noise.

    Log-probabilities are replaced by logarithms of acceptance probabilities. The maximum of all other tokens' scores
    plus noise is Gumbel distributed (Maddison et al. 2014, section 3). So a token with probability p and noise g is
    sampled with probability exp(-exp(-(log(p / (1 - p)) + g))). Tokens that top-k, top-p or min-p drop move to the end
    and get probability 0. O(R M^2) with a small M.
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


_MAX_LEAVES = 3  # the maximum number of leaves next to the chain's token at each depth


def build_draft(token_ids: Sequence[Ints], acceptance_probs: Sequence[Floats], costs: Floats, limit: int) -> Draft:
    """Return a draft tree: the chain of the best token at each depth, with other likely candidates as leaves.

    A candidate becomes a leaf if the probability that the target accepts the path to it exceeds the token cost. The
    chain comes before the leaves, because a draft may be cut at its end, and the most probable leaves come first.
    ``token_ids[i]`` are the candidates that follow the best tokens of depths 0 to i - 1, best first; ``costs`` is
    ``DraftRequest.token_costs``.
    """
    depth = min(len(token_ids), limit)
    leaves = []
    path = 1.0
    for i in range(depth):
        for rank in range(1, min(_MAX_LEAVES + 1, len(token_ids[i]))):
            probability = path * float(acceptance_probs[i][rank])
            if probability > cost_at(costs, depth):
                leaves.append((-probability, i, rank))
        path *= float(acceptance_probs[i][0])
    nodes = [(int(token_ids[i][0]), i - 1, float(acceptance_probs[i][0])) for i in range(depth)]
    for _probability, i, rank in sorted(leaves)[: limit - depth]:
        nodes.append((int(token_ids[i][rank]), i - 1, float(acceptance_probs[i][rank])))
    tokens, parents, acceptance_probs = zip(*nodes, strict=True)
    return Draft(
        np.array(tokens, np.int32),
        probabilities=np.array(acceptance_probs),
        parents=None if parents == tuple(range(-1, len(parents) - 1)) else np.array(parents, np.int32),
    )
