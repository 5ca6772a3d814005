"""Prices: what a pass takes, what a drafted token costs, where drafts are cut, and who is asked for one.

A draft is judged by expected accepted tokens, and everything that it costs is put in the same unit, output tokens:
seconds become tokens at the rate at which tokens come. Who estimates what, from what, and who reads it:

=========================  ==========================  ===================================  ===========================
estimate                   of                          learned from                         read by
=========================  ==========================  ===================================  ===========================
``pass_costs`` (kernels),  seconds of a pass, from its  passes as they come, and those of    `Rate`'s formulas; the
``price_list``             positions                   the warm-up: ``least_squares``       arbiter (a draft model's)
``rate`` (`Rate`)          tokens a second lately      the same passes, and what they gave  price and cut, below
price of a token           output tokens               both of these                        every drafter: it ends a
                                                                                            draft that cannot pay
cut                        draft tokens                both, and the drafts' estimates      engine, vLLM's row drafter
``rate`` (`StepRate`)      tokens a second of whole    steps, drafting included             arbiter: what a draft
                           steps                                                            model's seconds cost
``gain``                   accepted tokens less prices  a draft's estimates, or a rate       arbiter: whose draft
``acceptance_rates``       chance of a token, by       its own drafts, and all requests'    arbiter and draft model,
                           request                                                          before anything is drafted
``platt_scaling``          chance of a token           what came of the draft model's       draft model: its estimates
                                                       probabilities
``calibration``            share of promised tokens    what came of whole drafts            engine: price and cut
                           that came, by temperature
``throttle``               steps between two askings   time to ask, time of a pass          engine: whom to ask
=========================  ==========================  ===================================  ===========================

**Which corrects which.** A drafter's estimate of a token is corrected where it is made: the suffix drafter's by its
acceptance model (views are mixed, the mix is read off a fitted curve, and one view is how this request's drafts fared
lately: ``ssd/drafting/suffix``), a draft model's by Platt scaling. What is wrong with the estimates of all requests
sampled alike is corrected once, behind all drafters, by the share of their promises that was kept: the price told to a
drafter is divided by it, and gains are multiplied by it where drafts are cut. Times are corrected by later times alone:
they are forgotten exponentially, and a pass that was interrupted does not count. Nothing here is corrected twice, and
nothing here ever changes a token: a wrong price makes drafts too long or too short.
"""
