"""Keyed Gumbel noise, functions that sample tokens or find the most probable ones, and the output of a forward pass."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise import GAMMA, MIX_1, MIX_2, UInt64
from ssd.drafting.token_recycling import TOP_K
from ssd.errors import first_line
from ssd.jit.addresses import Int64s, TokenIds, inlined, kernel
from ssd.model.cpu.cpu_argmax import cpu_argmax
from ssd.model.cpu.cpu_sampling import LOWEST_TEMPERATURE, choose_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """The keys of the Gumbel noise with which a forward pass samples tokens on the device, and the temperatures."""

    keys: UInt64  # uint64[B, T], from `SequenceNoise.keys`
    temperatures: npt.NDArray[np.float32]  # [B, T]; 0 selects the most probable token


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the Gumbel noise of every token of the vocabulary for each noise key, float64[..., vocab_size].

    The noise is ``-log(-log(u))`` with u = (k + 1/2) / 2**53, where k is the upper 53 bits of a hash of key and token.
    So u is never 0 or 1. ``keys`` are those of `SequenceNoise.keys` as int64[...]; the result is on the same device.
    """
    counter = torch.arange(1, vocab_size + 1, device=keys.device)
    z = keys[..., None] + counter * _signed(GAMMA)  # int64 wraps as uint64 does
    z = (z ^ _shift_right(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX_2)
    z = z ^ _shift_right(z, 31)
    uniform = (_shift_right(z, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def noisy_scores(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return logits / temperature + Gumbel noise, float64[N, V]; the token with the highest score is sampled.

    Requests must have no other sampling parameters. ``logits`` is [N, V] of any float dtype, ``keys`` are those of
    `SequenceNoise.keys` as int64[N]. At temperature 0 the logits themselves are returned, i.e. greedy decoding.
    """
    scores = logits.float() / temperatures.clamp_min(LOWEST_TEMPERATURE)[:, None]
    noisy = scores.double() + gumbel_noise(keys, logits.shape[-1])
    return torch.where(temperatures[:, None] > 0, noisy, logits.double())


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift 64-bit integers right and fill with zeros; torch's own shift would repeat the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


Sampler = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function that samples one token per row: the token with the highest of `noisy_scores`. The arguments are logits,
noise keys and temperatures; the result is int64[N].
"""

_MAX_ERROR = 1e-12  # the maximum relative error of float64 scores: the error of two logarithms

_PROBE_ROWS, _PROBE_TOKENS = 24, 5000


@cache
def select_sampler(device: torch.device) -> Sampler | None:
    """Return SSD's Triton sampling kernel if it passes a test on this GPU; None if torch must sample."""
    if device.type != "cuda":
        return None
    try:
        from ssd.model.triton.triton_sampling import triton_sampler
    except ImportError:  # triton comes with CUDA builds of torch
        return None
    return triton_sampler if is_sampler_correct(triton_sampler, device) else None


def is_sampler_correct(sampler: Sampler, device: torch.device) -> bool:
    """Return whether a sampling kernel agrees with `noisy_scores` on random logits; log a warning if it does not."""
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(0, 3, (_PROBE_ROWS, _PROBE_TOKENS)).astype(np.float32))
    keys = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, _PROBE_ROWS)).to(device)
    heat = torch.from_numpy(random.choice(np.array([0, 1e-6, 0.7, 1, 9], np.float32), _PROBE_ROWS)).to(device)
    try:
        for dtype in (torch.float32, torch.float16):
            cast = logits.to(device, dtype)
            check_tokens(sampler(cast, keys, heat), cast, keys, heat)
    # The driver or the compiler may fail; torch's operations are right in any case.
    except Exception as failure:
        log.warning("tokens are sampled by torch, because the Triton kernel failed: %s", first_line(failure))
        log.debug("the Triton sampling kernel failed", exc_info=True)
        return False
    return True


def check_tokens(tokens: torch.Tensor, logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Raise ValueError if a token does not have the highest of `noisy_scores` in its row, up to rounding."""
    scores = noisy_scores(logits, keys, temperatures)
    best, found = scores.amax(-1), scores.gather(-1, tokens[:, None])[:, 0]
    is_right = best - found <= _MAX_ERROR * (1 + best.abs())
    if not bool(is_right.all()):
        raise ValueError(f"{int((~is_right).sum())} of {len(tokens)} sampled tokens differ from the reference")


_AS_IT_IS = [SamplingParams()]


def greedy_tokens(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the token with the highest logit, int64[...], for logits [..., V]; the first one if logits are equal.

    NaN counts as the highest value.
    """
    if logits.device.type == "cpu":
        return cpu_argmax(logits)
    best: npt.NDArray[np.int64] = logits.argmax(-1).cpu().numpy()
    return best


def argmax_with_noise(scores: torch.Tensor, keys: UInt64) -> npt.NDArray[np.int64]:
    """Sample one token per row from softmax(scores): the argmax of scores plus Gumbel noise, int64[N].

    If several tokens have the largest sum, the first one is returned. ``scores`` is float32[N, V] with -inf for tokens
    that are ruled out and at least one finite score per row; ``keys`` is uint64[N].
    """
    if scores.device.type != "cpu":
        on_device = torch.from_numpy(keys.view(np.int64)).to(scores.device)
        best: npt.NDArray[np.int64] = device_argmax(scores, on_device, select_sampler(scores.device)).cpu().numpy()
        return best
    scores = scores.contiguous()[None]
    return host_tokens(scores, [0], [scores.shape[1]], _AS_IT_IS, np.ascontiguousarray(keys))


def device_argmax(scores: torch.Tensor, keys: torch.Tensor, sampler: Sampler | None) -> torch.Tensor:
    """Sample one token per row from softmax(scores) on the device, int64[N], as `argmax_with_noise` does.

    ``sampler`` is the kernel that samples; None uses torch. ``keys`` are uint64 numbers, stored as int64[N].
    """
    if sampler is None:
        return (scores.double() + gumbel_noise(keys, scores.shape[-1])).argmax(-1)
    return sampler(scores, keys, torch.ones(len(scores), device=scores.device))


_ALL_TOKENS = float(1 << 62)
_LOWEST = float(np.float32(LOWEST_TEMPERATURE))


def host_tokens(
    logits: torch.Tensor, rows: Sequence[int], counts: Sequence[int], params: Sequence[SamplingParams], keys: UInt64
) -> npt.NDArray[np.int64]:
    """Sample tokens on a CPU with temperature, top-k, top-p, min-p and Gumbel noise, int64[sum(counts)].

    A token has the highest sum of `truncated_scores` and noise; if sums are equal, the first one is returned.
    ``params`` are the sampling parameters of the requests in ``rows``, with temperature > 0. See `choose_rows` for the
    other arguments. Usually O(V) per position.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        logits = logits[list(rows), : max(counts)].float()
        rows = range(len(rows))
    return choose_rows(
        logits.numpy(),
        np.array(rows, np.int64),
        np.array(counts, np.int64),
        np.array([max(p.temperature, _LOWEST) for p in params], np.float32),
        np.array([(p.top_k if p.top_k > 0 else _ALL_TOKENS, p.top_p, log_min_p(p)) for p in params]),
        keys,
    )


def log_min_p(params: SamplingParams) -> float:
    """Return the logarithm of min-p, or -inf without min-p.

    Min-p drops tokens whose log-probability is lower than the highest one plus this number.
    """
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


Float32s = npt.NDArray[np.float32]
# The ids of the most probable tokens in descending order, int32[B, T, TOP_K], -1 if there are no more; and their
# logits, float32.
TopTokens = tuple[TokenIds, Float32s]
Counts = Sequence[int] | npt.NDArray[np.int64]  # the number of positions of each row

_BLOCK = 128


def top_tokens(logits: torch.Tensor, counts: Counts) -> TopTokens:
    """Return the 8 (`TOP_K`) most probable tokens and their logits at the first ``counts[b]`` positions of each row b.

    ``logits`` is [B, T, V]. Tokens with logits of NaN or -inf are left out. On a CPU, a kernel that is faster than
    torch's argmax returns tokens with equal logits in order of their ids. On other devices their order is arbitrary.
    """
    if logits.device.type != "cpu":
        return unpack_top(packed_top(logits))
    shape = (*logits.shape[:2], TOP_K)
    ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
    _sweep(logits.float().contiguous().numpy(), np.asarray(counts, np.int64), ids, values)
    return ids, values


@cache
def _top_of(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if select_sampler(device) is None:
        return None
    from ssd.model.triton.triton_sampling import triton_top

    return triton_top


def packed_top(logits: torch.Tensor) -> torch.Tensor:
    """Return the ids and logits of the most probable tokens in one tensor on the device, int32[..., 2, TOP_K].

    So one copy brings both to the host. ``logits`` is [..., V]; the returned logits are the bits of float32 numbers.
    Does not synchronise with the device.
    """
    if (own := _top_of(logits.device)) is not None:
        return own(logits)
    best = torch.topk(logits, min(TOP_K, logits.shape[-1]))
    values = best.values.float()
    ids = torch.where(values > float("-inf"), best.indices, -1).int()
    missing = TOP_K - ids.shape[-1]
    if missing:
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
    return torch.stack([ids, values.view(torch.int32)], -2)


def unpack_top(packed: torch.Tensor) -> TopTokens:
    """Copy the result of `packed_top` to the host: the most probable tokens and their logits. Waits for the device."""
    both = packed.cpu().numpy()
    return np.ascontiguousarray(both[..., 0, :]), np.ascontiguousarray(both[..., 1, :]).view(np.float32)


@inlined
def _sweep_row(logits: Float32s, ids: TokenIds, values: Float32s) -> None:
    """Write the most probable tokens of one row of logits to ``ids`` and ``values``.

    Blocks of 128 logits that contain none of these tokens are skipped with a vectorised comparison.
    """
    least = np.float32(-np.inf)
    for start in range(0, len(logits), _BLOCK):
        block = logits[start : start + _BLOCK]
        num_above = 0
        for i in range(len(block)):  # by index, because a loop over values is not vectorised
            num_above += block[i] > least
        if num_above == 0:
            continue
        for i in range(len(block)):
            if not block[i] > least:
                continue
            place = TOP_K - 1
            while place > 0 and values[place - 1] < block[i]:
                values[place], ids[place] = values[place - 1], ids[place - 1]
                place -= 1
            values[place], ids[place] = block[i], start + i
            least = values[TOP_K - 1]


@kernel
def _sweep(logits: Float32s, counts: Int64s, ids: TokenIds, values: Float32s) -> None:
    ids[:], values[:] = -1, -np.inf
    for b in range(len(counts)):
        for t in range(counts[b]):
            _sweep_row(logits[b, t], ids[b, t], values[b, t])


LOWEST_LOGPROB = -9999.0
"""The log-probability that replaces minus infinity, which JSON cannot represent; vLLM uses the same number."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token, and the most probable alternatives to the token."""

    token_id: int
    logprob: float
    rank: int  # 1 for the most probable token
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first; may lack the token itself


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probability, rank and most probable alternatives of each of n generated tokens.

    ``logits`` is [>= n, V], before penalties and other sampling rules; row i predicts token i. The probabilities are a
    float32 softmax over the whole vocabulary. O(n V).
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


def _start_copy_to_host(given: torch.Tensor | None) -> torch.Tensor | None:
    if given is None:
        return None
    return torch.empty(given.shape, dtype=given.dtype, pin_memory=given.is_cuda).copy_(given, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """The logits of a forward pass and the tokens that it sampled, valid only until the target's next forward pass."""

    logits: torch.Tensor  # [B, T, V], any float dtype; [b, t] predicts the token after the t-th input token of row b
    sampled: torch.Tensor | None = None  # int64[B, T]: by ``noise``, else the most probable tokens
    noise: Noise | None = None
    packed_top: torch.Tensor | None = None  # see `packed_top`; None: the pass did not search for them
    copied: torch.cuda.Event | None = None  # an event, recorded when the tokens are on the host

    def start_copy_to_host(self) -> PassOutput:
        """Start a copy of the sampled tokens to host memory, so that the next forward pass may overwrite the originals.

        Returns an output with the copied tokens and without logits. Call its method `wait` before reading the tokens.
        """
        sampled, top = _start_copy_to_host(self.sampled), _start_copy_to_host(self.packed_top)
        copied = self.copied
        if self.logits.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self.logits.device))  # the thread's current device may differ
        return PassOutput(self.logits[:, :, :0], sampled, self.noise, top, copied)

    def wait(self) -> None:
        """Wait until the tokens of an output of `start_copy_to_host` have arrived on the host."""
        if self.copied is not None:
            self.copied.synchronize()

    def top(self, counts: Counts) -> TopTokens:
        """Return the most probable tokens at the first ``counts[b]`` positions of each row b. O(positions V)."""
        return top_tokens(self.logits, counts) if self.packed_top is None else unpack_top(self.packed_top)

    def row(self, b: int) -> PassOutput:
        rows = slice(b, b + 1)
        return PassOutput(
            self.logits[rows],
            None if self.sampled is None else self.sampled[rows],
            None if self.noise is None else Noise(self.noise.keys[rows], self.noise.temperatures[rows]),
            None if self.packed_top is None else self.packed_top[rows],
        )
