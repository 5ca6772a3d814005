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
from typing import Final

import numpy as np

from ssd.drafting.acceptance_features import NOISE_BUCKETS
from ssd.drafting.draft_records import MAX_DRAFT, NO_TOKEN, DraftParams, DraftRecord, parent_of
from ssd.drafting.draft_scratch import CachedSample, PositionNoise, RecycledTokens
from ssd.drafting.noise import count_occurrences, coupled_place, gumbel_at, key_at, noise_at, window_hash
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
    TOP_K,
    TYPICAL_SHARE,
    entry_after_pair,
    entry_after_token,
    recycling_table_at,
)
from ssd.jit.addresses import inlined, int32_array

NOT_LOOKED_UP: Final = -1
"""The value of ``RecycledTokens.count`` if the recycling table was not read."""


@inlined
def look_up_recycled(recycling_table: int, token_before_last: int, last_token: int, recycled: RecycledTokens) -> None:
    """Read the top-k tokens that the target had earlier after the last two tokens, or else after the last token alone.

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


_LOG_SHARE: Final = np.log(TYPICAL_SHARE)
_CLOSE: Final = 1.0
_CLEARLY: Final = 0.5
_BY_FAR: Final = 1.5


@inlined
def set_noise_key(position_noise: PositionNoise, out: DraftRecord, node: int, depth: int) -> None:
    """Compute the Gumbel noise key for sampling the token after draft token ``node``; -1 is the context's end.

    If requests share their noise, this takes O(window + depth) and needs the keys of the path's earlier positions.
    """
    if position_noise.window == 0:
        position_noise.key = key_at(position_noise.request, position_noise.start + depth)
    else:
        _set_coupled_key(position_noise, out, node)


@inlined
def _set_coupled_key(position_noise: PositionNoise, out: DraftRecord, node: int) -> None:
    context = int32_array(position_noise.context, position_noise.start)
    parents = out.parents[: MAX_DRAFT if out.is_tree else 0]
    found = window_hash(position_noise.window, context, position_noise.start, out.tokens, parents, node)
    times, above = count_occurrences(noise_at(position_noise.noise), found), node
    while above >= 0:
        above = parent_of(out, above)
        times += position_noise.hashes[above + 1] == found
    position_noise.hashes[node + 1] = found
    position_noise.key = key_at(position_noise.request, coupled_place(found, times))


@inlined
def score_recycled(position_noise: PositionNoise, recycled: RecycledTokens) -> None:
    """Compute log probability plus Gumbel noise of the target's earlier top-k tokens at this draft position.

    The target samples with the same scores if its probabilities are the same as when the tokens were stored.
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
    """Return the verdict (see VERDICTS) on whether a candidate token will be sampled, given the known Gumbel noise.

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


_RUN_BUCKET_OF: Final = np.searchsorted([1, 2, 4, 8, 16], np.arange(17), side="right")


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
    """Prepare predictions of the token after draft token ``node``: the Gumbel noise there, and the cached sample.

    ``node`` is -1 for the end of the context. First call this for the positions on the path to the node. O(depth) for
    noise that requests share, else O(1).
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
