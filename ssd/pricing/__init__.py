"""Prices: what a pass takes, what a drafted token costs, where drafts are cut, and who is asked for one.

A draft is judged by its expected accepted tokens, and all that it costs is put in the same unit, output tokens:
seconds become tokens at the rate at which tokens come. Who estimates what, from what, and who reads it:

- ``pass_costs``, ``price_list``: the **seconds of a pass**, with what telling of its drafts takes, from its positions,
  by least squares over recent passes and those timed at start-up. Read by the price and the cut; of a costly source's
  passes, by the arbiter. A likely draft that is withheld because of its estimated cost is verified now and then all the
  same, as a **probe**, so that a wrong estimate is corrected.
- ``rate.RateRecord``: the **tokens and seconds of a pass of late**. Read by the price and the cut: a token is worth the
  time that it would take in this pass and one like the recent ones, (G + T) / (C + K).
- ``PriceList.price``: the **price of a drafted token**, from both. Told to every drafter, which ends a draft, or does
  not begin one, where no token can pay any more.
- ``PriceList.paying_width`` (rows padded to the widest) and ``cut_rows`` (no padding): the **cut**, from both and all
  drafts of a pass together, or the width of a probe. Read by the engine, and by the row drafter that vLLM is given.
- ``rate.StepRate``: the **tokens and seconds of whole steps**, drafting included. The arbiter turns seconds of a
  costly source into tokens by it.
- ``rate.MarginalGain``: the **tokens that asking a source brings** beyond the draft that is there, by what that draft
  promises. The arbiter asks where it exceeds the source's time, turned into tokens by what this request's steps bring
  of late.
- ``rate.AcceptanceRates``: the **chance of a token before it is drafted**, by drafter and request. Read by the draft
  model, to decide whether to draft it; and by the arbiter, which offers drafts without estimates at it.
- ``calibration.PlattScaling``: the **chance of a token that a draft model drew**, from the model's own probability and
  what came of those before. It is the draft model's estimate.
- ``calibration.KeptShares``: the **share of promised tokens that came**, by temperature. The engine divides prices by
  it and multiplies what drafts promise.
- ``calibration.Throttle``: the **steps between two askings** of a request that gets nothing, and between two tellings
  of what passes said, from the time of a lookup, of telling and of a pass. Read by the engine.

**Which corrects which.** A drafter's estimates are corrected where they are made: the suffix drafter's by its
acceptance model (``ssd/drafting/acceptance_mixing.py``: a mixer weighs views, one of which is the mood of the
request, how its drafts fared lately; a fitted curve corrects the mix), a draft model's by Platt scaling. What is
still wrong with them for all requests sampled alike is corrected once, behind all drafters, by calibration. Times are
corrected by later times alone: older ones are forgotten exponentially, or at once if a later one contradicts them; a
pass that was interrupted does not count. Nothing here changes a token: a wrong price makes drafts too
long or too short.
"""
