"""Define the drafting kernels' record of a sequence: draft parameters, the draft, and state kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np

from ssd.drafting.acceptance_features import NUM_FEATURES
from ssd.jit.addresses import (
    Address,
    Float64,
    Float64s,
    Int64,
    Int64s,
    Record,
    TokenIds,
    float64_array,
    inlined,
    view_of,
)

NO_TOKEN: Final = -1
"""The value that is used in place of a token if there is none. It equals SEPARATOR and is never a token id."""

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


IN_SEGMENT: Final = 0
IN_MEMTABLE: Final = 1
IN_CONTEXT: Final = 2


class MatchSample(Record):
    """One of the sampled text matches: an earlier occurrence of the last tokens of a context.

    Attributes:
        kind: The kind of text: IN_SEGMENT, IN_MEMTABLE or IN_CONTEXT.
        at: The token after the match: its address in a segment, its position in the memtable or in the context.
        width: The size of a token in bytes, in a segment.
        recency: Greater means later. The context is later than the memtable, which is later than segments.
        weight: The number of occurrences that the sample stands for.
    """

    kind: Int64
    at: Int64
    width: Int64
    recency: Int64
    weight: Float64


MAX_SAVED: Final = 8
"""The maximum number of text matches that one step of a request saves for the next; only the longest matches are saved.
"""

NO_SEGMENT_TABLE: Final = -1
"""The value of ``MatchCursor.table`` if no text matches are saved."""


class MatchCursor(Record):
    """The text matches that are saved from one step of a request to the next.

    Attributes:
        table: The number of the segment table that the matches refer to; NO_SEGMENT_TABLE if no matches are saved.
        length: The length of the context for which the matches were found.
        ends_with: A hash of the last tokens of that context.
    """

    table: Int64
    length: Int64
    ends_with: Int64
    match_length: Int64
    count: Int64
    matches: Annotated[Sequence[MatchSample], MatchSample, MAX_SAVED]


class PredictionCursor(Record):
    """The position in the client's predicted output that the output has reached.

    Attributes:
        position: The position in the prediction where the output is expected to continue.
        match_length: The number of tokens before ``position`` that match the output since the last difference.
        num_compared: The length of the context that has been compared.
    """

    position: Int64
    match_length: Int64
    num_compared: Int64
    has_differed: Int64


MAX_LOOKAHEAD: Final = 16
"""The maximum number of lookahead tokens, i.e. tokens that the target sampled after a rejected draft token."""


class Lookahead(Record):
    """The tokens that the target sampled after the first rejected draft token of a request's last forward pass.

    Attributes:
        before: The token before ``last``.
        last: The last token of the context after that pass; the lookahead tokens follow it.
        was_drafted: For each lookahead token, whether it equals the draft token at the same position.
    """

    count: Int64
    before: Int64
    last: Int64
    tokens: Annotated[Int64s, np.int64, MAX_LOOKAHEAD]
    was_drafted: Annotated[Int64s, np.int64, MAX_LOOKAHEAD]


MAX_SCORED: Final = 48
"""The maximum number of candidate tokens per draft that are stored until the acceptance model can learn their outcome.
"""


class ScoredCandidate(Record):
    """A candidate token and its features, stored until it is known whether the target produced the token.

    Attributes:
        parent: The index of the candidate before it; -1 for the end of the context.
        depth: The number of draft tokens before it.
        outcome: 1 if the target produced the token, -1 if it did not, 0 while that is unknown.
        weight_set: The index of the acceptance model's weight vector.
        inputs: The index of the table entry of each feature.
    """

    token: Int64
    parent: Int64
    depth: Int64
    outcome: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, NUM_FEATURES]


class ScoredDraft(Record):
    """The candidate tokens of a request's last draft: first the draft tokens in order, then the tokens not drafted.

    Attributes:
        start: The length of the context at the time of the draft.
        num_drafted: The number of candidates that are draft tokens.
        mean_error: The running mean of outcome minus estimate over all drafts of the request, in units of 2^-20.
    """

    count: Int64
    start: Int64
    num_drafted: Int64
    mean_error: Int64
    candidates: Annotated[Sequence[ScoredCandidate], ScoredCandidate, MAX_SCORED]


class DraftState(Record):
    """The state of a sequence that the drafting kernel keeps from one step to the next.

    Attributes:
        match_cursor: The text matches of the last draft, which may continue in the next draft.
        scored: The scored candidates of the last draft. The next context shows which of them the target produced.
        prediction: The position in the client's predicted output that the output has reached.
        lookahead: The tokens that the target sampled after rejected draft tokens.
    """

    match_cursor: MatchCursor
    scored: ScoredDraft
    prediction: PredictionCursor
    lookahead: Lookahead


class DraftRow(Record):
    """The drafting kernel's data of one sequence: its parameters, its last draft, and the state kept between steps.

    The record must not move in memory until the sequence ends.
    """

    params: DraftParams
    draft: DraftRecord
    state: DraftState


row_at = view_of(DraftRow)
