"""Sampling on a CPU: selects the token with the largest score plus keyed Gumbel noise after top-k, top-p and min-p.

A token is kept if fewer than top-k tokens, and less than top-p of the probability mass, have a higher score, and if
min-p allows its score. So tokens with the same score are kept or dropped together, and nothing needs to be sorted. The
search computes the argmax of score plus noise over a superset of the kept tokens. One sweep over the scores tells
whether this token is kept. If it is, it is the result. Otherwise no token with an equal or lower score is kept, so the
argmax is computed again among the tokens with higher scores. As in Hoare's selection (1961), each repetition has only
part of the mass left, so few are needed. Masses are integers, so that their sums are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.noise import GAMMA, UInt, UInt64, mix64
from ssd.jit.addresses import Float64s, Int64s, TokenIds, inlined, kernel
from ssd.token_rules import TokenRules

Float32s = npt.NDArray[np.float32]
Float = Any  # Numba's float32, for which Python has no type

LOWEST_TEMPERATURE = 1e-4
"""The lowest sampling temperature above 0 that is applied; lower temperatures are raised to this value.

Below 1e-4 sampling is indistinguishable from greedy decoding, and division by 1e-40, for example, overflows float32.
"""
MASS_OF_ONE = 2.0**40
"""The integer that stands for the probability of the most probable token when top-p adds up probabilities.

Probabilities are added up as integers, because the sum of integers does not depend on the order. The integer of another
token is proportional to its probability and rounded down. An int64 can hold the sum of 2^22 such integers.
"""

_BLOCK = 128
_DEPTHS = (3.0, 5.0, 7.0, 10.0, 16.0)
_FEW = 8
_LOWEST = np.float32(np.finfo(np.float32).min)
_BELOW = np.float32(2.0**-31 / 1.001)  # a margin for the rounding of float32
_ONE, _HALF, _PER_LOG = np.float32(1.0), np.float32(0.5), np.float32(1.0 / math.log(2.0))
_C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2.0) ** k / math.factorial(k)) for k in range(1, 7))
_NO_WEIGHT = np.float32(-80.0)


@kernel
def choose_rows(
    logits: Float32s, rows: Int64s, counts: Int64s, temperatures: Float32s, cuts: Float64s, keys: UInt64
) -> Int64s:
    """Sample one token at each position and return the token ids, int64[sum(counts)].

    The sampled token is the one with the largest sum of score and Gumbel noise among the tokens that top-k, top-p and
    min-p keep; of several such tokens, it is the one with the lowest id. NaN is never sampled. If no token is possible,
    the result is token 0. Usually O(V) per position.

    Args:
        logits: [B, T, V], -inf for tokens that are ruled out.
        rows: The rows to sample; results are in this order.
        counts: The number of positions to sample in each of ``rows``, beginning with the first position.
        temperatures: [R], > 0; scores are logits divided by the temperature.
        cuts: [R, 3]: top-k >= 1 (the vocabulary size keeps all tokens); top-p > 0 (1 keeps all tokens); and the
            logarithm of min-p, <= 0 (-inf keeps all tokens).
        keys: The noise keys, [sum(counts)].
    """
    vocab_size = logits.shape[2]
    chosen = np.zeros(len(keys), np.int64)
    scores, weights = np.empty(vocab_size, np.float32), np.empty(vocab_size, np.float32)
    found = np.empty(vocab_size, np.int32)
    place = 0
    for r in range(len(rows)):
        top_k, top_p = min(np.int64(cuts[r, 0]), vocab_size), cuts[r, 1]
        for t in range(counts[r]):
            highest = _divide(logits[rows[r], t], temperatures[r], scores)
            floor = highest + np.float32(cuts[r, 2])
            if not np.isfinite(highest):
                chosen[place] = _first_of(scores, highest)
            elif top_k == vocab_size and top_p >= 1.0 and floor == -np.inf:
                _weigh(scores, highest, weights)
                chosen[place] = _best_of_all(scores, weights, highest, keys[place])
            else:
                mass = _weigh(scores, highest, weights)
                chosen[place] = _best_kept(scores, weights, mass, highest, keys[place], top_k, top_p, floor, found)
            place += 1
    return chosen


@kernel
def masses_of(scores: Float32s) -> Int64s:
    """Return integers proportional to token probabilities, int64[rows, V], for top-p; the largest is `MASS_OF_ONE`."""
    num_rows, vocab_size = scores.shape
    masses, weights = np.empty((num_rows, vocab_size), np.int64), np.empty(vocab_size, np.float32)
    for row in range(num_rows):
        highest = _divide(scores[row], _ONE, weights)
        _weigh(scores[row], highest, weights)
        for token in range(vocab_size):
            masses[row, token] = _mass(weights[token])
    return masses


@inlined
def _divide(logits: Float32s, temperature: Float, scores: Float32s) -> Float:
    """Write ``logits / temperature`` to ``scores``, and return the highest score; NaN is ignored."""
    highest = np.float32(-np.inf)
    for start in range(0, len(logits), _BLOCK):
        block, divided = logits[start : start + _BLOCK], scores[start : start + _BLOCK]
        num_above = 0
        for i in range(len(block)):
            divided[i] = block[i] / temperature
            num_above += divided[i] > highest
        if num_above > 0:
            for i in range(len(block)):
                if divided[i] > highest:
                    highest = divided[i]
    return highest


@inlined
def _weigh(scores: Float32s, highest: Float, weights: Float32s) -> int:
    """Write exp(score - highest) of each token to ``weights``, and return the weights' sum as integers (for top-p).

    See `MASS_OF_ONE` for the integers. Weights below 2^-115 become 0: Gumbel noise of 53 random bits is never large
    enough for such a token to be sampled.
    """
    mass = 0
    for token in range(len(scores)):
        below = scores[token] - highest
        power = below * _PER_LOG
        whole = np.int32(power - _HALF)  # the nearest integer, because conversion truncates towards 0
        x = power - np.float32(whole)
        part = _ONE + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
        scale = np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)  # 2 to the power of ``whole``
        weight = part * scale if below > _NO_WEIGHT else np.float32(0.0)
        weights[token] = weight
        mass += _mass(weight)
    return mass


@inlined
def _mass(weight: Float) -> int:
    return np.int64(weight * np.float32(MASS_OF_ONE))  # type: ignore[return-value]


@inlined
def _first_of(scores: Float32s, value: Float) -> int:
    for token in range(len(scores)):
        if scores[token] == value:
            return token
    return 0


@inlined
def _noisy(score: Float, bits: UInt) -> float:
    """Return a token's score plus the Gumbel noise that `gumbel_noise` computes from the same 53 random ``bits``."""
    return np.float64(score) - np.log(-np.log((np.float64(bits) + 0.5) * 1.1102230246251565e-16))  # type: ignore[no-any-return]


@inlined
def _noise_lower_bound(z: UInt) -> Float:
    # A lower bound of 2^31 (1 - u), where u is the uniform number that 64 random bits stand for. It saves logarithms: a
    # token beats the best score b so far if -log(u) < exp(score - b), and -log(u) >= 1 - u. So a token for which 1 - u
    # is at least exp(score - b) cannot be the best, and for most tokens one hash and one comparison suffice.
    return np.float32(np.int32(0x7FFFFFFF) - np.int32(z >> np.uint64(33)))


@inlined
def _best_of_all(scores: Float32s, weights: Float32s, highest: Float, key: UInt) -> int:
    """Return the argmax of score plus Gumbel noise over all tokens; blocks that cannot contain it are skipped."""
    best, chosen, bar = -np.inf, 0, np.float32(0.0)
    for start in range(0, len(weights), _BLOCK):
        block = weights[start : start + _BLOCK]
        state = key + np.uint64(start + 1) * np.uint64(GAMMA)
        num_left = 0
        for i in range(len(block)):
            num_left += _noise_lower_bound(mix64(state + np.uint64(i) * np.uint64(GAMMA))) * bar <= block[i]
        if num_left == 0:
            continue
        for i in range(len(block)):
            z = mix64(state + np.uint64(i) * np.uint64(GAMMA))
            if block[i] == 0.0 or _noise_lower_bound(z) * bar > block[i]:
                continue
            score = _noisy(scores[start + i], z >> np.uint64(11))
            if score > best:
                best, chosen = score, start + i
                bar = np.float32(np.exp(best - highest)) * _BELOW
    return chosen


@inlined
def _best_kept(
    scores: Float32s,
    weights: Float32s,
    mass: int,
    highest: Float,
    key: UInt,
    top_k: int,
    top_p: float,
    floor: Float,
    found: TokenIds,
) -> int:
    """Return the token with the largest score plus Gumbel noise among the tokens that top-k, top-p and min-p keep."""
    is_top_k, is_top_p = top_k < len(scores), top_p < 1.0
    wanted = top_p * np.float64(mass)
    lowest = max(floor, _LOWEST) if not (is_top_k and is_top_p) else _LOWEST  # top-p is a share of top-k's mass
    num_found = 0
    for step in range(len(_DEPTHS) + 1):
        least = lowest
        if step < len(_DEPTHS) and (is_top_k or is_top_p):
            least = max(lowest, np.float32(highest - np.float32(_DEPTHS[step])))
        num_found = _find(scores, least, found)
        if least == lowest or (is_top_k and num_found >= top_k):
            break
        if is_top_p and not is_top_k and np.float64(_mass_of_found(weights, found, num_found)) >= wanted:
            break
    if is_top_k and is_top_p:
        wanted = top_p * np.float64(_mass_of_best(scores, weights, found, num_found, top_k))

    above = -np.inf
    token = -1
    if _FEW * num_found > len(scores):
        token = _best_of_all(scores, weights, highest, key)
    while True:
        if token < 0:
            token = _best_found(scores, weights, highest, key, found, num_found, above, floor)
        score, num_above, mass_above = scores[token], 0, 0
        for i in range(num_found):
            if scores[found[i]] > score:
                num_above += 1
                mass_above += _mass(weights[found[i]])
        is_kept = num_above < top_k and (not is_top_p or np.float64(mass_above) < wanted) and score >= floor
        if is_kept or score >= highest:
            return token
        above, token = score, -1


@inlined
def _find(scores: Float32s, least: Float, found: TokenIds) -> int:
    """Write the ids of all tokens with a score of at least ``least`` to ``found``, ascending; return their number."""
    num_found = 0
    for start in range(0, len(scores), _BLOCK):
        block = scores[start : start + _BLOCK]
        num_here = 0
        for i in range(len(block)):
            num_here += block[i] >= least
        if num_here == 0:
            continue
        for i in range(len(block)):
            if block[i] >= least:
                found[num_found] = start + i
                num_found += 1
    return num_found


@inlined
def _mass_of_found(weights: Float32s, found: TokenIds, num_found: int) -> int:
    mass = 0
    for i in range(num_found):
        mass += _mass(weights[found[i]])
    return mass


@inlined
def _mass_of_best(scores: Float32s, weights: Float32s, found: TokenIds, num_found: int, top_k: int) -> int:
    """Return the sum of the integers that stand for the probabilities of the ``top_k`` best tokens. O(num_found)."""
    if num_found <= top_k:
        return _mass_of_found(weights, found, num_found)
    among = np.empty(num_found, np.float32)
    for i in range(num_found):
        among[i] = scores[found[i]]
    last = np.partition(among, num_found - top_k)[num_found - top_k]
    mass, mass_of_last, num_above = 0, 0, 0
    for i in range(num_found):
        score, here = scores[found[i]], _mass(weights[found[i]])
        if score > last:
            mass += here
            num_above += 1
        elif score == last:
            mass_of_last = here
    return mass + (top_k - num_above) * mass_of_last


@inlined
def _best_found(
    scores: Float32s,
    weights: Float32s,
    highest: Float,
    key: UInt,
    found: TokenIds,
    num_found: int,
    above: float,
    floor: Float,
) -> int:
    """Return the argmax of score plus Gumbel noise over tokens in ``found`` with score > ``above`` and >= ``floor``."""
    best, chosen, bar = -np.inf, 0, np.float32(0.0)
    for i in range(num_found):
        token = int(found[i])
        score = scores[token]
        if not score > above or score < floor:
            continue
        z = mix64(key + np.uint64(token + 1) * np.uint64(GAMMA))
        if _noise_lower_bound(z) * bar > weights[token]:
            continue
        noisy = _noisy(score, z >> np.uint64(11))
        if noisy > best:
            best, chosen = noisy, token
            bar = np.float32(np.exp(best - highest)) * _BELOW
    return chosen


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRules:
    """A request's logit bias and allowed tokens as tensors for one vocabulary on one device; immutable."""

    bias_ids: torch.Tensor  # the token ids with a bias, int64[n]
    bias: torch.Tensor  # added to the tokens' logits, float32[n]
    allowed: Mask | None  # bool[V]; None: all tokens

    @classmethod
    def from_rules(cls, rules: TokenRules, vocab_size: int, device: torch.device) -> Self:
        """Return a request's logit bias and allowed tokens as tensors on ``device``; they are built once per request.

        Token ids outside the vocabulary are left out, because a draft model may have fewer tokens than the target.
        """
        key = (cls, vocab_size, device)
        if key not in rules.tensor_cache:
            within = rules.bias_ids < vocab_size
            rules.tensor_cache[key] = cls(
                torch.from_numpy(rules.bias_ids[within]).to(device),
                torch.from_numpy(rules.bias[within].astype(np.float32)).to(device),
                None if rules.allowed_ids is None else mask_of(rules.allowed_ids, vocab_size),
            )
        made: Self = rules.tensor_cache[key]
        return made

    def add_bias(self, logits: torch.Tensor) -> None:
        """Add the request's logit bias to every row of logits, [T, V], in place; the sum is computed in float32."""
        if len(self.bias_ids):
            logits[:, self.bias_ids] = (logits[:, self.bias_ids].float() + self.bias).to(logits.dtype)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """Return a mask of the vocabulary, bool[V], that is True at the ``token_ids``; ids outside V are ignored."""
    ids = np.fromiter(token_ids, np.int64)
    mask = np.zeros(vocab_size, np.bool_)
    mask[ids[ids < vocab_size]] = True
    return mask


def rule_out(scores: torch.Tensor, by_grammar: Mask | None, allowed: Mask | None, forbidden: Collection[int]) -> None:
    """Set the scores of tokens that the grammar, the allowed tokens or the forbidden tokens exclude to -inf, in place.

    The three rules are applied in this order. A rule that would exclude all tokens left by the previous rules is
    skipped, so that a token can still be sampled. ``scores`` is [V]. ``by_grammar`` and ``allowed`` are masks, bool[V],
    that are True for accepted tokens; None accepts all tokens.
    """
    rules = [mask for mask in (by_grammar, allowed) if mask is not None]
    if forbidden:
        rules.append(~mask_of(forbidden, len(scores)))
    left: Mask | None = None
    for rule in rules:
        both = rule if left is None else left & rule
        left = both if both.any() else left
    if left is not None:
        scores.masked_fill_(torch.from_numpy(~left).to(scores.device), float("-inf"))
