"""Define the features from which the acceptance model estimates probabilities, and the layout of its parameters.

A feature is a tuple of a few small numbers, the buckets, that describe a candidate token. Each feature has a table with
an entry for every combination of buckets. The tables of all features are stored one after another.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np

from ssd.drafting.protocol import NUM_PROPOSER_KINDS
from ssd.drafting.sample_cache import MAX_CONFIRMED
from ssd.drafting.token_recycling import RECYCLED_SHARES, TOP_K
from ssd.jit.addresses import Float64, Float64s, Record, inlined, view_of

LENGTHS: Final = 13
SUPPORTS: Final = 6
SHARES: Final = 9

ORIGINS: Final = 4
"""The number of buckets for the part of the retrieval cache that contains a candidate token's match.

Buckets 0 to 2 are prebuilt segments, other segments and the memtable, see `lookup.index_source_of`. Bucket 3 is unused.
"""

ERROR_BUCKETS: Final = 8
HASHES: Final = 1024
PAIR_HASHES: Final = 8192
COARSE_LENGTHS: Final = 4
COARSE_SHARES: Final = 3
PROPOSED_PROBABILITIES: Final = 8
TEMPERATURE_BUCKETS: Final = 3
DEPTH_BUCKETS: Final = 3

VERDICTS: Final = 7
"""The number of verdicts on whether a candidate token will be sampled, given the known Gumbel noise.

A verdict compares the scores (log probability plus noise) of the candidate and of the top-k tokens that token recycling
has stored. 0: no tokens are stored. 1: the candidate is not one of them. 2, 3: its score is far or slightly below the
best score. 4, 5, 6: its score is the best with a small, clear or large lead.
"""

NOISE_BUCKETS: Final = 8
"""The number of buckets for the Gumbel noise of a candidate token."""

RUN_BUCKETS: Final = 6
"""The number of buckets for how many consecutive tokens before a draft position were predicted by the sample cache."""

AGREEMENTS: Final = 3
"""The number of possible relations between the text matches and the token that the sample cache predicts.

The cases are: there is no match, the newest matches continue with another token, or they continue with this token.
"""

LEVEL_FEATURES: Final = 3
"""The maximum number of match lengths from which features are computed; each match length has a feature of its own."""

_COARSE: Final = (COARSE_LENGTHS, COARSE_SHARES)

_LEVEL: Final = (LENGTHS, SUPPORTS, SHARES)

FEATURES: Final = {
    # The longest match in the request's context: its length, the number of matches, the share of them that continue
    # with the candidate token, whether the newest match does, and whether that match lies in the output.
    "context": (LENGTHS, SUPPORTS, SHARES, 2, 2),
    # The longest match in the retrieval cache, likewise, and the part of the cache that contains the newest match.
    "index": (LENGTHS, SUPPORTS, SHARES, 2, ORIGINS),
    # The client's predicted output: the number of consecutive output tokens that equal it, whether the output has
    # never differed from it, and whether it continues with the candidate.
    "prediction": (LENGTHS, 2, 2),
    # For each match length that is looked up: the length, the number of matches of at least this length, and the
    # share of these matches that continue with the candidate.
    "level 0": _LEVEL,
    "level 1": _LEVEL,
    "level 2": _LEVEL,
    # The error of the model's recent estimates in the same request, the longest match's length, and the share of
    # matches that continue with the candidate.
    "request": (ERROR_BUCKETS, LENGTHS, SHARES),
    # Hashes of the candidate, of the token before it, and of both.
    "token": (HASHES, *_COARSE),
    "before": (HASHES, *_COARSE),
    "pair": (PAIR_HASHES, *_COARSE),
    # The token that another drafter, such as a draft model, proposes at this position: the kind of drafter, whether
    # it proposes the candidate, its probability, and the depth in the draft.
    "proposal": (NUM_PROPOSER_KINDS, 2, PROPOSED_PROBABILITIES, DEPTH_BUCKETS),
    # The candidate's rank among the target's earlier top-k tokens (token recycling): the temperature, whether the
    # top-k tokens were stored for a pair of tokens, the rank, and the share of the probability in the top k.
    "recycled": (TEMPERATURE_BUCKETS, 2, TOP_K + 1, RECYCLED_SHARES),
    # The Gumbel noise with which the target will sample, if it is known: a verdict, and the candidate's noise.
    "noise": (VERDICTS, NOISE_BUCKETS, *_COARSE),
    # The token that was sampled before with the same Gumbel noise ("cached sample"): how often it was sampled again,
    # how many cached samples in a row were right, whether text matches agree, the temperature, and whether the
    # candidate is that token.
    "cached sample": (MAX_CONFIRMED + 1, RUN_BUCKETS, AGREEMENTS, TEMPERATURE_BUCKETS, 2),
}
"""The features of a candidate token. Each feature is a tuple of numbers; the value here is the number of buckets of
each.

Examples of these numbers are the match length and the number of matches. The first number of a feature is the most
significant one in `entry_of`. Stored acceptance models depend on the order of the features.
"""

_names: Final = list(FEATURES)
NUM_FEATURES: Final = len(_names)
CONTEXT: Final = _names.index("context")
INDEX: Final = _names.index("index")
PREDICTION: Final = _names.index("prediction")
LEVEL: Final = _names.index("level 0")
REQUEST: Final = _names.index("request")
TOKEN: Final = _names.index("token")
BEFORE: Final = _names.index("before")
PAIR: Final = _names.index("pair")
PROPOSAL: Final = _names.index("proposal")
RECYCLED: Final = _names.index("recycled")
NOISE: Final = _names.index("noise")
CACHED_SAMPLE: Final = _names.index("cached sample")

_OFFSETS: Final = np.cumsum([0, *(math.prod(buckets) for buckets in FEATURES.values())])
_BUCKETS: Final = np.array([[*buckets, 1, 1][:5] for buckets in FEATURES.values()])
ENTRIES: Final = int(_OFFSETS[-1])


@inlined
def entry_of(feature: int, *buckets: int) -> int:
    """Return the index of a feature's table entry for these bucket numbers; all tables are in one array."""
    entry = 0
    for i, bucket in enumerate(buckets):
        entry = entry * _BUCKETS[feature, i] + bucket
    return int(_OFFSETS[feature] + entry)


NUM_SOURCE_FLAGS: Final = 7

NUM_WEIGHT_SETS: Final = 2**NUM_SOURCE_FLAGS * LEVEL_FEATURES * DEPTH_BUCKETS
"""The number of weight vectors with which the acceptance model weighs a candidate's features, see `weight_set`."""

KNOTS: Final = 33
"""The number of knots of the piecewise linear curves that correct acceptance estimates.

The knots lie at log odds from -8 to 8, 1 / KNOTS_PER_UNIT apart.
"""

KNOTS_PER_UNIT: Final = 2.0

NUM_LEARNED: Final = NUM_WEIGHT_SETS * (NUM_FEATURES + 1) + DEPTH_BUCKETS * KNOTS
"""The number of learned parameters of an acceptance model besides its tables: feature weights and curve knots."""

MODEL_FLOATS: Final = 3 * ENTRIES + NUM_LEARNED + 1


class AcceptanceTables(Record):
    """The parameters of an acceptance model, in the form that numba kernels read and update.

    Attributes:
        probabilities: The acceptance probability of each table entry.
        counts: The number of outcomes that each table entry has learned from.
        log_odds: log(probability / (1 - probability)) of each table entry.
        weights: The weight vectors of the mixer: a weight for each feature, and one for a constant.
        knots: The correction curve for each depth bucket.
        learned: The number of outcomes that the whole model has learned from.
    """

    probabilities: Annotated[Float64s, np.float64, ENTRIES]
    counts: Annotated[Float64s, np.float64, ENTRIES]
    log_odds: Annotated[Float64s, np.float64, ENTRIES]
    weights: Annotated[Float64s, np.float64, (NUM_WEIGHT_SETS, NUM_FEATURES + 1)]
    knots: Annotated[Float64s, np.float64, (DEPTH_BUCKETS, KNOTS)]
    learned: Float64


acceptance_tables_at = view_of(AcceptanceTables)


_LENGTH_BUCKETS: Final = np.searchsorted([1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49], np.arange(64), side="right")
_COARSE_LENGTH: Final = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3])


@inlined
def length_bucket(length: int) -> int:
    return int(_LENGTH_BUCKETS[min(length, 63)])


@inlined
def coarse_length(bucket: int) -> int:
    return int(_COARSE_LENGTH[bucket])


@inlined
def support_bucket(support: float) -> int:
    if support < 3.5:
        return 0 if support < 1.5 else (1 if support < 2.5 else 2)
    return 3 if support < 6.5 else (4 if support < 16.0 else 5)


@inlined
def share_bucket(votes: float, support: float) -> int:
    """Return the bucket of the share of text matches that continue with a token: 0 for none, 4 for half, 8 for all."""
    if votes <= 0.0:
        return 0
    share = votes / support
    if share > 0.999:
        return 8
    if share < 0.49:
        return 1 if share < 0.15 else (2 if share < 0.33 else 3)
    if share < 0.66:
        return 4 if share < 0.51 else 5
    return 6 if share < 0.85 else 7


@inlined
def coarse_share(bucket: int) -> int:
    return 0 if bucket < 3 else (1 if bucket < 7 else 2)


@inlined
def hash_of(token: int) -> int:
    return ((token * 40503) >> 4) & (HASHES - 1)


@inlined
def hash_of_pair(before: int, token: int) -> int:
    return (((token * 40503) ^ (before * 69069 + (before >> 7))) >> 3) & (PAIR_HASHES - 1)


@inlined
def proposed_bucket(probability: float) -> int:
    if probability < 0.35:
        return 0 if probability < 0.03 else (1 if probability < 0.1 else (2 if probability < 0.2 else 3))
    return 4 if probability < 0.55 else (5 if probability < 0.75 else (6 if probability < 0.92 else 7))


@inlined
def weight_set(
    has_context: bool,
    has_index: bool,
    has_prediction: bool,
    has_proposal: bool,
    has_recycled: bool,
    has_noise: bool,
    has_cached_sample: bool,
    num_levels: int,
    depth: int,
) -> int:
    """Return the index of the weight vector with which the acceptance model weighs a candidate's features.

    The index depends on the kinds of evidence that are present (the ``has_`` arguments), on the number of match
    lengths, and on a coarse bucket of ``depth``, the number of draft tokens before the candidate.
    """
    sources = (
        int(has_context) + 2 * int(has_index) + 4 * int(has_prediction) + 8 * int(has_proposal) + 16 * int(has_recycled)
    )
    sources += 32 * int(has_noise) + 64 * int(has_cached_sample)
    levels = min(max(num_levels, 1), LEVEL_FEATURES) - 1
    return (sources * LEVEL_FEATURES + levels) * DEPTH_BUCKETS + depth_bucket(depth)


@inlined
def depth_bucket(depth: int) -> int:
    return 0 if depth == 0 else (1 if depth < 4 else 2)
