"""Collect the tokens proposed by other drafters, and lookahead tokens, in one tree.

Lookahead tokens are those that the target sampled after a rejected draft token. Jacobi decoding (Santilli et al. 2023,
arXiv 2305.10427) and lookahead decoding (Fu et al. 2024, arXiv 2402.02057) verify such tokens in the next forward pass;
here they are scored together with all other candidates. A sampled lookahead token was drawn with the Gumbel noise of
its position, which the next pass uses at this position too.
"""

from __future__ import annotations

from typing import Final

from ssd.drafting.draft_records import MAX_LOOKAHEAD, NO_TOKEN, DraftParams, Lookahead
from ssd.drafting.draft_scratch import ProposalTree
from ssd.drafting.protocol import LOOKAHEAD, MAX_PROPOSED_TOKENS, NUM_PROPOSER_KINDS
from ssd.jit.addresses import Float64s, Int64s, TokenIds, float64_array, inlined, int32_array, kernel

PROPOSAL_ROOT: Final = 0
"""The root of the tree of proposed tokens, which stands for the end of the context."""


@inlined
def clear_tree(proposals: ProposalTree) -> None:
    proposals.count, proposals.first_child[PROPOSAL_ROOT] = 1, NO_TOKEN


@inlined
def child_of(proposals: ProposalTree, node: int, token: int) -> int:
    """Return the child of a proposal-tree node with this token; NO_TOKEN if there is none or ``node`` is NO_TOKEN."""
    child = proposals.first_child[node] if node >= 0 else NO_TOKEN
    while child >= 0 and proposals.tokens[child] != token:
        child = proposals.next_sibling[child]
    return int(child)


@inlined
def has_children(proposals: ProposalTree, node: int) -> bool:
    """Return whether other drafters propose a token after a node of the proposal tree; False for NO_TOKEN."""
    return bool(node >= 0 and proposals.first_child[node] >= 0)


@inlined
def best_child(proposals: ProposalTree, node: int) -> int:
    """Return the most probable token that other drafters propose after a node of the proposal tree (not NO_TOKEN)."""
    best = proposals.first_child[node]
    child = proposals.next_sibling[best]
    while child >= 0:
        if proposals.probabilities[child] > proposals.probabilities[best]:
            best = child
        child = proposals.next_sibling[child]
    return int(best)


@inlined
def add_proposal(proposals: ProposalTree, parent: int, token: int, probability: float, kind: int) -> int:
    """Add a token as a child of a node of the proposal tree and return the token's node; NO_TOKEN if it was ignored.

    If several drafters propose the same token at the same position, the greatest probability is used. A token is
    ignored if it is negative or if ``parent`` is NO_TOKEN. A ``probability`` of NaN counts as 0.
    """
    if parent < 0 or token < 0 or kind < 0 or kind >= NUM_PROPOSER_KINDS:
        return NO_TOKEN
    probability = probability if probability > 0.0 else 0.0  # also if it is NaN
    last, node = NO_TOKEN, proposals.first_child[parent]
    while node >= 0 and proposals.tokens[node] != token:
        last, node = node, proposals.next_sibling[node]
    if node < 0:
        node = proposals.count
        proposals.count = node + 1
        if last < 0:
            proposals.first_child[parent] = node
        else:
            proposals.next_sibling[last] = node
        proposals.tokens[node], proposals.first_child[node], proposals.next_sibling[node] = token, NO_TOKEN, NO_TOKEN
        proposals.kinds[node], proposals.probabilities[node] = kind, probability
    elif probability > proposals.probabilities[node]:
        proposals.kinds[node], proposals.probabilities[node] = kind, probability
    return int(node)


@kernel
def build_tree(
    proposals: ProposalTree, tokens: TokenIds, parents: TokenIds, probabilities: Float64s, kinds: TokenIds
) -> None:
    """Fill the proposal tree with the tokens that other drafters propose (`ExternalProposals`). O(tokens * children).

    A token whose parent does not come before it is ignored, and so are its descendants.
    """
    clear_tree(proposals)
    for i in range(min(len(tokens), MAX_PROPOSED_TOKENS)):
        parent = parents[i]
        behind = NO_TOKEN
        if parent == -1:
            behind = PROPOSAL_ROOT
        elif 0 <= parent < i:
            behind = proposals.numbers[parent]
        proposals.numbers[i] = add_proposal(proposals, behind, tokens[i], probabilities[i], kinds[i])


_DRAFTED_PROBABILITY: Final = 0.7
"""The initial acceptance probability of a lookahead token that equals the draft token at the same position.

Lookahead tokens are those that the target sampled after a rejected draft token. The acceptance model learns the
actual probability.
"""

_LOOKAHEAD_PROBABILITY: Final = 0.3
"""The initial acceptance probability of a lookahead token that differs from the draft token at the same position.

Lookahead tokens are those that the target sampled after a rejected draft token.
"""


@inlined
def _next_input(parents: Int64s, is_tree: bool, count: int, node: int, token: int, input_ids: Int64s) -> int:
    if not is_tree:
        return node + 1 if node + 1 < count else NO_TOKEN
    first = NO_TOKEN
    for child in range(node + 1, count):
        if parents[child] == node:
            if input_ids[child] == token:
                return child
            if first == NO_TOKEN:
                first = child
    return first


@inlined
def save_lookahead(
    lookahead: Lookahead, input_ids: Int64s, parents: Int64s, is_tree: bool, count: int, sampled_ids: Int64s, end: int
) -> None:
    """Save the tokens that the target sampled after a row's first rejected draft token, as candidates for later drafts.

    ``end`` is the last accepted position; ``parents`` is used only if ``is_tree``. O(positions * MAX_LOOKAHEAD) for a
    tree, O(MAX_LOOKAHEAD) for a chain.
    """
    size, node = 0, NO_TOKEN
    if 0 <= end < count:
        lookahead.before, lookahead.last = input_ids[end], sampled_ids[end]
        node = _next_input(parents, is_tree, count, end, sampled_ids[end], input_ids)
    while node >= 0 and size < MAX_LOOKAHEAD:
        after = _next_input(parents, is_tree, count, node, sampled_ids[node], input_ids)
        lookahead.tokens[size] = sampled_ids[node]
        lookahead.was_drafted[size] = int(after >= 0 and input_ids[after] == sampled_ids[node])
        node, size = after, size + 1
    lookahead.count = size


@inlined
def propose_lookahead(lookahead: Lookahead, context: TokenIds, proposals: ProposalTree) -> None:
    """Add the saved lookahead tokens to the proposal tree, if the context ends with the two tokens before them."""
    n = len(context)
    if lookahead.count == 0 or n < 2 or context[n - 1] != lookahead.last or context[n - 2] != lookahead.before:
        return
    node = PROPOSAL_ROOT
    for i in range(lookahead.count):
        node = add_proposal(
            proposals,
            node,
            lookahead.tokens[i],
            _DRAFTED_PROBABILITY if lookahead.was_drafted[i] else _LOOKAHEAD_PROBABILITY,
            LOOKAHEAD,
        )


@inlined
def build_proposals(params: DraftParams, proposals: ProposalTree) -> None:
    """Fill the proposal tree with the tokens that other drafters propose for a request."""
    number = params.num_proposed
    if number == 0:
        clear_tree(proposals)
        return
    tokens, parents = int32_array(params.proposed_tokens, number), int32_array(params.proposed_parents, number)
    build_tree(
        proposals,
        tokens,
        parents,
        float64_array(params.proposed_probabilities, number),
        int32_array(params.proposed_kinds, number),
    )
