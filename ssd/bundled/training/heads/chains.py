"""What heads draft behind every position of a text at once.

A recurrent head is unrolled for some steps over the whole text. In step j each position stands for a drafted one whose
last j tokens are drafted too: features come from the step before, one place to the left, and attention reaches the
target's features up to j places back and the drafted ones since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from transformers import DynamicCache

from ssd.model.heads.head import Head, ParallelHead, RecurrentHead

Draw = Callable[[torch.Tensor], torch.Tensor]
"""Draws tokens, int64[B, n] in the target's ids, from logits over all its tokens [B, n, V].

Entry t stands for the token two places after t.
"""


@torch.inference_mode()
def chains(
    head: Head, tokens: torch.Tensor, hidden: list[torch.Tensor], vocab_size: int, depth: int, draw: Draw
) -> list[torch.Tensor]:
    """The first ``depth`` tokens that a head drafts behind every position of rows, int64[B, T - 1] each.

    tokens : int64[B, T]. hidden : [B, T, hidden size] of each of the head's layers. Entry s of the d-th stands for the
    token d + 2 places after s, as the one after s is the target's own; -1 where the rows end before.
    """
    features = head.combine(hidden)
    drafts = []
    if isinstance(head, ParallelHead):
        said = head(features.flatten(0, 1)).reshape(*features.shape[:2], head.num_tokens, -1)[:, :-1]
        for d in range(depth):
            drafts.append(draw(functional.pad(said[:, : said.shape[1] - d, d], (0, 0, d, 0))))
    else:
        assert isinstance(head, RecurrentHead)

        def drawn(logits: torch.Tensor) -> torch.Tensor:
            if head.draft_to_target is not None:
                drafted, logits = logits, torch.full((*logits.shape[:-1], vocab_size), -torch.inf)
                logits[..., head.draft_to_target] = drafted
            drafts.append(draw(logits))
            return drafts[-1]

        for _logits in unroll(head, tokens[:, 1:], features[:, :-1], depth, drawn):
            pass
    # What was drafted in step j stands at s + j for the chain that began at s.
    return [functional.pad(draft[:, step:], (0, step), value=-1) for step, draft in enumerate(drafts)]


def unroll(
    head: RecurrentHead, next_tokens: torch.Tensor, features: torch.Tensor, num_steps: int, draw: Draw | None
) -> Iterator[torch.Tensor]:
    """Logits [B, n, Vd] of each step.

    next_tokens : int64[B, n], the token after each position. features : [B, n, H], the target's. draw : what the head
    reads in later steps; None for the text as it is. The first j positions of step j stand for nothing.
    """
    length = next_tokens.shape[1]
    positions = torch.arange(length)[None]
    cache = DynamicCache()
    for step in range(num_steps):
        mask = None if step == 0 else _reach(length, step)
        logits, features = head(next_tokens, features, positions, attention_mask=mask, past_key_values=cache)
        yield logits
        features = functional.pad(features[:, :-1], (0, 0, 1, 0))
        if draw is not None:
            next_tokens = functional.pad(draw(logits)[:, :-1], (1, 0))


def _reach(length: int, step: int) -> torch.Tensor:
    """Which keys of this step and those before it a position sees, bool[1, 1, length, (step + 1) * length]."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    blocks = [back >= step] + [back == step - earlier for earlier in range(1, step + 1)]
    return torch.cat(blocks, dim=1)[None, None]
