"""Tokens that may not be sampled at a position, by what the request allows and by what stands before it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from ssd.token_rules import TokenRules

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRules:
    """A request's `TokenRules` for one vocabulary, on one device; none is changed.

    ``bias_ids`` : int64[n]. ``bias`` : float32[n], added to their logits. ``allowed`` : bool[V]; None allows all.
    """

    bias_ids: torch.Tensor
    bias: torch.Tensor
    allowed: Mask | None

    @classmethod
    def of(cls, rules: TokenRules, vocab_size: int, device: torch.device) -> Self:
        """The rules of a request, made at the first call for it and kept with them.

        Ids outside the vocabulary are left out: a draft model may have fewer tokens than the target.
        """
        key = (cls, vocab_size, device)
        if key not in rules.kept:
            within = rules.bias_ids < vocab_size
            rules.kept[key] = cls(
                torch.from_numpy(rules.bias_ids[within]).to(device),
                torch.from_numpy(rules.bias[within].astype(np.float32)).to(device),
                None if rules.allowed_ids is None else mask_of(rules.allowed_ids, vocab_size),
            )
        made: Self = rules.kept[key]
        return made

    def add_bias(self, logits: torch.Tensor) -> None:
        """Add it in place to every row of [T, V]; in float32, whatever the logits are."""
        if len(self.bias_ids):
            logits[:, self.bias_ids] = (logits[:, self.bias_ids].float() + self.bias).to(logits.dtype)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """bool[V], True at ``token_ids`` within it."""
    ids = np.fromiter(token_ids, np.int64)
    mask = np.zeros(vocab_size, np.bool_)
    mask[ids[ids < vocab_size]] = True
    return mask


def rule_out(scores: torch.Tensor, by_grammar: Mask | None, allowed: Mask | None, forbidden: Collection[int]) -> None:
    """Set to -inf, in place, what the grammar refuses, what is not allowed and what is forbidden.

    scores : [V]. The masks, bool[V], are True where a token may be sampled; None allows all. A later rule that would
    leave no token after those before it is not applied, so the grammar always holds and something can be sampled.
    """
    rules = [mask for mask in (by_grammar, allowed) if mask is not None]
    if forbidden:
        rules.append(~mask_of(forbidden, len(scores)))
    if not rules:
        return
    left = rules[0]
    for rule in rules[1:]:
        both = left & rule
        left = both if both.any() else left
    if left.any():
        scores.masked_fill_(torch.from_numpy(~left).to(scores.device), float("-inf"))
