"""Estimate the time of forward passes and the cost of draft tokens, and choose the length of drafts.

The benefit of a draft is its expected number of accepted tokens. Every cost is converted to the same unit, output
tokens: seconds become tokens at the rate at which output tokens are produced. The estimators are:

- `CostModel` and ``pass_costs``: the **seconds of a forward pass** as a function of its positions (rows and draft
  tokens), a least-squares fit over recent passes and over those timed at start-up; the **cost of a draft token** in
  output tokens, below whose gain drafters end a draft; and the **length of the drafts** of a pass.
- `ThroughputRecord`: the **tokens and seconds of recent passes**, with which `combined_rate` converts seconds to
tokens. - `StepThroughput`: the **tokens and seconds of whole steps**, with which the hybrid drafter converts the
seconds of a
  costly drafter.
- `MarginalGain`: the **accepted tokens that another drafter adds** to the primary drafter's draft. The hybrid drafter
  uses the other drafter if this gain exceeds the cost of its time.
- `AcceptanceRates`: the **acceptance rate of tokens without an estimate**, by drafter and request.
- `PlattScaling`: the **acceptance probability of a draft model's token**, from the model's own probability.
- `AcceptanceCalibration`: the **ratio of accepted to expected tokens**, by temperature, with which the engine corrects
  the estimates of all drafters.
- `DraftBackoff`: the **steps between two drafts** of a request whose drafts are not accepted.

A promising draft that was withheld because of its estimated cost is verified now and then nevertheless, as a **probe**,
so that a wrong cost estimate is corrected. Time estimates are corrected by newer times: older ones are forgotten
exponentially, or at once if a newer time contradicts them, and a pass that was interrupted is ignored. A wrong estimate
makes drafts too long or too short, but never changes an output token.
"""
