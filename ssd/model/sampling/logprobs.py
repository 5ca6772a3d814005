"""Log-probabilities of tokens as the model gives them, before any sampling rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot spell; vLLM's number."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token and what else could have stood there.

    ``rank`` : 1 for the most probable token. ``top`` : (token id, log-probability) of the most probable tokens, best
    first; it need not hold the token itself.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """What the model thought of each token at its position.

    logits : [>= n, V] of any float type, row i predicts token i; must not have been changed by sampling rules.
    token_ids : n tokens. Probabilities are of a float32 softmax over the whole vocabulary. O(n V).
    """
    if not len(token_ids):
        return ()
    logprobs = torch.log_softmax(logits[: len(token_ids)].float(), -1).clamp_min(LOWEST_LOGPROB)
    ids = torch.tensor(list(token_ids), device=logprobs.device)[:, None]
    chosen = logprobs.gather(-1, ids)
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    best = torch.topk(logprobs, min(num_top, logprobs.shape[-1]))
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return tuple(map(TokenLogprobs, token_ids, chosen[:, 0].tolist(), ranks, tops))
