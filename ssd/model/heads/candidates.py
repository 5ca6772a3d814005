"""What a head says of the next token: the few that are most promising, in the order in which the target may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.protocol import SamplingRow
from ssd.model.sampling.noise import CHOICE, LOWEST_TEMPERATURE, gumbel_noise_of
from ssd.model.sampling.target_tokens import keys_at, needs_prefix, truncated_scores, with_prefix_rules

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

    Greedy rows go by probability, sampled ones by the very noise that the target will choose with (the Gumbel coupling:
    Maddison et al. 2014), so that a head with the target's law names the target's token. Only what is among the
    ``MOST_CANDIDATES`` most probable is looked at.
    """
    if draft_to_target is None:
        logits = logits[:, :vocab_size]
    if any(needs_prefix(row.params) for row in rows):
        if draft_to_target is not None:
            whole = logits.new_full((len(rows), vocab_size), float("-inf"))
            whole[:, draft_to_target] = logits
            logits, draft_to_target = whole, None
        logits = with_prefix_rules(logits[:, None], rows)[:, 0]
    temperatures = [1.0 if row.params.greedy else max(row.params.temperature, LOWEST_TEMPERATURE) for row in rows]
    scores = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    best = scores.topk(min(MOST_CANDIDATES, scores.shape[-1]))
    ids = best.indices if draft_to_target is None else draft_to_target[best.indices]
    token_ids: npt.NDArray[np.int64] = ids.cpu().numpy()
    logs = (best.values - scores.logsumexp(-1, keepdim=True)).double().cpu().numpy()
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy]
    cut = [b for b in sampled if _cuts(rows[b])]
    if cut:
        logs[cut] = _cut(logs[cut], [rows[b] for b in cut])
    if sampled:
        keys = np.concatenate([keys_at(rows[b], CHOICE)[:1] for b in sampled])
        noisy = logs.copy()
        noisy[sampled] += gumbel_noise_of(keys[:, None], token_ids[sampled])
        order = np.argsort(-noisy, axis=-1, kind="stable")
        token_ids, logs = (np.take_along_axis(each, order, -1) for each in (token_ids, logs))
    return Candidates(token_ids, np.exp(logs))


def _cuts(row: SamplingRow) -> bool:
    params = row.params
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _cut(logs: npt.NDArray[np.float64], rows: Sequence[SamplingRow]) -> npt.NDArray[np.float64]:
    """Log probabilities float64[N, M] after top-k, top-p and min-p, among these tokens; those left out get -inf."""
    heats = np.array([max(row.params.temperature, LOWEST_TEMPERATURE) for row in rows])[:, None]
    # They are divided by the temperature once more.
    scores = truncated_scores(torch.from_numpy(logs * heats), [row.params for row in rows]).double()
    kept: npt.NDArray[np.float64] = scores.log_softmax(-1).numpy()
    return kept
