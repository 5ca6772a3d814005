"""Sampling noise that is a pure function of (seed, choice, position, token id), and of the stream it is drawn for.

Nothing is drawn from a stateful generator, so a token does not depend on how many tokens were drafted before it, on
the batch it ran in or on the steps it took: speculation on and off give the same tokens for the same seed.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 15):
its state is a counter, so its n-th output is ``mix(key + (n + 1) * GAMMA)`` at once. The key of a position is
derived from seed, choice and position by the same mixing function.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ssd.retrieval.memory import kernel

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

UInt64 = npt.NDArray[np.uint64]

CHOICE, DRAFT, ACCEPT, RECOVER = range(4)
"""Independent streams of one request: the target's own choices; and where drafts are verified by rejection, what the
draft model draws, whether a token is accepted, and what replaces a rejected one."""


def _mix(z: UInt64) -> UInt64:
    """SplitMix64's output function, elementwise."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def position_keys(seed: int, choice_index: int, positions: npt.NDArray[np.int64], stream: int = CHOICE) -> UInt64:
    """One generator key per absolute position: uint64, the shape of ``positions``."""
    gamma = np.uint64(_GAMMA)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        key = _mix(np.full(positions.shape, seed & 0xFFFFFFFFFFFFFFFF, np.uint64) + gamma)
        key = _mix((key ^ np.uint64(choice_index | stream << 32)) + gamma)
        return _mix((key ^ positions.astype(np.uint64)) + gamma)


def uniform_noise(keys: UInt64) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each key: float64, the shape of ``keys``."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + np.uint64(_GAMMA)) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary at each key, on the keys' device.

    keys : int64[...], the bits of ``position_keys``. Returns float64[..., vocab_size].

    ``-log(-log(u))`` with u = (k + 1/2) / 2**53, k the upper 53 bits: never 0 or 1.
    """
    counter = torch.arange(1, vocab_size + 1, device=keys.device)
    z = keys[..., None] + counter * _signed(_GAMMA)  # int64 wraps as uint64 does
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift_right(z, 31)
    uniform = (_shift_right(z, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def argmax_with_noise(scores: torch.Tensor, keys: UInt64) -> npt.NDArray[np.int64]:
    """The token of each row with the largest score after Gumbel noise: a sample of softmax(scores).

    scores : float32[N, V], -inf where a token is ruled out; at least one is finite in each row.
    keys : uint64[N]. Returns int64[N]; the first of equals.
    """
    if scores.device.type != "cpu":
        noise = gumbel_noise(torch.from_numpy(keys.view(np.int64)).to(scores.device), scores.shape[-1])
        best: npt.NDArray[np.int64] = (scores.double() + noise).argmax(-1).cpu().numpy()
        return best
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    chosen: npt.NDArray[np.int64] = _argmax_with_noise(
        scores.contiguous().numpy(), weights.numpy(), highest[:, 0].double().numpy(), np.ascontiguousarray(keys)
    )
    return chosen


@kernel
def _argmax_with_noise(
    scores: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    highest: npt.NDArray[np.float64],
    keys: UInt64,
) -> npt.NDArray[np.int64]:  # pragma: no cover - compiled
    """Same result as ``(scores + gumbel_noise).argmax(-1)`` with logarithms for a few tokens only.

    Token i beats the best score b so far when -log(u) < exp(score_i - b). As -log(u) >= 1 - u, no token with
    1 - u >= exp(score_i - b) can: the common case is a hash and a comparison (with a margin for float32 rounding).
    """
    num_rows, vocab_size = scores.shape
    chosen = np.zeros(num_rows, np.int64)
    for row in range(num_rows):
        best = -np.inf
        bar = 0.0  # exp(best - highest)
        state = keys[row]
        for token in range(vocab_size):
            state += np.uint64(_GAMMA)
            weight = weights[row, token]
            if weight == 0.0:
                continue
            z = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
            bits = np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) + 0.5
            if (9007199254740992.0 - bits) * 1.1102230246251565e-16 * bar > weight * 1.001:
                continue
            score = np.float64(scores[row, token]) - np.log(-np.log(bits * 1.1102230246251565e-16))
            if score > best:
                best = score
                bar = np.exp(best - highest[row])
                chosen[row] = token
    return chosen


def _signed(constant: int) -> int:
    """A 64-bit pattern as the signed integer that torch wants."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
