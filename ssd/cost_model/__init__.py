"""Estimate the time of forward passes and the cost of draft tokens, and choose the length of drafts.

The benefit of a draft is its expected number of accepted tokens. Every cost is converted to the same unit, output
tokens: seconds become tokens at the rate at which output tokens are produced. The estimators and their users are:

- `CostModel` and ``pass_costs`` estimate the **seconds of a forward pass**, including the time to inform drafters of
  its outcome, as a function of its number of positions (rows and draft tokens). The estimate is a least-squares fit
  over recent passes and over those timed at start-up. The cost of a draft token, the draft length and the hybrid
  drafter use it.
- `ThroughputRecord` counts the **tokens and seconds of recent passes**, with which `combined_rate` converts seconds to
  tokens.
- `CostModel.token_cost` is the **cost of a draft token** in output tokens. Every drafter ends a draft, or starts none,
  if no token is expected to gain as much.
- `CostModel.best_draft_length` (rows padded to the longest draft) and `cut_drafts` (no padding) choose the **length of
  the drafts** of a pass, from all of its drafts together. The engine uses the first one, vLLM's batch drafter the
  second one.
- `StepThroughput` counts the **tokens and seconds of whole steps**, drafting included. The hybrid drafter converts the
  seconds of a costly drafter by it.
- `MarginalGain` estimates the **accepted tokens that another drafter adds** to the primary drafter's draft. The hybrid
  drafter uses the other drafter if this gain exceeds the cost of its time.
- `AcceptanceRates` estimates the **acceptance rate of tokens without an estimate** by drafter and request, for the
draft
  model and the hybrid drafter.
- `PlattScaling` estimates the **acceptance probability of a draft model's token** from the model's own probability.
- `AcceptanceCalibration` is the **ratio of accepted to expected tokens**, by temperature. The engine divides token
  costs by it, and multiplies expected accepted tokens by it.
- `DraftBackoff` chooses the **steps between two drafts** of a request whose drafts are not accepted, and between two
  calls of ``observe_scores``.

A promising draft that was withheld because of its estimated cost is verified now and then nevertheless, as a **probe**,
so that a wrong cost estimate is corrected.

**Correction of estimates.** A suffix drafter's estimates are corrected by its acceptance model
(``ssd/drafting/acceptance_mixing.py``), a draft model's by Platt scaling. An error that all requests of one temperature
share is corrected after that, by the calibration. Time estimates are corrected by newer times: older times are
forgotten exponentially, or at once if a newer time contradicts them, and a pass that was interrupted is ignored. A
wrong estimate makes drafts too long or too short, but never changes an output token.
"""
