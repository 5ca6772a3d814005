"""Define the records that Python shares with the drafting kernels: the parameters of a draft, and the draft itself."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.jit.addresses import Address, Float64, Float64s, Int64, Record, TokenIds, float64_array, inlined

MAX_DRAFT: Final = 128
"""The maximum number of draft tokens per draft. A greater configured limit is reduced to this number."""


class DraftRecord(Record):
    """A draft chain or tree, in the form that numba kernels write.

    Attributes:
        size: The number of draft tokens.
        match_length: The length of the longest match between the end of the context and the searched text.
        source: The index in SOURCES of the source of the first token.
        is_tree: 1 for a tree, 0 for a chain.
        has_estimates: Whether ``probabilities`` is filled.
        parents: For each token of a tree, the index of the token before it; -1 for the end of the context.
        probabilities: The estimated acceptance probability of each token, given that the tokens before it are accepted.
    """

    size: Int64
    match_length: Int64
    source: Int64
    is_tree: Int64
    has_estimates: Int64
    tokens: Annotated[TokenIds, np.int32, MAX_DRAFT]
    parents: Annotated[TokenIds, np.int32, MAX_DRAFT]
    probabilities: Annotated[Float64s, np.float64, MAX_DRAFT]


@inlined
def clear_draft(out: DraftRecord) -> None:
    out.size, out.match_length, out.source, out.is_tree, out.has_estimates = 0, 0, 0, 0, 1


@inlined
def parent_of(out: DraftRecord, node: int) -> int:
    """Return the index of the draft token before a node of a chain or tree; -1 for the end of the context."""
    return int(np.int64(out.parents[node])) if out.is_tree == 1 else node - 1


SOURCES: Final = (
    "prebuilt",
    "cache",
    "recent",
    "context",
    "prediction",
    "head",
    "model",
    "lookahead",
    "recycling",
    "coupled",
)
"""The names of the sources of a draft's first token; a draft record holds the index of the name.

The first three are parts of the retrieval cache, in the order of `lookup.index_source_of`; proposals of other drafters
follow in the order of `HEAD`, `MODEL`, `LOOKAHEAD`.
"""

NUM_SOURCES: Final = 16
_names = [*SOURCES, "none"]


def source_number(name: str) -> int:
    """Return the index in SOURCES of the name of a draft's source.

    An unknown name gets the next free index, or the index of "none" if no index is left.
    """
    if name not in _names:
        if len(_names) == NUM_SOURCES:
            name = "none"
        else:
            _names.append(name)
    return _names.index(name)


def source_name(number: int) -> str:
    return _names[number]


class DraftParams(Record):
    """The parameters of one draft, in the form that numba kernels read: a ``DraftRequest`` without Python objects.

    Attributes:
        context: The address of the prompt and the output so far, int32[context_length].
        limit: The maximum number of draft tokens.
        snapshot: The address of the retrieval cache's `SnapshotRecord`.
        model: The address of the acceptance model.
        token_cost: The cost of every draft token in expected accepted tokens, if ``num_token_costs`` is 0.
        token_costs: The cost of the i-th draft token, float64[num_token_costs], not decreasing. The last value holds
            for all further tokens.
        prediction: The client's predicted output, int32[prediction_length].
        temperature_bucket: 0 for greedy or unknown sampling, 1 for a temperature up to 0.5, 2 above.
        proposed_tokens: The address of ``ExternalProposals.token_ids``; the other ``proposed_`` fields likewise.
        recycling_table: The `RecyclingTable` to draft from; 0 for none.
        no_lookup: 1 disables the search in the retrieval cache and in the context.
        temperature: The request's temperature if the target samples with known Gumbel noise, else 0.
        noise: The `NoiseRecord` of the request, if ``temperature`` is above 0.
        sample_cache: The `SampleTable` to draft from, for requests that share their Gumbel noise; 0 for none.
        allow_caching: Whether the tokens of this request are added to ``sample_cache``.
    """

    context: Address
    context_length: Int64
    prompt_length: Int64
    limit: Int64
    snapshot: Address
    model: Address
    is_tree: Int64
    token_cost: Float64
    token_costs: Address
    num_token_costs: Int64
    prediction: Address
    prediction_length: Int64
    temperature_bucket: Int64
    proposed_tokens: Address
    proposed_parents: Address
    proposed_probabilities: Address
    proposed_kinds: Address
    num_proposed: Int64
    recycling_table: Address
    no_lookup: Int64
    temperature: Float64
    noise: Address
    sample_cache: Address
    allow_caching: Int64


@inlined
def cost_of_token(params: DraftParams, number: int) -> float:
    """Return the cost of verifying the draft token with this index, in expected accepted tokens."""
    if params.num_token_costs == 0:
        return params.token_cost
    return float(float64_array(params.token_costs, params.num_token_costs)[min(number, params.num_token_costs - 1)])
