"""Slow twins of the target's arithmetic: plain Python, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ssd.config import SamplingParams
from tests.reference.noise import gumbel


def allowed_tokens(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Tokens that temperature, top-k, top-p and min-p leave, with their scores (logit / temperature)."""
    scores = {token: logit / params.temperature for token, logit in enumerate(logits)}
    ranked = sorted(scores, key=lambda token: -scores[token])
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    highest = scores[ranked[0]]
    total = sum(math.exp(scores[token] - highest) for token in ranked)
    last, mass = ranked[0], 0.0
    for token in ranked:
        if mass >= params.top_p:
            break
        last = token
        mass += math.exp(scores[token] - highest) / total
    kept = [token for token in scores if scores[token] >= scores[last]]  # with all that tie
    if params.min_p > 0:
        kept = [token for token in kept if scores[token] >= highest + math.log(params.min_p)]
    return {token: scores[token] for token in kept}


def token_at(logits: Sequence[float], params: SamplingParams, key: int) -> int:
    """The token that the noise of a key picks."""
    if params.greedy:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    scores = {token: score + gumbel(key, token) for token, score in allowed_tokens(logits, params).items()}
    return max(scores, key=lambda token: (scores[token], -token))


def logprobs(logits: Sequence[float]) -> list[float]:
    """Log of the softmax."""
    highest = max(logits)
    whole = highest + math.log(sum(math.exp(logit - highest) for logit in logits))
    return [logit - whole for logit in logits]


def penalised(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop: Sequence[int]
) -> list[float]:
    """Logits after bias, penalties and what is ruled out, for one position whose output so far is ``output``."""
    scores = list(logits)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in range(len(scores)):
        if params.repetition_penalty != 1.0 and (token in prompt or token in output):
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = list(output).count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    left = set(range(len(scores)))
    if params.allowed_token_ids is not None:
        left &= set(params.allowed_token_ids)
    weaker = {
        word[-1]
        for word in params.bad_words
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) and len(word) <= len(output) + 1
    }
    if len(output) < params.min_tokens:
        weaker |= set(stop)
    left = left - weaker or left
    return [score if token in left else -math.inf for token, score in enumerate(scores)]


def exact_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of the next token, float64[V]."""
    allowed = allowed_tokens(list(map(float, logits)), params)
    law = np.zeros(len(logits))
    highest = max(allowed.values())
    for token, score in allowed.items():
        law[token] = math.exp(score - highest)
    return law / law.sum()
