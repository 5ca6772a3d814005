"""Accept drawn drafts as often as their law allows: speculative sampling.

A token x that was drawn from the draft's law is accepted with probability min(1, target(x) / draft(x)); the first one
rejected is replaced by a token of norm(max(0, target - draft)), and nothing after it counts. Then every output token
has the target's law (Leviathan et al. 2023, algorithm 1 and appendix A.1; Chen et al. 2023, theorem 1). A draft that is
not drawn but looked up is the special case of a point mass: accepted with probability target(x), else replaced by a
token of the target's law without x, which is what comparing it with the target's own choice does; such drafts
go that way.

The proof needs each token to be a fresh draw from its law at the moment it is verified. A draft that is dropped,
cut or preferred because of **what was drawn** breaks it: among those that stay, likely tokens are too frequent. So a
drafter that draws decides how long a draft is, and what it estimates of it, without looking at what it drew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from ssd.drafting.noise_keys import UInt64, uniform_noise
from ssd.drafting.protocol import Draft
from ssd.model.sampling.noisy_argmax import argmax_with_noise


@dataclass(slots=True, eq=False)
class SampledDraft(Draft):
    """A chain whose tokens were drawn at random.

    ``law`` : float32[k, V], row i the log-probabilities up to a constant that token i was drawn with; -inf where ruled
    out.
    """

    law: torch.Tensor | None = None

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens with their laws; itself when it has no more."""
        if length >= len(self.token_ids) or self.law is None:
            return self
        estimates = None if self.probabilities is None else self.probabilities[:length]
        return SampledDraft(self.token_ids[:length], self.match_length, self.source, estimates, law=self.law[:length])


def acceptance_chances(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, draft: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """min(1, target / draft) at each drafted token: float64[k].

    target_probs, draft_probs : float64[k, V]. draft : int32[k], each drawn from its row of ``draft_probs``.
    """
    at = torch.from_numpy(draft.astype(np.int64)).to(target_probs.device)[:, None]
    ratios = (target_probs.gather(1, at) / draft_probs.gather(1, at))[:, 0]
    # Rounding can leave nothing over where the laws are the same: nothing could replace the token, so it stays.
    ratios.masked_fill_(residuals(target_probs, draft_probs).sum(-1) == 0, 1.0)
    chances: npt.NDArray[np.float64] = ratios.clamp_max(1.0).cpu().numpy()
    return chances


def residuals(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """max(0, target - draft), not normalised: the law of what replaces a rejected token. float64[k, V] each."""
    return (target_probs - draft_probs).clamp_min(0.0)


def rejection_tokens(
    scores: torch.Tensor,
    draft: npt.NDArray[np.int32],
    law: torch.Tensor,
    accept_keys: UInt64,
    recover_keys: UInt64,
    bonus: int,
) -> npt.NDArray[np.int64]:
    """The tokens the target puts out: the accepted part of the draft and one more, which differs from the draft's next.

    scores : float32[k + 1, V], the target's log-probabilities up to a constant, -inf where ruled out.
    draft : int32[k], k >= 1, drawn from the rows of ``law``, which is as ``SampledDraft`` has it; its vocabulary may be
    smaller. accept_keys, recover_keys : uint64[k], of streams that nothing else uses. bonus : a token drawn from the
    last row, put out after full acceptance. Returns int64[1..k + 1]. O(k V).
    """
    num_draft_tokens = len(draft)
    target_probs = torch.softmax(scores[:num_draft_tokens].double(), -1)
    missing = scores.shape[-1] - law.shape[-1]
    draft_probs = pad(torch.softmax(law.to(scores.device).double(), -1), (0, missing))
    accepted = uniform_noise(accept_keys) < acceptance_chances(target_probs, draft_probs, draft)
    if accepted.all():
        return np.append(draft.astype(np.int64), bonus)
    first = int(np.argmin(accepted))
    left = residuals(target_probs[first : first + 1], draft_probs[first : first + 1])
    recovered = argmax_with_noise(left.log().float(), recover_keys[first : first + 1])
    return np.append(draft[:first].astype(np.int64), recovered)
