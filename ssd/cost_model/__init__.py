"""Estimate the time of forward passes and the cost of draft tokens, and choose the length of drafts.

The benefit of a draft is its expected number of accepted tokens. Every cost is converted to the same unit, output
tokens: seconds become tokens at the rate at which output tokens are produced. The estimators are:

- `CostModel` and ``pass_costs`` estimate the **seconds of a forward pass** from its number of positions (rows and
  draft tokens). They also estimate the **cost of a draft token** in output tokens, and choose **draft lengths**.
- `ThroughputRecord` measures the **tokens and seconds of recent passes**, with which `combined_rate` converts time.
- `StepThroughput` measures the **tokens and seconds of whole steps**, with which the hybrid drafter converts the time
  of a costly drafter.
- `MarginalGain` estimates the **accepted tokens that another drafter adds** to the primary drafter's draft. The hybrid
  drafter uses the other drafter if this gain exceeds the cost of its time.
- `AcceptanceRates` estimates the **acceptance rate of tokens without an estimate**, by drafter and request.
- `PlattScaling` estimates the **acceptance probability of a draft model's token** from the model's own probability.
- `AcceptanceCalibration` measures the **ratio of accepted to expected tokens**, by temperature, with which the engine
  corrects the estimates of all drafters.
- `DraftBackoff` chooses the **steps between two drafts** of a request whose drafts are not accepted.

Now and then, a promising draft that would be withheld because of its estimated cost is verified as a **probe**, so that
a wrong cost estimate is corrected. Older times count less and less. They are discarded immediately if a newer time
contradicts them. The time of an interrupted pass is ignored. A wrong estimate makes drafts too long or too short, but
never changes an output token.
"""
