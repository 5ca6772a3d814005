"""Define the scratch memory of the drafting kernels, which is used during one draft and shared by all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np

from ssd.drafting.acceptance_features import LEVEL_FEATURES, NUM_FEATURES
from ssd.drafting.draft_records import MAX_DRAFT, MAX_LOOKAHEAD, MatchSample
from ssd.drafting.protocol import MAX_PROPOSED_TOKENS
from ssd.drafting.token_recycling import TOP_K
from ssd.jit.addresses import (
    Address,
    Float64,
    Float64s,
    Int64,
    Int64s,
    Record,
    TokenIds,
    Uint64,
    UInt64s,
    view_of,
)
from ssd.retrieval.scan import MAX_SCAN_HITS
from ssd.retrieval.suffix_array_search import MAX_MATCH_LENGTH

MAX_LEVELS: Final = LEVEL_FEATURES
"""The maximum number of match lengths ("levels") at which one context is looked up.

The first levels are the lengths of the longest match in the context and of the longest match in the cache. Each further
level is half as long as the level before it.
"""

MAX_SCANNED_SAMPLES: Final = 32
"""The maximum number of matches that a lookup uses from the context. The same maximum applies to the memtable."""

MAX_SEGMENT_SAMPLES: Final = 24
"""The maximum number of matches that a lookup uses from all segments of the cache together (at least one per segment).
"""

MAX_SAMPLES: Final = 2 * MAX_SCANNED_SAMPLES + 2 * MAX_SEGMENT_SAMPLES


class MatchSamples(Record):
    """Sampled occurrences of the last tokens of a context, grouped by match length, longest first.

    A sample belongs to the greatest of up to MAX_LEVELS match lengths ("levels") that it reaches.

    Attributes:
        num_levels: The number of match lengths.
        lengths: The match length of each level, in tokens.
        ends: For each level, the number of samples of this and all longer match lengths.
    """

    matches: Annotated[Sequence[MatchSample], MatchSample, MAX_SAMPLES]
    num_levels: Int64
    lengths: Annotated[Int64s, np.int64, MAX_LEVELS]
    ends: Annotated[Int64s, np.int64, MAX_LEVELS]


class ScanHits(Record):
    """The matches found by the scan of one text: their positions and lengths, and the number of each length.

    The position of a match is the position of the token after it.
    """

    positions: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    lengths: Annotated[Int64s, np.int64, MAX_SCAN_HITS]
    counts: Annotated[Int64s, np.int64, MAX_MATCH_LENGTH + 1]


class SampledHits(Record):
    """The occurrences sampled from one scanned text, grouped by match length ("levels"), longest first.

    Attributes:
        positions: The position after each match.
        ends: For each level, the number of samples of this and all longer match lengths.
        weights: For each level, the number of occurrences that each of its samples stands for.
    """

    positions: Annotated[Int64s, np.int64, MAX_SCANNED_SAMPLES]
    ends: Annotated[Int64s, np.int64, MAX_LEVELS]
    weights: Annotated[Float64s, np.float64, MAX_LEVELS]


class LookupScratch(Record):
    """Scratch memory that all lookups of a drafter share.

    Attributes:
        searches: The address of SegmentSearch[n], the state of the binary search in each of at most n segments.
        expanders: The address of RangeExpander[2 * n], the state of the range expansion in each segment.
        patterns: The address of uint8[PATTERNS_BYTES], the searched tokens in the encoding of each segment.
    """

    searches: Address
    expanders: Address
    patterns: Address
    context_hits: ScanHits
    memtable_hits: ScanHits
    context_samples: SampledHits
    memtable_samples: SampledHits


_MAX_PROPOSALS: Final = 1 + MAX_PROPOSED_TOKENS + MAX_LOOKAHEAD


class ProposalTree(Record):
    """The tree of tokens that other drafters propose after the context. Siblings are different tokens.

    Node PROPOSAL_ROOT stands for the end of the context. Every other node below ``count`` is a token.

    Attributes:
        kinds: The kind of drafter that gave each token its greatest probability.
        probabilities: The greatest acceptance probability that a drafter gave each token, given the tokens before it.
        first_child: The first child of each node; NO_TOKEN if there is none.
        next_sibling: The next sibling of each node; NO_TOKEN if there is none.
        numbers: Scratch, the node of each external proposal.
    """

    count: Int64
    tokens: Annotated[Int64s, np.int64, _MAX_PROPOSALS]
    kinds: Annotated[Int64s, np.int64, _MAX_PROPOSALS]
    probabilities: Annotated[Float64s, np.float64, _MAX_PROPOSALS]
    first_child: Annotated[Int64s, np.int64, _MAX_PROPOSALS]
    next_sibling: Annotated[Int64s, np.int64, _MAX_PROPOSALS]
    numbers: Annotated[Int64s, np.int64, MAX_PROPOSED_TOKENS]


class AgreeingMatch(Record):
    """A text match that continues with the same tokens as a path, i.e. as the draft up to one of its nodes.

    Attributes:
        sample: The index of the match in the `MatchSamples` of the path.
        next_token: The token after the path in the matched text; NO_TOKEN if that text has ended.
    """

    sample: Int64
    next_token: Int64


AgreeingMatches = Sequence[AgreeingMatch]

MAX_VOTED_CANDIDATES: Final = 12
"""The maximum number of candidate tokens per position of a draft tree, except those that token recycling adds.

If there are more, those with the greatest shares of the text matches or the greatest probabilities from other drafters
are selected, see `move_best_to_front`.
"""

MAX_RECYCLED_CANDIDATES: Final = 6
"""The maximum number of candidate tokens that token recycling alone adds at each draft position."""

MAX_CANDIDATES: Final = MAX_VOTED_CANDIDATES + MAX_RECYCLED_CANDIDATES

_MAX_TOKENS: Final = MAX_SAMPLES + 2 + MAX_PROPOSED_TOKENS + MAX_LOOKAHEAD


class TokenVotes(Record):
    """The number of text matches that continue with one candidate token, i.e. the votes for this token.

    Attributes:
        index: The number of such matches in the retrieval cache, by match length.
        context: The number of such matches in the request's context, by match length.
        greatest: The token's greatest share of the matches, or its proposed probability if that is greater.
    """

    index: Annotated[Float64s, np.float64, MAX_LEVELS]
    context: Annotated[Float64s, np.float64, MAX_LEVELS]
    greatest: Float64


class TextVotes(Record):
    """The text matches at one draft position in one kind of text, the request's context or the retrieval cache.

    Attributes:
        support: The number of matches, by match length.
        top: The level (index of the match length) of the longest match that agrees with the draft before the position;
            NO_LEVEL if there is none.
        newest: The recency of the newest match at ``top``; -1 if there is none.
        newest_token: The token after the newest match.
    """

    support: Annotated[Float64s, np.float64, MAX_LEVELS]
    top: Int64
    newest: Int64
    newest_token: Int64


class Votes(Record):
    """The text matches at one draft position, counted by the token that follows them.

    Attributes:
        tokens: The candidate tokens: first those that follow a match, then those from other sources.
        of_token: The matches that continue with each of ``tokens``.
        num_voted: The number of candidate tokens that follow a match.
    """

    tokens: Annotated[Int64s, np.int64, _MAX_TOKENS]
    of_token: Annotated[Sequence[TokenVotes], TokenVotes, _MAX_TOKENS]
    num_voted: Int64
    index: TextVotes
    context: TextVotes


class RecycledTokens(Record):
    """The target's earlier top-k tokens after the same token or pair of tokens, read from a `RecyclingTable`.

    Attributes:
        count: The number of tokens; 0 if there is no entry, NOT_LOOKED_UP if the table was not read.
        is_pair: Whether a pair of tokens matched, not only the last token.
        tokens: The tokens, most probable first.
        shares: The bucket of each token's probability among the top-k tokens, see `share_level`.
    """

    count: Int64
    is_pair: Int64
    tokens: Annotated[Int64s, np.int64, TOP_K]
    shares: Annotated[Int64s, np.int64, TOP_K]


class PositionNoise(Record):
    """The Gumbel noise at one position of a draft, and the scores (log probability plus noise) of tokens there.

    Attributes:
        is_known: 1 if the target samples with known noise, else 0.
        noise: The address of the request's `NoiseRecord`, from which ``request`` and ``window`` are copied.
        context: The text before the draft, int32[start].
        temperature: The request's temperature.
        key: The noise key of the position.
        hashes: For noise that requests share, the result of `window_hash` for each node n of the draft, at index n + 1.
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


class LevelSupport(Record):
    """The text matches at a draft position that have at least a certain match length.

    Attributes:
        level: The index of this match length in the lookup.
        length: The bucket of this match length.
        support: The number of matches.
        support_bucket: The bucket of ``support``.
    """

    level: Int64
    length: Int64
    support: Float64
    support_bucket: Int64


class Candidates(Record):
    """The candidate tokens of one draft position; they are the first tokens of ``votes``.

    Attributes:
        proposals: The tree of tokens that other drafters propose.
        recycled: The top-k tokens that the target had earlier after the tokens before this position.
        cached_sample: The token sampled before with the same Gumbel noise.
        inputs: For each candidate, the index of the table entry of each feature of the acceptance model.
        weight_set: The index of the acceptance model's weight vector for the position.
        levels: Scratch, the match lengths with a match.
    """

    votes: Votes
    proposals: ProposalTree
    recycling_table: Address
    recycled: RecycledTokens
    position_noise: PositionNoise
    cached_sample: CachedSample
    inputs: Annotated[Int64s, np.int64, (MAX_CANDIDATES, NUM_FEATURES)]
    weight_set: Int64
    probabilities: Annotated[Float64s, np.float64, MAX_CANDIDATES]
    levels: Annotated[Sequence[LevelSupport], LevelSupport, MAX_LEVELS]


CONTINUED_CONTEXT: Final = 4096
"""The maximum number of tokens from the end of the context that are kept when the end of a draft is looked up.

These tokens and the draft form one text. New matches of its end are searched in this text and in the retrieval cache.
"""

MAX_FURTHER_LOOKUPS: Final = 5
"""The maximum number of times that a draft chain's text matches are replaced because none of them has a next token.

New matches are found by looking up the last tokens of the draft. The last replacement does not search: it only drops
the matches, so that the chain continues with tokens from other sources.
"""

_MAX_OPEN: Final = MAX_CANDIDATES * (MAX_DRAFT + 1)


class DraftNode(Record):
    """A token of a draft, with the state of the path from the end of the context to this token.

    Attributes:
        token_before: The token before ``token``.
        depth: The number of draft tokens on the path.
        product: The probability that all draft tokens on the path are accepted.
        lookup: The index of the lookup that found the text matches of this path; 0 for that of the context.
        looked_up_at: The depth at which that lookup was made.
        first_match: The index in ``DraftScratch.matches`` of the first match that agrees with the path.
        num_matching: The number of matches that agree with the path.
        follows_prediction: Whether the client's prediction agrees with the path.
        proposal_node: The node of the proposal tree that the path leads to; NO_TOKEN if it is not in the tree.
        best: The index in ``DraftScratch.opened`` of the most probable candidate after the node; NO_TOKEN for none.
    """

    token: Int64
    token_before: Int64
    depth: Int64
    product: Float64
    lookup: Int64
    looked_up_at: Int64
    first_match: Int64
    num_matching: Int64
    follows_prediction: Int64
    proposal_node: Int64
    best: Int64


class OpenCandidate(Record):
    """A candidate token that may be added to a draft.

    Attributes:
        parent: The index of the draft token before it; -1 for the end of the context.
        weight_set: The index of the acceptance model's weight vector for the token; negative once the candidate has
            been recorded for learning.
        inputs: For each feature of the token, the index of its entry in the acceptance model's table.
        product: The probability that the token and all draft tokens before it are accepted.
        probability: The probability that the token is accepted, given that the draft tokens before it are.
    """

    parent: Int64
    token: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, NUM_FEATURES]
    product: Float64
    probability: Float64


class DraftScratch(Record):
    """The scratch memory of a drafter.

    Attributes:
        samples: The matches of the context, then those of further lookups.
        prediction_hits: Scratch for the search in a client's predicted output.
        nodes: The end of the context, then the tokens of the draft.
        matches: The matches that agree with the path to each node, node after node.
        opened: The ``num_opened`` candidates after the nodes.
        heap: A heap of the indices of the ``num_open`` candidates that may be added, the greatest ``product`` first.
        texts: For each further lookup, the text whose last tokens are looked up: the end of the context, then a path.
        lengths: The number of tokens in each of ``texts``.
    """

    samples: Annotated[Sequence[MatchSamples], MatchSamples, 1 + MAX_FURTHER_LOOKUPS]
    lookups: LookupScratch
    prediction_hits: ScanHits
    candidates: Candidates
    nodes: Annotated[Sequence[DraftNode], DraftNode, MAX_DRAFT + 1]
    matches: Annotated[Sequence[AgreeingMatch], AgreeingMatch, (MAX_DRAFT + 2) * MAX_SAMPLES]
    opened: Annotated[Sequence[OpenCandidate], OpenCandidate, _MAX_OPEN]
    num_opened: Int64
    heap: Annotated[Int64s, np.int64, _MAX_OPEN]
    num_open: Int64
    texts: Annotated[TokenIds, np.int32, (MAX_FURTHER_LOOKUPS, CONTINUED_CONTEXT + MAX_DRAFT)]
    lengths: Annotated[Int64s, np.int64, MAX_FURTHER_LOOKUPS]


draft_scratch_at = view_of(DraftScratch)
