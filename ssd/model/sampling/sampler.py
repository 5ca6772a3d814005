"""Noise at keys, the kernels that sample tokens and find the most probable ones, and what a pass gives out."""

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
from ssd.model.sampling.row_choice import LOWEST_TEMPERATURE, choose_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """What a pass needs to choose tokens itself.

    ``keys`` : uint64[B, T], of `SequenceNoise.keys`. ``temperatures`` : float32[B, T], 0 where the most probable token
    is to be chosen.
    """

    keys: UInt64
    temperatures: npt.NDArray[np.float32]


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary at each key, on the keys' device.

    keys : int64[...], the bits of `SequenceNoise.keys`. Returns float64[..., vocab_size].

    ``-log(-log(u))`` with u = (k + 1/2) / 2**53, k the upper 53 bits: never 0 or 1.
    """
    counter = torch.arange(1, vocab_size + 1, device=keys.device)
    z = keys[..., None] + counter * _signed(GAMMA)  # int64 wraps as uint64 does
    z = (z ^ _shift_right(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX_2)
    z = z ^ _shift_right(z, 31)
    uniform = (_shift_right(z, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def noisy_scores(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """What a token is chosen by where nothing but a temperature is asked for: its argmax is the token.

    logits : [N, V], any float type. keys : int64[N], the bits of `SequenceNoise.keys`. temperatures : float32[N], 0
    where the logits themselves decide. Returns float64[N, V].
    """
    scores = logits.float() / temperatures.clamp_min(LOWEST_TEMPERATURE)[:, None]
    noisy = scores.double() + gumbel_noise(keys, logits.shape[-1])
    return torch.where(temperatures[:, None] > 0, noisy, logits.double())


def _signed(constant: int) -> int:
    """A 64-bit pattern as the signed integer that torch wants."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


Sampler = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [N, V], keys int64[N] and temperatures float32[N] to tokens int64[N]: the argmax of `noisy_scores`."""

_MOST_ERROR = 1e-12
"""Relative, of float64 scores: what two logarithms may differ by."""

_PROBE_ROWS, _PROBE_TOKENS = 24, 5000


@cache
def sampler_of(device: torch.device) -> Sampler | None:
    """Our kernel on CUDA, where triton is installed and it runs; None where torch's operations must do."""
    if device.type != "cuda":
        return None
    try:
        from ssd.model.sampling.triton_sampling import triton_sampler
    except ImportError:  # it comes with CUDA builds of torch
        return None
    return triton_sampler if samples_rightly(triton_sampler, device) else None


def samples_rightly(sampler: Sampler, device: torch.device) -> bool:
    """Whether ``sampler`` runs on the device and chooses among random logits as the formula does; a warning if not."""
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(0, 3, (_PROBE_ROWS, _PROBE_TOKENS)).astype(np.float32))
    keys = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, _PROBE_ROWS)).to(device)
    heat = torch.from_numpy(random.choice(np.array([0, 1e-6, 0.7, 1, 9], np.float32), _PROBE_ROWS)).to(device)
    try:
        for dtype in (torch.float32, torch.float16):
            cast = logits.to(device, dtype)
            check_tokens(sampler(cast, keys, heat), cast, keys, heat)
    # A driver or a compiler that does not play along: torch's operations are right in any case.
    except Exception as failure:
        log.warning("tokens are sampled by torch: %s", first_line(failure))
        log.debug("tokens are sampled by torch", exc_info=True)
        return False
    return True


def check_tokens(tokens: torch.Tensor, logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Raise ValueError unless each token is the formula's, or scores as much but for rounding."""
    scores = noisy_scores(logits, keys, temperatures)
    best, found = scores.amax(-1), scores.gather(-1, tokens[:, None])[:, 0]
    is_right = best - found <= _MOST_ERROR * (1 + best.abs())
    if not bool(is_right.all()):
        raise ValueError(f"{int((~is_right).sum())} of {len(tokens)} tokens are not those of logits and noise")


_AS_IT_IS = [SamplingParams()]


def argmax_with_noise(scores: torch.Tensor, keys: UInt64) -> npt.NDArray[np.int64]:
    """The token of each row with the largest score after Gumbel noise: a sample of softmax(scores).

    scores : float32[N, V], -inf where a token is ruled out; at least one is finite in each row.
    keys : uint64[N]. Returns int64[N]; the first of equals.
    """
    if scores.device.type != "cpu":
        on_device = torch.from_numpy(keys.view(np.int64)).to(scores.device)
        best: npt.NDArray[np.int64] = device_argmax(scores, on_device, sampler_of(scores.device)).cpu().numpy()
        return best
    scores = scores.contiguous()[None]
    return host_tokens(scores, [0], [scores.shape[1]], _AS_IT_IS, np.ascontiguousarray(keys))


def device_argmax(scores: torch.Tensor, keys: torch.Tensor, sampler: Sampler | None) -> torch.Tensor:
    """As `argmax_with_noise`, by ``sampler`` or else by torch's operations: int64[N]. keys : int64[N], their bits."""
    if sampler is None:
        return (scores.double() + gumbel_noise(keys, scores.shape[-1])).argmax(-1)
    return sampler(scores, keys, torch.ones(len(scores), device=scores.device))


_ALL_TOKENS = float(1 << 62)
_LOWEST = float(np.float32(LOWEST_TEMPERATURE))


def host_tokens(
    logits: torch.Tensor, rows: Sequence[int], counts: Sequence[int], params: Sequence[SamplingParams], keys: UInt64
) -> npt.NDArray[np.int64]:
    """The argmax of `truncated_scores` and the noise of each key, of equals the first: int64[sum(counts)].

    logits : [B, T, V], any float type, on a CPU. Of row ``rows[r]`` the first ``counts[r]`` positions, under
    ``params[r]`` (temperature > 0). keys : uint64[sum(counts)]. O(V) for a position as a rule.
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
    """How far below the highest a score may be; -inf where there is no such bound."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


Float32s = npt.NDArray[np.float32]
TopTokens = tuple[TokenIds, Float32s]
"""int32[B, T, TOP_K], the most probable first, -1 where no more are possible; and their logits, float32."""

_BLOCK = 128


def top_tokens(logits: torch.Tensor, counts: Sequence[int]) -> TopTokens:
    """The most probable tokens at the first ``counts[b]`` positions of each row of logits, [B, T, V].

    Logits of any float type; NaN and -inf are never among them. Of equals the lower id comes first on a CPU, elsewhere
    any does. On a CPU one sweep that costs less than torch's argmax; elsewhere torch's top-k and one copy to the host.
    """
    if logits.device.type != "cpu":
        return unpacked(packed_top(logits))
    shape = (*logits.shape[:2], TOP_K)
    ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
    _sweep(logits.float().contiguous().numpy(), np.asarray(counts, np.int64), ids, values)
    return ids, values


@cache
def _top_of(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Our kernel, where tokens are sampled by the one beside it."""
    if sampler_of(device) is None:
        return None
    from ssd.model.sampling.triton_sampling import triton_top

    return triton_top


def packed_top(logits: torch.Tensor) -> torch.Tensor:
    """Ids and the bits of float32 logits in one tensor of the same device, int32[..., 2, TOP_K]; no waiting.

    logits : [..., V].
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


def unpacked(packed: torch.Tensor) -> TopTokens:
    """What `packed_top` made of [B, T, V], on the host: waits for the device."""
    both = packed.cpu().numpy()
    return np.ascontiguousarray(both[..., 0, :]), np.ascontiguousarray(both[..., 1, :]).view(np.float32)


@inlined
def _sweep_row(logits: Float32s, ids: TokenIds, values: Float32s) -> None:
    """Most blocks hold nothing above the least token kept: of them no more is asked, many numbers at a time."""
    least = np.float32(-np.inf)
    for start in range(0, len(logits), _BLOCK):
        block = logits[start : start + _BLOCK]
        num_above = 0
        for i in range(len(block)):  # by index: a loop over values is not compiled to compare many at a time
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


def _on_host(given: torch.Tensor | None) -> torch.Tensor | None:
    """A copy, which a device may not have made yet."""
    if given is None:
        return None
    return torch.empty(given.shape, dtype=given.dtype, pin_memory=given.is_cuda).copy_(given, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """Logits of a pass and, where it chose tokens itself, those. Valid until the next pass of the same target.

    ``logits`` : [B, T, V], any float type; ``[b, t]`` predicts the token after the t-th that row b was fed.
    ``chosen`` : int64[B, T], by ``noise``, else the most probable tokens; None where the pass chose none. ``noise`` :
    what the pass was given. ``packed_top`` : see `packed_top`; None where the pass did not look for them. ``copied`` :
    happens once these two are on the host, see `held`.
    """

    logits: torch.Tensor
    chosen: torch.Tensor | None = None
    noise: Noise | None = None
    packed_top: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    def held(self) -> PassOutput:
        """With the tokens where later passes leave them alone, for the host, once it did `wait`; without the logits."""
        chosen, top = _on_host(self.chosen), _on_host(self.packed_top)
        copied = self.copied
        if self.logits.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self.logits.device))  # the thread's device may be another
        return PassOutput(self.logits[:, :, :0], chosen, self.noise, top, copied)

    def wait(self) -> None:
        """Until what was `held` is there."""
        if self.copied is not None:
            self.copied.synchronize()

    def top(self, counts: Sequence[int]) -> TopTokens:
        """The most probable tokens at the first ``counts[b]`` positions of each row, as the logits have them.

        Computed when it is asked for, unless the pass did it already. O(positions V).
        """
        return top_tokens(self.logits, counts) if self.packed_top is None else unpacked(self.packed_top)

    def row(self, b: int) -> PassOutput:
        """Row b alone: views."""
        rows = slice(b, b + 1)
        return PassOutput(
            self.logits[rows],
            None if self.chosen is None else self.chosen[rows],
            None if self.noise is None else Noise(self.noise.keys[rows], self.noise.temperatures[rows]),
            None if self.packed_top is None else self.packed_top[rows],
        )
