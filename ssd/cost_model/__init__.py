"""Estimate what forward passes and draft tokens cost, and choose the length of drafts.

A draft is judged by its expected accepted tokens, and everything that it costs is converted to the same unit, output
tokens: seconds become tokens at the rate at which output tokens are produced. This table lists who estimates what, and
who reads it:

- `CostModel` and ``pass_costs``: the **seconds of a pass**, including the time to inform drafters of its outcome, as a
  function of its number of positions. It is a least-squares fit over recent passes and those timed at start-up. The
  token cost and the draft length read it; the hybrid drafter reads it for the passes of a costly drafter.
- `ThroughputRecord`: the **tokens and seconds of recent passes**. The token cost and the draft length read it: a token
  is worth the time that it would take in this pass and in one like the recent ones, (G + T) / (C + K).
- `CostModel.token_cost`: the **cost of a draft token** in output tokens, from both of these. Every drafter gets it, and
  ends a draft, or starts none, if no token can gain as much.
- `CostModel.best_draft_length` (rows padded to the longest draft) and `cut_drafts` (no padding): the **length of the
  drafts** of a pass, from all of its drafts together, or that of a probe. The engine reads it, and the batch drafter
  that vLLM uses.
- `StepThroughput`: the **tokens and seconds of whole steps**, drafting included. The hybrid drafter converts seconds of
  a costly drafter by it.
- `MarginalGain`: the **accepted tokens that another drafter adds** to the draft that is there, given what that draft is
  expected to bring. The hybrid drafter uses the other drafter if this exceeds its time, converted at this request's
  recent tokens per step.
- `AcceptanceRates`: the **acceptance rate of tokens without an estimate**, by drafter and request. The draft model
  reads it to decide whether to draft a token; the hybrid drafter uses it for proposals without estimates.
- `PlattScaling`: the **acceptance probability of a draft model's token**, from the model's own probability and earlier
  outcomes.
- `AcceptanceCalibration`: the **ratio of accepted to expected tokens**, by temperature. The engine divides token costs
  by it and multiplies expectations by it.
- `DraftBackoff`: the **steps between two drafts** of a request whose drafts brought nothing, and between two calls of
  ``observe_scores``, from the time of a lookup, of such a call and of a pass. The engine reads it.

A likely draft that is withheld because of its estimated cost is nevertheless verified now and then, as a **probe**, so
that a wrong estimate is corrected.

**Which corrects which.** The estimates of a drafter are corrected where they are made: those of the suffix drafter by
its acceptance model (``ssd/drafting/acceptance_mixing.py``: one of its features is the recent error of the request's
estimates, and a fitted curve corrects the mix), those of a draft model by Platt scaling. What is still wrong for all
requests with the same temperature is corrected once, after all drafters, by the calibration. Times are corrected by
later times alone: older ones are forgotten exponentially, or at once if a later one contradicts them; an interrupted
pass does not count. No estimate changes a token: a wrong cost makes drafts too long or too short.
"""
