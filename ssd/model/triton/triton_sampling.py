"""Triton kernels that sample tokens (the argmax of logits / temperature + Gumbel noise) or find the most probable ones.

The vocabulary is split among programs, so that a few rows use the whole device. Only the splits' results are written;
noise is computed in registers. Import this module only if triton is installed, which comes with CUDA builds of torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.drafting.noise import GAMMA, MIX_1, MIX_2
from ssd.drafting.token_recycling import TOP_K
from ssd.model.cpu.cpu_sampling import LOWEST_TEMPERATURE
from ssd.model.triton.triton_attention import num_splits

_BLOCK = 1024
_MAX_SPLITS = 128

_GAMMA = tl.constexpr(GAMMA)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_LOWEST_TEMPERATURE = tl.constexpr(LOWEST_TEMPERATURE)
_NO_TOKEN = tl.constexpr(2**31 - 1)


def triton_sampler(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Sample one token per row on a GPU: the argmax of logits / temperature plus Gumbel noise, as in `noisy_scores`.

    Implements `Sampler` for float32, bfloat16 or float16 logits. Of several tokens with the largest score, the one with
    the lowest id is sampled, and token 0 if no token is possible; NaN is never sampled. O(V) per row, with logarithms
    in float64 unless the temperature is 0.
    """
    num_rows, vocab_size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    splits = num_splits(logits.device, num_rows, min(triton.cdiv(vocab_size, _BLOCK), _MAX_SPLITS))
    length = triton.cdiv(triton.cdiv(vocab_size, _BLOCK), splits) * _BLOCK
    scores = torch.empty(num_rows, splits, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, splits, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _sample_split[(num_rows, splits)](
            logits,
            keys.contiguous(),
            temperatures.contiguous(),
            scores,
            tokens,
            logits.stride(0),
            vocab_size,
            length,
            BLOCK=_BLOCK,
        )
        _choose_split[(num_rows,)](scores, tokens, out, splits, BLOCK=_MAX_SPLITS)
    return out


# The number of splits is not a compile-time constant, so the same machine code serves any number of rows.
@triton.jit(do_not_specialize_on_alignment=["keys", "temperatures"])
def _sample_split(  # type: ignore[no-untyped-def]
    logits, keys, temperatures, scores, tokens, row_stride, vocab_size, length, BLOCK: tl.constexpr
):
    """Sample a token of one row from one of the splits of ``length`` tokens into which the vocabulary is divided.

    Writes the largest score to ``scores``, float64[N, splits], and the first token with this score to ``tokens``,
    int32[N, splits]. If no token is possible, the score is -inf and the token _NO_TOKEN. The grid is (N, splits).
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    temperature = tl.load(temperatures + row)
    divisor = tl.maximum(temperature, _LOWEST_TEMPERATURE)
    low = split * length
    high = tl.minimum(low + length, vocab_size)

    best = tl.full([BLOCK], float("-inf"), tl.float64)
    chosen = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    for begin in range(low, high, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        found = tl.load(logits + row * row_stride + token, mask=token < high, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            z = key + (token + 1).to(tl.uint64) * _GAMMA
            z = (z ^ (z >> 30)) * _MIX_1
            z = (z ^ (z >> 27)) * _MIX_2
            z = z ^ (z >> 31)
            uniform = ((z >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2**-53
            # div_rn rounds as torch does; plain division does not.
            score = tl.div_rn(found, tl.zeros_like(found) + divisor).to(tl.float64) - tl.log(-tl.log(uniform))
        else:
            score = found.to(tl.float64)
        is_better = score > best  # of equals, each lane keeps its first
        best = tl.where(is_better, score, best)
        chosen = tl.where(is_better, token, chosen)

    highest = tl.max(best, 0)
    place = row * tl.num_programs(1) + split
    tl.store(scores + place, highest)
    tl.store(tokens + place, tl.min(tl.where(best == highest, chosen, _NO_TOKEN), 0))


@triton.jit(do_not_specialize=["splits"])
def _choose_split(scores, tokens, out, splits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each row, write the token of the split that has the largest score to ``out``, int64[N]. The grid is (N,)."""
    row, split = tl.program_id(0), tl.arange(0, BLOCK)
    best = tl.load(scores + row * splits + split, mask=split < splits, other=float("-inf"))
    chosen = tl.load(tokens + row * splits + split, mask=split < splits, other=_NO_TOKEN)
    first = tl.min(tl.where(best == tl.max(best, 0), chosen, _NO_TOKEN), 0)
    tl.store(out + row, tl.where(first == _NO_TOKEN, 0, first).to(tl.int64))


_LEAST = tl.constexpr(-(1 << 63))
_LOW = tl.constexpr((1 << 31) - 1)


def triton_top(logits: torch.Tensor) -> torch.Tensor:
    """Return the ids and logits of the most probable tokens on a GPU, in the format of `packed_top`. O(V) per row.

    Tokens with equal logits are in ascending order of their ids. If V is 0, all ids are -1.
    """
    rows = logits.flatten(0, -2)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    splits = max(1, triton.cdiv(rows.shape[1], _BLOCK))
    found = torch.empty(len(rows), splits, TOP_K, dtype=torch.int64, device=logits.device)
    out = torch.empty(*logits.shape[:-1], 2, TOP_K, dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _top_split[(len(rows), splits)](rows, found, rows.stride(0), rows.shape[1], COUNT=TOP_K, BLOCK=_BLOCK)
        size = splits * TOP_K
        _choose_top[(len(rows),)](found, out, size, COUNT=TOP_K, BLOCK=triton.next_power_of_2(size))
    return out


@triton.jit
def _top_split(  # type: ignore[no-untyped-def]
    logits, found, row_stride, vocab_size, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the most probable tokens of one row in one block of the vocabulary to ``found``, int64[N, splits, COUNT].

    Each token is one number, so that the maximum is the most probable token: the upper half is the rank of the logit
    among all float32 values, and the lower half is greater for lower token ids. _LEAST stands for no token. The grid is
    (N, splits).
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    bits = given.to(tl.int32, bitcast=True)
    place = (bits ^ ((bits >> 31) & _LOW)).to(tl.int64)
    best = tl.where(given > float("-inf"), place * (1 << 32) + (token ^ _LOW), _LEAST)  # NaN compares as not greater
    out = found + (row * tl.num_programs(1) + split) * COUNT
    for i in tl.static_range(COUNT):
        highest = tl.max(best, 0)
        tl.store(out + i, highest)
        best = tl.where(best == highest, _LEAST, best)


@triton.jit(do_not_specialize=["size"])
def _choose_top(found, out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Choose a row's most probable tokens from those of all blocks, and write their ids and logit bits to ``out``.

    The grid is (N,).
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best = tl.load(found + row * size + at, mask=at < size, other=_LEAST)
    out += row * 2 * COUNT
    for i in tl.static_range(COUNT):
        highest = tl.max(best, 0)
        place = (highest >> 32).to(tl.int32)
        is_some = highest > _LEAST
        tl.store(out + i, tl.where(is_some, ((highest & _LOW) ^ _LOW).to(tl.int32), -1))
        tl.store(out + COUNT + i, tl.where(is_some, place ^ ((place >> 31) & _LOW), -8388608))  # bits of -inf
        best = tl.where(best == highest, _LEAST, best)
