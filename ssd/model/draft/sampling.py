"""Drawing a draft model's tokens as the target would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.protocol import SamplingRow
from ssd.model.sampling.noisy_argmax import argmax_with_noise
from ssd.model.sampling.target_tokens import truncated_scores, with_prefix_rules


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """One token for each row, chosen by the target's own rules, and the draft model's probability of each: [B].

    logits : [B, V], the draft model's; V may be smaller than the target's vocabulary. rows : without a draft; the
    context is what comes before the token to draw.

    Sampled rows draw with the very noise the target uses at this position, so that a draft model with the target's law
    draws the target's token, and one with a similar law mostly does (the Gumbel coupling: Maddison et al. 2014).
    """
    scores = with_prefix_rules(logits[:, None], rows)[:, 0].float()
    token_ids = scores.argmax(-1)
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy]
    if sampled:
        scores = scores.clone()
        scores[sampled] = truncated_scores(scores[sampled], [rows[b].params for b in sampled])
        keys = np.concatenate([rows[b].keys() for b in sampled])
        token_ids[sampled] = torch.from_numpy(argmax_with_noise(scores[sampled], keys)).to(token_ids.device)
    chances = (scores.gather(-1, token_ids[:, None])[:, 0] - scores.logsumexp(-1)).double().exp()
    return token_ids.cpu().numpy(), chances.cpu().numpy()
