"""The most probable tokens of scored positions: what a pass says beside the token that is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel
from ssd.drafting.successors import SUCCESSORS

Float32s = npt.NDArray[np.float32]
TopTokens = tuple[TokenIds, Float32s]
"""int32[B, T, SUCCESSORS], the most probable first, -1 where no more are possible; and their logits, float32."""

_BLOCK = 128


def top_tokens(logits: torch.Tensor, counts: Sequence[int]) -> TopTokens:
    """The most probable tokens at the first ``counts[b]`` positions of each row of logits, [B, T, V].

    Logits of any float type; NaN and -inf are never among them. Of equals the lower id comes first on a CPU, elsewhere
    any does. On a CPU one sweep that costs less than torch's argmax; elsewhere torch's top-k and one copy to the host.
    """
    if logits.device.type != "cpu":
        return unpacked(packed_top(logits))
    shape = (*logits.shape[:2], SUCCESSORS)
    ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
    _sweep(logits.float().contiguous().numpy(), np.asarray(counts, np.int64), ids, values)
    return ids, values


def packed_top(logits: torch.Tensor) -> torch.Tensor:
    """Ids and the bits of float32 logits in one tensor of the same device, int32[..., 2, SUCCESSORS]; no waiting.

    logits : [..., V].
    """
    best = torch.topk(logits, min(SUCCESSORS, logits.shape[-1]))
    values = best.values.float()
    ids = torch.where(values > float("-inf"), best.indices, -1).int()
    missing = SUCCESSORS - ids.shape[-1]
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
            place = SUCCESSORS - 1
            while place > 0 and values[place - 1] < block[i]:
                values[place], ids[place] = values[place - 1], ids[place - 1]
                place -= 1
            values[place], ids[place] = block[i], start + i
            least = values[SUCCESSORS - 1]


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
