"""From candidates to drafts: a chain of the most probable, or a tree grown best first."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, float64_array, inlined, int64_array, kernel
from ssd.drafting.suffix.acceptance import INPUTS, Model
from ssd.drafting.suffix.agreement import same_voice
from ssd.drafting.suffix.gather import MAX_SAMPLES, NOTHING, Levels, Pool, Texts, next_token
from ssd.drafting.suffix.judge import Candidates, Position, bring_near, judge, judge_again
from ssd.drafting.suffix.learn import add_lesson, mood_of
from ssd.drafting.suffix.vote import MAX_CANDIDATES, count_again, count_votes, votes_by_source

MAX_DRAFT: Final = 128
"""Longest draft; a greater limit is cut to it."""

_CHAIN_CANDIDATES: Final = 4
"""Tokens judged at a position of a chain: the best of them is hardly ever one with fewer votes."""

_MOST_OPEN: Final = MAX_CANDIDATES * (MAX_DRAFT + 1)
_DEPTH: Final = 0  # columns of a node: draft tokens before it
_FIRST: Final = 1  # the samples that agree with the path to it: where they begin
_ALIVE: Final = 2  # and how many they are
_FOLLOWS: Final = 3  # whether the prediction agrees with the path to it
_BEST: Final = 4  # the most probable candidate after it: its number, NOTHING where there is none
_NODE_COLUMNS: Final = 5
_PARENT: Final = 0  # columns of a candidate
_TOKEN: Final = 1
_SET: Final = 2  # its weight set, _NOTED once it is a lesson
_INPUTS: Final = 3
_OPEN_COLUMNS: Final = _INPUTS + INPUTS
_NOTED: Final = -1

EXPANSION_WORDS: Final = (
    (MAX_DRAFT + 2) * MAX_SAMPLES + MAX_DRAFT * (_NODE_COLUMNS + 1) + _MOST_OPEN * (_OPEN_COLUMNS + 3)
)


class Expansion(NamedTuple):
    """Scratch memory.

    ``alive`` : int64, samples that agree with a draft; a tree keeps those of every node, one after another.
    Of a node: ``nodes`` : int64[MAX_DRAFT, _NODE_COLUMNS], ``products`` : float64, the chance that it is accepted.
    Of a candidate: ``open`` : int64[_MOST_OPEN, _OPEN_COLUMNS], ``open_products``, ``open_chances`` : float64.
    ``heap`` : int64, the numbers of those that may enter the tree, the greatest product first.
    """

    alive: Int64s
    nodes: Int64s
    products: npt.NDArray[np.float64]
    open: Int64s
    open_products: npt.NDArray[np.float64]
    open_chances: npt.NDArray[np.float64]
    heap: Int64s


@inlined
def expansion_at(address: int) -> Expansion:
    """The expansion in the EXPANSION_WORDS words at ``address``."""
    most = (MAX_DRAFT + 2) * MAX_SAMPLES
    nodes = address + 8 * most
    products = nodes + 8 * MAX_DRAFT * _NODE_COLUMNS
    opened = products + 8 * MAX_DRAFT
    open_products = opened + 8 * _MOST_OPEN * _OPEN_COLUMNS
    return Expansion(
        int64_array(address, most),
        int64_array(nodes, MAX_DRAFT * _NODE_COLUMNS).reshape((MAX_DRAFT, _NODE_COLUMNS)),
        float64_array(products, MAX_DRAFT),
        int64_array(opened, _MOST_OPEN * _OPEN_COLUMNS).reshape((_MOST_OPEN, _OPEN_COLUMNS)),
        float64_array(open_products, _MOST_OPEN),
        float64_array(open_products + 8 * _MOST_OPEN, _MOST_OPEN),
        int64_array(open_products + 16 * _MOST_OPEN, _MOST_OPEN),
    )


class Wish(NamedTuple):
    """What is asked for.

    ``limit`` : most tokens. ``prices`` : float64[n >= 1], of the i-th token, not falling; the last one holds beyond.
    ``prompt_length`` : of the request. ``prediction`` : int32, the client's text, from where it is thought to go on;
    ``agreed`` : for how many tokens it has been right; ``is_fresh`` : it has never been wrong.
    """

    limit: int
    prices: npt.NDArray[np.float64]
    prompt_length: int
    prediction: TokenIds
    agreed: int
    is_fresh: bool


class Out(NamedTuple):
    """Where a draft goes: one row of the workspace. ``result`` : its length, of the match, source, is it a tree."""

    tokens: TokenIds
    probabilities: npt.NDArray[np.float64]
    parents: TokenIds
    result: Int64s


SOURCES: Final = ("index", "own", "prediction")
"""By the number in a result."""


@inlined
def _price(wish: Wish, number: int) -> float:
    return float(wish.prices[min(number, len(wish.prices) - 1)])


@inlined
def _predicted(wish: Wish, depth: int) -> int:
    return int(wish.prediction[depth]) if depth < len(wish.prediction) else NOTHING


@inlined
def _name_source(found: Candidates, row: int, levels: Levels, num_levels: int, predicted: int, out: Out) -> None:
    """Note the length of the longest match, and which source gave most of a candidate's votes."""
    index, own = votes_by_source(found.votes, row)
    out.result[1] = levels.lengths[0] if num_levels > 0 else 0
    out.result[2] = 2 if found.votes.tokens[row] == predicted else int(own >= index)


@kernel
def chain(
    texts: Texts,
    pool: Pool,
    levels: Levels,
    num_levels: int,
    begin: int,
    wish: Wish,
    model: Model,
    found: Candidates,
    space: Expansion,
    lessons: Int64s,
    out: Out,
) -> bool:
    """Draft the most probable token while the chance that all of the draft is accepted is worth the next one's price.

    ``begin`` : tokens of ``out`` that are there already and that ``texts.context`` ends with. Returns whether it ended
    because nothing was found to go on with.
    """
    alive, count = space.alive, levels.ends[num_levels - 1] if num_levels > 0 else 0
    for i in range(count):
        alive[i] = i
    follows = begin == 0 or space.nodes[0, _FOLLOWS] == 1
    product = 1.0 if begin == 0 else space.products[0]
    before = int(np.int64(texts.context[-1]))
    mood, votes, size = mood_of(lessons), found.votes, 0
    is_unanimous, run = False, 0  # the last count found one token; so many more it is known to find one
    for depth in range(begin, wish.limit + 1):
        predicted = _predicted(wish, depth) if follows else NOTHING
        at = Position(
            depth, depth - begin, before, predicted, wish.agreed + depth, wish.is_fresh, mood, wish.prompt_length
        )
        if is_unanimous and run == 0:
            run = same_voice(texts, pool, alive, count, depth - begin, wish.limit + 1 - depth)
            bring_near(texts, pool, alive[0], depth - begin, run, before, model, found)
        is_again = is_unanimous and run > 0
        if is_again:
            size, run = 1, run - 1
            count_again(next_token(pool, alive[0], depth - begin, texts), votes)
            judge_again(levels, num_levels, at, model, found)
        else:
            size = count_votes(
                texts, pool, levels, num_levels, alive, count, depth - begin, predicted, _CHAIN_CANDIDATES, votes
            )
            judge(levels, num_levels, size, at, model, found)
        if size == 0:
            space.products[0], space.nodes[0, _FOLLOWS] = product, int(follows)
            return True
        best = 0
        for row in range(1, size):
            if found.chances[row] > found.chances[best]:
                best = row
        token, chance = votes.tokens[best], found.chances[best]
        product *= chance
        pays = depth < wish.limit and product >= _price(wish, depth)
        # The first one that is left out is a lesson too: it may have been worth its price.
        add_lesson(lessons, token, depth - 1, depth, found.sets[best], found.inputs[best], pays)
        if not pays:
            return False
        if depth == 0:
            _name_source(found, best, levels, num_levels, predicted, out)
        before = token
        out.tokens[depth], out.probabilities[depth] = token, chance
        out.result[0] = depth + 1
        follows = follows and predicted == token
        if not is_again:
            kept = 0
            for i in range(count):
                alive[kept] = alive[i]
                kept += votes.nexts[i] == token
            is_unanimous = kept == count and count > 0 and predicted < 0
            count = kept
    return False


@inlined
def _sift_up(space: Expansion, place: int) -> None:
    heap, products = space.heap, space.open_products
    while place > 0 and products[heap[place]] > products[heap[(place - 1) // 2]]:
        above = (place - 1) // 2
        heap[place], heap[above] = heap[above], heap[place]
        place = above


@inlined
def _pop(space: Expansion, size: int) -> int:
    """Take the first of a heap of ``size``."""
    heap, products = space.heap, space.open_products
    first = heap[0]
    heap[0] = heap[size - 1]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and products[heap[child + 1]] > products[heap[child]]:
            child += 1
        if products[heap[child]] <= products[heap[place]]:
            break
        heap[place], heap[child] = heap[child], heap[place]
        place = child
    return int(first)


@inlined
def _note(space: Expansion, number: int, lessons: Int64s, drafted: bool) -> None:
    """Make a lesson of a candidate, once."""
    entry = space.open[number]
    if entry[_SET] != _NOTED:
        parent = entry[_PARENT]
        depth = space.nodes[parent, _DEPTH] + 1 if parent >= 0 else 0
        add_lesson(lessons, entry[_TOKEN], parent, depth, entry[_SET], entry[_INPUTS:], drafted)
        entry[_SET] = _NOTED


@kernel
def grow_tree(
    texts: Texts,
    pool: Pool,
    levels: Levels,
    num_levels: int,
    wish: Wish,
    model: Model,
    found: Candidates,
    space: Expansion,
    lessons: Int64s,
    out: Out,
) -> None:
    """Add the node that is most probably accepted while that is worth the next one's price: best first.

    A node's chance is the product of those on its path, so none is above its parent's and the order is that of all
    nodes there could be: no tree of as many nodes from these candidates has a greater expected number of accepted
    tokens. The best candidate of every place that was looked at is a lesson, however little it seems worth: what is
    never drafted could else never be found to be underrated. O(limit * samples).
    """
    alive, nodes, heap = space.alive, space.nodes, space.heap
    count = levels.ends[num_levels - 1] if num_levels > 0 else 0
    for i in range(count):
        alive[i] = i
    first, num_nodes, num_open, num_opened, parent, follows, best_of_all = 0, 0, 0, 0, -1, True, NOTHING
    product, depth, before = 1.0, 0, int(np.int64(texts.context[-1]))
    mood, votes = mood_of(lessons), found.votes
    while True:
        predicted = _predicted(wish, depth) if follows else NOTHING
        at = Position(depth, depth, before, predicted, wish.agreed + depth, wish.is_fresh, mood, wish.prompt_length)
        size = count_votes(
            texts, pool, levels, num_levels, alive[first:], count, depth, predicted, MAX_CANDIDATES, votes
        )
        judge(levels, num_levels, size, at, model, found)
        if num_nodes == 0 and size > 0:
            _name_source(found, 0, levels, num_levels, predicted, out)
        best = 0
        for row in range(1, size):
            if found.chances[row] > found.chances[best]:
                best = row
        best_here = NOTHING
        for row in range(size):
            chance = found.chances[row]
            is_hopeful = product * chance >= 0.5 * _price(wish, num_nodes)
            if not is_hopeful and row != best:
                continue
            entry = space.open[num_opened]
            entry[_PARENT], entry[_TOKEN], entry[_SET] = parent, votes.tokens[row], found.sets[row]
            for i in range(INPUTS):
                entry[_INPUTS + i] = found.inputs[row, i]
            space.open_products[num_opened], space.open_chances[num_opened] = product * chance, chance
            if row == best:
                best_here = num_opened
            if is_hopeful:
                heap[num_open] = num_opened
                _sift_up(space, num_open)
                num_open += 1
            num_opened += 1
        if parent >= 0:
            nodes[parent, _BEST] = best_here
        else:
            best_of_all = best_here
        if num_open == 0:
            break
        taken = _pop(space, num_open)
        num_open -= 1
        entry, product = space.open[taken], space.open_products[taken]
        parent = entry[_PARENT]
        depth = nodes[parent, _DEPTH] + 1 if parent >= 0 else 0
        pays = num_nodes < wish.limit and product >= _price(wish, num_nodes)
        _note(space, taken, lessons, pays)
        if not pays:
            break
        before = entry[_TOKEN]
        out.tokens[num_nodes], out.probabilities[num_nodes] = before, space.open_chances[taken]
        out.parents[num_nodes] = parent
        out.result[0] = num_nodes + 1
        # Its samples are those of its parent that go on with it.
        from_first = nodes[parent, _FIRST] if parent >= 0 else 0
        from_count = nodes[parent, _ALIVE] if parent >= 0 else (levels.ends[num_levels - 1] if num_levels > 0 else 0)
        first = nodes[num_nodes - 1, _FIRST] + nodes[num_nodes - 1, _ALIVE] if num_nodes > 0 else from_count
        count = 0
        for i in range(from_count):
            alive[first + count] = alive[from_first + i]
            count += next_token(pool, alive[from_first + i], depth, texts) == before
        follows = (parent < 0 or nodes[parent, _FOLLOWS] == 1) and _predicted(wish, depth) == before
        node = nodes[num_nodes]
        node[_DEPTH], node[_FIRST], node[_ALIVE], node[_FOLLOWS] = depth, first, count, int(follows)
        parent = num_nodes
        depth += 1
        num_nodes += 1
    # Those left out come after those drafted: a lesson of a node has the node's number.
    for place in range(-1, num_nodes):
        left_out = nodes[place, _BEST] if place >= 0 else best_of_all
        if left_out != NOTHING:
            _note(space, left_out, lessons, False)
