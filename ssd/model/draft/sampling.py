"""Drawing a draft model's tokens: as the target would, or from a law of their own that verification is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.noise_keys import CHOICE, DRAFT
from ssd.drafting.protocol import SamplingRow
from ssd.model.sampling.noisy_argmax import argmax_with_noise
from ssd.model.sampling.target_tokens import truncated_scores, with_prefix_rules


@dataclass(slots=True, eq=False)
class Drawn:
    """One token for each of B rows.

    ``token_ids`` : int64[B]. ``chances`` : float64[B], the draft model's probability of each. ``law`` : float32[B, V],
    log-probabilities up to a constant of what sampled rows were drawn from; None where every row is greedy.
    """

    token_ids: npt.NDArray[np.int64]
    chances: npt.NDArray[np.float64]
    law: torch.Tensor | None


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Drawn:
    """One token for each row, chosen by the target's own rules.

    logits : [B, V], the draft model's; V may be smaller than the target's vocabulary. rows : without a draft; the
    context is what comes before the token to draw.

    Rows whose drafts are verified by rejection draw with noise that nothing else uses, the others with the very noise
    the target uses at this position, so that a draft model with the target's law draws the target's token, and one
    with a similar law mostly does (the Gumbel coupling: Maddison et al. 2014).
    """
    logits = with_prefix_rules(logits[:, None], rows)[:, 0].float()
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy]
    token_ids = logits.argmax(-1)
    if not sampled:
        return Drawn(token_ids.cpu().numpy(), _chances(logits, token_ids), None)
    scores = logits.clone()
    scores[sampled] = truncated_scores(logits[sampled], [rows[b].params for b in sampled])
    keys = np.concatenate([rows[b].keys(DRAFT if rows[b].acceptance == "rejection" else CHOICE) for b in sampled])
    token_ids[sampled] = torch.from_numpy(argmax_with_noise(scores[sampled], keys)).to(token_ids.device)
    return Drawn(token_ids.cpu().numpy(), _chances(scores, token_ids), scores)


def _chances(scores: torch.Tensor, token_ids: torch.Tensor) -> npt.NDArray[np.float64]:
    chosen = scores.gather(-1, token_ids[:, None])[:, 0] - scores.logsumexp(-1)
    chances: npt.NDArray[np.float64] = chosen.double().exp().cpu().numpy()
    return chances
