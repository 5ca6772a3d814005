"""What a head says of the next token: the few that are most promising, in the order in which the target may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.noise_keys import CHOICE, gumbel_noise_of
from ssd.drafting.protocol import SamplingRow
from ssd.model.draft.sampling import draw
from ssd.model.sampling.target_tokens import is_ruled, keys_at, with_prefix_rules

MOST_CANDIDATES = 32


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Of R rows M tokens each, the one to draft first.

    ``token_ids`` : int64[R, M], the target's. ``chances`` : float64[R, M], the head's own probability of each at the
    request's temperature, 1 where it is greedy; 0 where the request's rules leave a token out.
    """

    token_ids: npt.NDArray[np.int64]
    chances: npt.NDArray[np.float64]


def candidates(
    logits: torch.Tensor, rows: Sequence[SamplingRow], draft_to_target: torch.Tensor | None, vocab_size: int
) -> Candidates:
    """The most promising tokens after the contexts of ``rows``, which have no draft.

    logits : [R, Vd], the head's. draft_to_target : the target's id of each token it scores, int64[Vd]; None where it
    scores the target's own. vocab_size : of the target; what a head scores beyond is left out.

    Greedy rows go by probability. Sampled ones begin with what the target would draw if it had the head's law, with the
    very noise it will draw with, see `draw`; of the most probable others those come first that this noise favours.
    """
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy]
    drawn = None
    if draft_to_target is None:
        logits = logits[:, :vocab_size]
    if sampled or any(is_ruled(row) for row in rows):  # rules and noise go by the target's ids
        if draft_to_target is not None:
            whole = logits.new_full((len(rows), vocab_size), float("-inf"))
            whole[:, draft_to_target] = logits
            logits, draft_to_target = whole, None
        if sampled:
            drawn = draw(logits, rows)
        scores = with_prefix_rules(logits[:, None], rows)[:, 0] if drawn is None or drawn.law is None else drawn.law
    else:
        scores = logits
    scores = scores.float()
    best = scores.topk(min(MOST_CANDIDATES, scores.shape[-1]))
    ids = best.indices if draft_to_target is None else draft_to_target[best.indices]
    token_ids: npt.NDArray[np.int64] = ids.cpu().numpy()
    logs = (best.values - scores.logsumexp(-1, keepdim=True)).double().cpu().numpy()
    if drawn is not None:
        keys = np.concatenate([keys_at(rows[b], CHOICE)[:1] for b in sampled])
        noisy = logs.copy()
        noisy[sampled] += gumbel_noise_of(keys[:, None], token_ids[sampled])
        is_drawn = token_ids == drawn.token_ids[:, None]
        missing = ~is_drawn.any(-1)
        token_ids[missing, -1], is_drawn[missing, -1] = drawn.token_ids[missing], True
        logs[missing, -1] = np.log(drawn.chances[missing])
        order = np.argsort(np.where(is_drawn, -np.inf, -noisy), axis=-1, kind="stable")
        token_ids, logs = (np.take_along_axis(each, order, -1) for each in (token_ids, logs))
    return Candidates(token_ids, np.exp(logs))
