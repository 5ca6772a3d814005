"""What is proposed without a lookup: by the client's prediction, by costlier sources, by the target's guesses.

OpenAI's predicted outputs: the client sends text that most of the output will equal, such as the file to be edited. The
output is followed in it; where it differs the place is found again behind the edit. What sources and guesses offer
after a context is a forest, walked beside the draft.

A guess is what the target chose behind a token that was wrong, at the same places of the text that goes on. Jacobi
decoding (Santilli et al. 2023, arXiv 2305.10427) and lookahead decoding (Fu et al. 2024, arXiv 2402.02057) feed
such guesses again; here they are offered, and judged with all else. A sampled guess was chosen with the noise of its
place, which is the noise of the next pass there.
"""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import (
    Float64s,
    Int64,
    Int64s,
    Record,
    TokenIds,
    float64_array,
    inlined,
    int32_array,
    kernel,
)
from ssd.drafting.draft_records import DraftParams
from ssd.drafting.lookup import NOTHING, Hits
from ssd.drafting.protocol import LOOKAHEAD, MAX_PROPOSED_TOKENS, NUM_PROPOSER_KINDS
from ssd.retrieval.search import scan

_LONGEST: Final = 32

_FAR: Final = 64
"""A single token that agrees means little so far from where the output left."""


class PredictionPlace(Record):
    """Where in its prediction a request's output is.

    ``place`` : where it is thought to go on; ``agreed`` : tokens before that which agree, since the last difference.
    ``num_followed`` : length of the context that was followed so far. ``was_wrong`` : whether any token differed.
    """

    place: Int64
    agreed: Int64
    num_followed: Int64
    was_wrong: Int64


@inlined
def begin_prediction(state: PredictionPlace, prompt_length: int) -> None:
    """Begin with a request, whose output is thought to begin as the prediction does."""
    state.place, state.agreed, state.num_followed, state.was_wrong = 0, 0, prompt_length, 0


@kernel
def follow_prediction(state: PredictionPlace, prediction: TokenIds, context: TokenIds, hits: Hits) -> None:
    """Follow what came since. O(new tokens), and O(prediction) for each of which that differs.

    Where a token differs the place moves on by one, as if one was replaced by one, and the context's last tokens are
    sought in all of the prediction: the longest agreement wins, the nearest to the old place among equals.
    """
    place, agreed = state.place, state.agreed
    for i in range(state.num_followed, len(context)):
        if place < len(prediction) and prediction[place] == context[i]:
            place, agreed = place + 1, agreed + 1
            continue
        place, agreed = min(place + 1, len(prediction)), 0
        state.was_wrong = 1
    state.num_followed = len(context)
    if state.was_wrong and agreed < _LONGEST:
        found = scan(prediction, 0, len(prediction), context, min(len(context), _LONGEST), hits.positions, hits.lengths)
        best, longest = place, agreed
        for hit in range(found):
            length, distance = hits.lengths[hit], abs(hits.positions[hit] - place)
            is_nearer = length == longest and length > 0 and distance < abs(best - place)
            if (length > longest or is_nearer) and (length > 1 or distance <= _FAR):
                best, longest = hits.positions[hit], length
        place, agreed = best, longest
    state.place, state.agreed = place, agreed


MAX_GUESSED: Final = 16
"""Tokens that the target guessed, offered beside what a request brings."""

ROOT: Final = 0
"""The node of the context's end."""

_MOST_NODES: Final = 1 + MAX_PROPOSED_TOKENS + MAX_GUESSED


class Forest(Record):
    """Offered tokens, of which no two behind the same ones are equal.

    Node ROOT is the context's end, the other nodes up to ``count`` are a token each: ``tokens``; ``kinds`` : which
    source gives it the greatest chance, ``chances`` : that chance. ``first`` : its first child, ``next`` : the next
    child of its parent; NOTHING where there is none. ``numbers`` : scratch, the node of each token brought.
    """

    count: Int64
    tokens: Annotated[Int64s, np.int64, _MOST_NODES]
    kinds: Annotated[Int64s, np.int64, _MOST_NODES]
    chances: Annotated[Float64s, np.float64, _MOST_NODES]
    first: Annotated[Int64s, np.int64, _MOST_NODES]
    next: Annotated[Int64s, np.int64, _MOST_NODES]
    numbers: Annotated[Int64s, np.int64, MAX_PROPOSED_TOKENS]


@inlined
def clear_forest(forest: Forest) -> None:
    """Nothing is offered."""
    forest.count, forest.first[ROOT] = 1, NOTHING


@inlined
def child_of(forest: Forest, node: int, token: int) -> int:
    """The child of a node that is ``token``, NOTHING where there is none, nor of NOTHING. O(children)."""
    child = forest.first[node] if node >= 0 else NOTHING
    while child >= 0 and forest.tokens[child] != token:
        child = forest.next[child]
    return int(child)


@inlined
def has_children(forest: Forest, node: int) -> bool:
    """Whether anything is offered behind a node; not behind NOTHING."""
    return bool(node >= 0 and forest.first[node] >= 0)


@inlined
def best_child(forest: Forest, node: int) -> int:
    """The child of a node with the greatest chance, of equal ones the first; the node must have one. O(children)."""
    best = forest.first[node]
    child = forest.next[best]
    while child >= 0:
        if forest.chances[child] > forest.chances[best]:
            best = child
        child = forest.next[child]
    return int(best)


@inlined
def offer(forest: Forest, parent: int, token: int, chance: float, kind: int) -> int:
    """Add a token behind a node: its node. Behind NOTHING there is nothing, and what is no token is left out.

    Where several sources offer the same token behind the same ones, the greatest chance counts, of equal ones the
    first. O(children).
    """
    if parent < 0 or token < 0 or kind < 0 or kind >= NUM_PROPOSER_KINDS:
        return NOTHING
    chance = chance if chance > 0.0 else 0.0  # also of what is no number
    last, node = NOTHING, forest.first[parent]
    while node >= 0 and forest.tokens[node] != token:
        last, node = node, forest.next[node]
    if node < 0:
        node = forest.count
        forest.count = node + 1
        if last < 0:
            forest.first[parent] = node
        else:
            forest.next[last] = node
        forest.tokens[node], forest.first[node], forest.next[node] = token, NOTHING, NOTHING
        forest.kinds[node], forest.chances[node] = kind, chance
    elif chance > forest.chances[node]:
        forest.kinds[node], forest.chances[node] = kind, chance
    return int(node)


@kernel
def plant(forest: Forest, tokens: TokenIds, parents: TokenIds, chances: Float64s, kinds: TokenIds) -> None:
    """Make what a request brings the forest, see `ExternalProposals`.

    A token whose parent does not come before it is left out, and all that goes on from it. O(tokens * children).
    """
    clear_forest(forest)
    for i in range(min(len(tokens), MAX_PROPOSED_TOKENS)):
        parent = parents[i]
        behind = NOTHING
        if parent == -1:
            behind = ROOT
        elif 0 <= parent < i:
            behind = forest.numbers[parent]
        forest.numbers[i] = offer(forest, behind, tokens[i], chances[i], kinds[i])


_DRAFTED_TOO: Final = 0.7
"""Chance that is given to a guess which the draft said as well, though behind another token."""

_GUESSED: Final = 0.3
"""Of another one. What either is worth is learned."""


class Guesses(Record):
    """Kept of a request's last pass: ``count`` tokens, one after the other, and whether the draft said each too.

    ``before``, ``last`` : the two tokens that the text ended with then, which the guesses come after.
    """

    count: Int64
    before: Int64
    last: Int64
    tokens: Annotated[Int64s, np.int64, MAX_GUESSED]
    drafted_too: Annotated[Int64s, np.int64, MAX_GUESSED]


@inlined
def _next_fed(parents: Int64s, is_tree: bool, count: int, node: int, token: int, fed: Int64s) -> int:
    """What was fed behind a node: ``token`` if it was, else the first; NOTHING where the draft ended."""
    if not is_tree:
        return node + 1 if node + 1 < count else NOTHING
    first = NOTHING
    for child in range(node + 1, count):
        if parents[child] == node:
            if fed[child] == token:
                return child
            if first == NOTHING:
                first = child
    return first


@inlined
def keep_guesses(
    guesses: Guesses, fed: Int64s, parents: Int64s, is_tree: bool, count: int, chosen: Int64s, end: int
) -> None:
    """Keep what was chosen behind the first wrong token of one row, and on along its draft.

    The row as `ScoredPass` has it, ``count`` positions of it; ``end`` : the last of those that were right. O(positions
    * guesses), of a chain O(guesses).
    """
    size, node = 0, NOTHING
    if 0 <= end < count:
        guesses.before, guesses.last = fed[end], chosen[end]
        node = _next_fed(parents, is_tree, count, end, chosen[end], fed)
    while node >= 0 and size < MAX_GUESSED:
        after = _next_fed(parents, is_tree, count, node, chosen[node], fed)
        guesses.tokens[size] = chosen[node]
        guesses.drafted_too[size] = int(after >= 0 and fed[after] == chosen[node])
        node, size = after, size + 1
    guesses.count = size


@inlined
def offer_guesses(guesses: Guesses, context: TokenIds, forest: Forest) -> None:
    """Add to the forest what was guessed, where the context is that of the last pass. O(guesses)."""
    n = len(context)
    if guesses.count == 0 or n < 2 or context[n - 1] != guesses.last or context[n - 2] != guesses.before:
        return
    node = ROOT
    for i in range(guesses.count):
        node = offer(forest, node, guesses.tokens[i], _DRAFTED_TOO if guesses.drafted_too[i] else _GUESSED, LOOKAHEAD)


@inlined
def predicted_token(params: DraftParams, prediction: PredictionPlace, depth: int) -> int:
    """What the client's prediction has ``depth`` tokens on, NOTHING where it has ended."""
    at = prediction.place + depth
    return (
        int(int32_array(params.prediction, params.prediction_length)[at]) if at < params.prediction_length else NOTHING
    )


@inlined
def plant_offers(params: DraftParams, forest: Forest) -> None:
    """Make what the request brings the forest."""
    number = params.num_proposed
    if number == 0:
        clear_forest(forest)
        return
    tokens, parents = int32_array(params.proposed_tokens, number), int32_array(params.proposed_parents, number)
    plant(
        forest,
        tokens,
        parents,
        float64_array(params.proposed_probabilities, number),
        int32_array(params.proposed_kinds, number),
    )
