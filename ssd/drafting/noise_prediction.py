"""Predict the token that the target will sample, from its known Gumbel noise.

A sampled token is ``argmax(log p + g)``. The noise g is a pure function of the token and of a key, which depends on the
seed and the position, or on the preceding text (see `noise`). So g is known before the forward pass.

Given g, a token with probability p is sampled with probability ``exp(-exp(-(log(p / (1 - p)) + g)))``, because the
maximum of the other tokens' scores is Gumbel distributed (Maddison et al. 2014, section 3). If the recycling table has
the target's earlier top-k tokens, their scores ``log p + g`` are compared directly. The acceptance model learns how
reliable the two predictions are.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np

from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, DraftRecord, parent_of
from ssd.drafting.lookup import NO_TOKEN
from ssd.drafting.noise import coupled_place, gumbel_at, hash_behind, key_at, noise_at, times_counted
from ssd.drafting.sample_cache import (
    NO_SAMPLE,
    cached_sample_at,
    learn_samples,
    sample_table_at,
    sampled_token,
    times_confirmed,
)
from ssd.drafting.token_recycling import (
    NO_ENTRY,
    SHARES,
    TOP_K,
    entry_after_pair,
    entry_after_token,
    recycling_table_at,
)
from ssd.jit.addresses import (
    Address,
    Float64,
    Float64s,
    Int64,
    Int64s,
    Record,
    Uint64,
    UInt64s,
    inlined,
    int32_array,
)

NOT_LOOKED_UP: Final = -1
"""The value of ``RecycledTokens.count`` if the recycling table was not read."""


class RecycledTokens(Record):
    """The target's earlier top-k tokens after the same token or pair of tokens, read from a `RecyclingTable`.

    Attributes:
        count: The number of tokens; 0 if there is no entry, NOT_LOOKED_UP if the table was not read.
        is_pair: Whether a pair of tokens matched, not only the last token.
        tokens: The tokens, most probable first.
        shares: The bucket of each token's share of the probability, see `share_level`.
    """

    count: Int64
    is_pair: Int64
    tokens: Annotated[Int64s, np.int64, TOP_K]
    shares: Annotated[Int64s, np.int64, TOP_K]


@inlined
def look_up_recycled(recycling_table: int, token_before_last: int, last_token: int, recycled: RecycledTokens) -> None:
    """Read the target's earlier top-k tokens after the last two tokens or, if unknown, after the last token alone.

    ``recycling_table`` is the address of the table.
    """
    recycled.count = 0
    if last_token < 0:
        return
    table = recycling_table_at(recycling_table)
    row = entry_after_pair(table, token_before_last, last_token) if token_before_last >= 0 else NO_ENTRY
    recycled.is_pair = int(row != NO_ENTRY)
    if row == NO_ENTRY:
        row = entry_after_token(table, last_token)
    if row == NO_ENTRY:
        return
    entry, count = table.entries[row], 0
    while count < TOP_K and entry.tokens[count] >= 0:
        recycled.tokens[count], recycled.shares[count] = entry.tokens[count], entry.shares[count]
        count += 1
    recycled.count = count


@inlined
def rank_of(recycled: RecycledTokens, token: int) -> int:
    for rank in range(recycled.count):
        if recycled.tokens[rank] == token:
            return rank
    return TOP_K


VERDICTS: Final = 7
"""The number of verdicts on whether a candidate token will be sampled, given the known Gumbel noise.

A verdict compares the candidate's score, log probability plus noise, with those of the target's earlier top-k tokens.
0: no top-k tokens are known. 1: the candidate is not one of them. 2, 3: its score is far or slightly below the best.
4, 5, 6: its score is the best with a small, clear or large lead.
"""

NOISE_BUCKETS: Final = 8
"""The number of buckets for the Gumbel noise of a candidate token."""

TYPICAL_SHARE: Final = np.array([0.015, 0.045, 0.09, 0.18, 0.36, 0.62, 0.81, 0.95])
"""For each bucket of `share_level`, a typical probability share, to which a stored bucket is converted."""

assert len(TYPICAL_SHARE) == SHARES
_LOG_SHARE: Final = np.log(TYPICAL_SHARE)
_CLOSE: Final = 1.0
_CLEARLY: Final = 0.5
_BY_FAR: Final = 1.5


class PositionNoise(Record):
    """The Gumbel noise at one position of a draft, and the scores (log probability plus noise) of tokens there.

    Attributes:
        is_known: 1 if the target samples with known noise, else 0.
        noise: The address of the request's `NoiseRecord`, from which ``request`` and ``window`` are copied.
        context: The text before the draft, int32[start].
        temperature: The request's temperature.
        key: The noise key of the position.
        hashes: For noise that requests share, the `hash_behind` each node n of the draft, at index n + 1.
        best: The rank of the token with the greatest score among the target's earlier top-k tokens.
        lead: The best score minus the second best; infinite if there is only one.
        scores: For each of the earlier top-k tokens, its log probability at the request's temperature plus its noise.
    """

    is_known: Int64
    noise: Address
    request: Uint64
    window: Int64
    context: Address
    start: Int64
    temperature: Float64
    key: Uint64
    hashes: Annotated[UInt64s, np.uint64, MAX_DRAFT + 1]
    best: Int64
    lead: Float64
    scores: Annotated[Float64s, np.float64, TOP_K]


@inlined
def set_noise_key(position_noise: PositionNoise, out: DraftRecord, node: int, depth: int) -> None:
    """Compute the Gumbel noise key of the position after draft token ``node``; -1 stands for the end of the context.

    For noise that requests share, it takes O(window + depth), and the positions on the path must have been visited
    before.
    """
    if position_noise.window == 0:
        position_noise.key = key_at(position_noise.request, position_noise.start + depth)
    else:
        _set_coupled_key(position_noise, out, node)


@inlined
def _set_coupled_key(position_noise: PositionNoise, out: DraftRecord, node: int) -> None:
    context = int32_array(position_noise.context, position_noise.start)
    parents = out.parents[: MAX_DRAFT if out.is_tree else 0]
    found = hash_behind(position_noise.window, context, position_noise.start, out.tokens, parents, node)
    times, above = times_counted(noise_at(position_noise.noise), found), node
    while above >= 0:
        above = parent_of(out, above)
        times += position_noise.hashes[above + 1] == found
    position_noise.hashes[node + 1] = found
    position_noise.key = key_at(position_noise.request, coupled_place(found, times))


@inlined
def score_recycled(position_noise: PositionNoise, recycled: RecycledTokens) -> None:
    """Compute log probability plus Gumbel noise of the target's earlier top-k tokens at this draft position.

    The results equal the target's sampling scores if its probabilities have not changed.
    """
    position_noise.best = 0
    second = -math.inf
    for rank in range(recycled.count):
        noise = gumbel_at(position_noise.key, recycled.tokens[rank])
        score = _LOG_SHARE[recycled.shares[rank]] / position_noise.temperature + noise
        position_noise.scores[rank] = score
        if rank == 0:
            continue
        if score > position_noise.scores[position_noise.best]:
            second, position_noise.best = position_noise.scores[position_noise.best], rank
        elif score > second:
            second = score
    position_noise.lead = position_noise.scores[position_noise.best] - second


@inlined
def noise_verdict(position_noise: PositionNoise, recycled: RecycledTokens, rank: int) -> int:
    """Return the verdict (see `VERDICTS`) on whether a candidate token will be sampled, given the known Gumbel noise.

    ``rank`` is the token's rank in the target's earlier top k; TOP_K stands for any other token.
    """
    if recycled.count <= 0:
        return 0
    if rank == TOP_K:
        return 1
    if rank != position_noise.best:
        return 3 if position_noise.scores[position_noise.best] - position_noise.scores[rank] < _CLOSE else 2
    if position_noise.lead < _CLEARLY:
        return 4
    return 5 if position_noise.lead < _BY_FAR else 6


@inlined
def noise_bucket(position_noise: PositionNoise, token: int) -> int:
    """Return the bucket, 0..NOISE_BUCKETS - 1, of a candidate token's Gumbel noise at this draft position."""
    noise = gumbel_at(position_noise.key, token)
    return int(min(NOISE_BUCKETS - 1, max(0, int(2.0 * (noise + 1.0) + 1.0))))


RUN_BUCKETS: Final = 6
"""The number of buckets for how many tokens in a row, before a position, equal those in the sample cache."""

_RUN_BUCKET_OF: Final = np.searchsorted([1, 2, 4, 8, 16], np.arange(17), side="right")


class CachedSample(Record):
    """The token that an earlier request sampled with the same Gumbel noise key as a draft position.

    Attributes:
        sample_cache: The address of the `SampleTable`; 0 if the request does not use one.
        token: The cached token; NO_TOKEN if the key is not in the table.
        confirmed: How many times in a row the token was sampled again.
        run: The number of tokens right before the position, drafted ones included, that equal their cached sample.
        run_before: ``run`` at the end of the context.
        tokens: The cached token after each node n of the draft, at index n + 1; ``runs`` holds ``run`` in the same way.
    """

    sample_cache: Address
    token: Int64
    confirmed: Int64
    run: Int64
    run_before: Int64
    tokens: Annotated[Int64s, np.int64, MAX_DRAFT + 1]
    runs: Annotated[Int64s, np.int64, MAX_DRAFT + 1]


@inlined
def run_bucket(run: int) -> int:
    return int(_RUN_BUCKET_OF[min(run, 16)])


@inlined
def _look_up_sample(cached_sample: CachedSample, position_noise: PositionNoise, out: DraftRecord, node: int) -> None:
    sample = cached_sample_at(sample_table_at(cached_sample.sample_cache), position_noise.key)
    cached_sample.token, cached_sample.confirmed = NO_TOKEN, times_confirmed(sample)
    cached_sample.run = cached_sample.run_before
    if sample != np.uint64(NO_SAMPLE):
        cached_sample.token = sampled_token(sample)
    if node >= 0:
        above = parent_of(out, node) + 1
        cached_sample.run = cached_sample.runs[above] + 1 if cached_sample.tokens[above] == out.tokens[node] else 0
    cached_sample.tokens[node + 1], cached_sample.runs[node + 1] = cached_sample.token, cached_sample.run


@inlined
def enter_node(
    cached_sample: CachedSample, position_noise: PositionNoise, out: DraftRecord, node: int, depth: int
) -> None:
    """Set the Gumbel noise and the cached sample (`CachedSample`) for the draft position after draft token ``node``.

    ``node`` is -1 for the end of the context. The positions on the path to the node must have been visited before.
    O(depth) for noise that requests share, else O(1).
    """
    if position_noise.is_known:
        set_noise_key(position_noise, out, node, depth)
    if cached_sample.sample_cache != 0:
        _look_up_sample(cached_sample, position_noise, out, node)


@inlined
def start_noise(params: DraftParams, position_noise: PositionNoise, cached_sample: CachedSample) -> None:
    """Prepare the Gumbel noise of a request before a draft, and add the request's new tokens to the sample cache."""
    position_noise.is_known = int(params.temperature > 0.0)
    cached_sample.sample_cache, cached_sample.token = 0, NO_TOKEN
    if params.temperature <= 0.0:
        return
    noise = noise_at(params.noise)
    position_noise.noise, position_noise.request, position_noise.window = params.noise, noise.request, noise.window
    position_noise.context, position_noise.start = params.context, params.context_length
    position_noise.temperature = params.temperature
    if params.sample_cache != 0:
        learn_samples(params.sample_cache, params.noise, params.allow_caching == 1)
        cached_sample.sample_cache, cached_sample.run_before = params.sample_cache, noise.run_length
