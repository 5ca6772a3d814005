"""The kernel of the suffix drafter: evidence at several match lengths, a chain of its most probable tokens."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.drafting.acceptance import Weights, evidence_logit, length_logit
from ssd.drafting.cursor import follow, keep
from ssd.drafting.evidence import MAX_LEVELS, MAX_SAMPLES, NOTHING, Levels, Pool, Texts, gather, is_own, next_token
from ssd.drafting.workspace import VOTES_INT64S, frame_at, place
from ssd.retrieval.memory import Int64s, TokenIds, float64_array, inlined, int32_array, int64_array, kernel
from ssd.retrieval.scan import pattern_length
from ssd.retrieval.search import open_lanes, search_lanes, table_at, table_number, tail_at

_SLOTS: Final = 512  # of the table of candidates, a power of two of at least twice MAX_SAMPLES

assert _SLOTS >= 2 * MAX_SAMPLES and VOTES_INT64S >= 7 * _SLOTS + 8 + 5 * MAX_LEVELS


class Votes(NamedTuple):
    """Candidates of one position in an open-addressed table, and the samples that still agree with the draft.

    ``epoch`` : int64[_SLOTS], the turn that a slot was last used in, and ``turn`` : int64[1], the current one: nothing
    has to be cleared. ``alive`` : int64[MAX_SAMPLES], indices into the pool; ``nexts`` : what each goes on with.
    ``known`` : float64[MAX_LEVELS, 5], of each level: support, votes, own votes, what ``evidence_logit`` said of them,
        and whether the level was asked at all.
    """

    epoch: Int64s
    token: Int64s
    recency: Int64s
    all: npt.NDArray[np.float64]
    own: npt.NDArray[np.float64]
    alive: Int64s
    nexts: Int64s
    turn: Int64s
    known: npt.NDArray[np.float64]


class Judge(NamedTuple):
    """What a candidate is judged by: the request's bias, the least chance of a whole draft, the model's weights."""

    bias: float
    threshold: float
    weights: Weights


class Out(NamedTuple):
    """Where a draft goes: one row of the workspace."""

    tokens: TokenIds
    probabilities: npt.NDArray[np.float64]
    result: Int64s


@inlined
def votes_at(address: int) -> Votes:
    """The votes in the VOTES_INT64S words at ``address``."""
    step = 8 * _SLOTS
    return Votes(
        int64_array(address, _SLOTS),
        int64_array(address + step, _SLOTS),
        int64_array(address + 2 * step, _SLOTS),
        float64_array(address + 3 * step, _SLOTS),
        float64_array(address + 4 * step, _SLOTS),
        int64_array(address + 5 * step, MAX_SAMPLES),
        int64_array(address + 6 * step, MAX_SAMPLES),
        int64_array(address + 7 * step, 1),
        float64_array(address + 7 * step + 64, 5 * MAX_LEVELS).reshape((MAX_LEVELS, 5)),
    )


@inlined
def _slot_of(token: int, votes: Votes, turn: int) -> int:
    """The candidate's slot, cleared if it is new."""
    slot = (token * 40503) & (_SLOTS - 1)
    while votes.epoch[slot] == turn and votes.token[slot] != token:
        slot = (slot + 1) & (_SLOTS - 1)
    if votes.epoch[slot] != turn:
        votes.epoch[slot], votes.token[slot], votes.recency[slot] = turn, token, -1
        votes.all[slot], votes.own[slot] = 0.0, 0.0
    return slot


@inlined
def _evidence(known: npt.NDArray[np.float64], weights: Weights, support: float, votes: float, own: float) -> float:
    """``evidence_logit``, remembered: mostly a level's evidence is the same as one token before."""
    if known[0] != support or known[1] != votes or known[2] != own:
        known[0], known[1], known[2] = support, votes, own
        known[3] = evidence_logit(weights, support, votes, own)
    return float(known[3])


@inlined
def _read_nexts(pool: Pool, alive: int, depth: int, texts: Texts, votes: Votes) -> bool:
    """Fill ``nexts``; whether all are the same."""
    differ = 0
    for i in range(alive):
        token = next_token(pool, votes.alive[i], depth, texts)
        votes.nexts[i] = token
        differ |= token ^ votes.nexts[0]
    return differ == 0


@kernel
def chain(
    texts: Texts,
    pool: Pool,
    levels: Levels,
    num_levels: int,
    limit: int,
    judge: Judge,
    votes: Votes,
    out: Out,
) -> None:
    """Extend the draft by the token of the level with the highest estimate, while the product of estimates is enough.

    At each level the samples that agree with the draft so far vote for what they go on with, ties to the most recent;
    those that have ended count as support for none. A level that adds no sample to a longer one is not asked: it has
    the same evidence for less agreement.
    """
    out.result[:] = 0
    if num_levels == 0:
        return
    alive = levels.ends[num_levels - 1]
    for i in range(alive):
        votes.alive[i] = i
    votes.known[:, 0] = -1.0
    product, was_unanimous = 1.0, False
    for depth in range(limit):
        best_token, best_logit, best_level, best_own = NOTHING, -1e30, 0, False
        is_unanimous = _read_nexts(pool, alive, depth, texts, votes)
        if is_unanimous and was_unanimous:
            # The same samples with one voice, as one token before: their evidence stays what it was.
            if votes.nexts[0] >= 0:
                for level in range(num_levels):
                    logit = votes.known[level, 3] + length_logit(judge.weights, levels.lengths[level] + depth, depth)
                    if votes.known[level, 4] > 0.0 and logit > best_logit:
                        best_token, best_logit = int(votes.nexts[0]), logit
        else:
            votes.turn[0] += 1
            turn, leader, support, most, own, at = votes.turn[0], NOTHING, 0.0, 0.0, 0.0, 0
            for level in range(num_levels):
                begin = at
                while at < alive and votes.alive[at] < levels.ends[level]:
                    sample, token = votes.alive[at], votes.nexts[at]
                    weight = pool.weights[sample]
                    at += 1
                    support += weight
                    if token < 0:
                        continue
                    slot = _slot_of(token, votes, turn)
                    votes.all[slot] += weight
                    if is_own(pool, sample):
                        votes.own[slot] += weight
                    votes.recency[slot] = max(votes.recency[slot], pool.recency[sample])
                    if votes.all[slot] > most or (
                        votes.all[slot] == most and votes.recency[slot] > votes.recency[_slot_of(leader, votes, turn)]
                    ):
                        leader, most = int(token), votes.all[slot]
                    if token == leader:
                        own = votes.own[slot]
                votes.known[level, 4] = 0.0
                if at == begin or leader < 0:
                    continue
                votes.known[level, 4] = 1.0
                logit = _evidence(votes.known[level], judge.weights, support, most, own) + length_logit(
                    judge.weights, levels.lengths[level] + depth, depth
                )
                if logit > best_logit:
                    best_token, best_logit, best_level, best_own = leader, logit, level, 2.0 * own >= most
        if best_token < 0:
            break
        probability = 1.0 / (1.0 + math.exp(-(best_logit + judge.bias)))
        product *= probability
        if product < judge.threshold:
            break
        out.tokens[depth] = best_token
        out.probabilities[depth] = probability
        if depth == 0:
            out.result[1] = levels.lengths[best_level]
            out.result[2] = 1 if best_own else 0
        out.result[0] = depth + 1
        was_unanimous = is_unanimous
        if not is_unanimous:
            kept = 0
            for i in range(alive):
                votes.alive[kept] = votes.alive[i]
                kept += votes.nexts[i] == best_token
            alive = kept


@kernel
def propose_suffix(
    workspace: int, snapshot: int, num_rows: int, max_length: int, min_length: int, threshold: float, weights: Weights
) -> None:
    """Draft for the first ``num_rows`` rows of the workspace at an address, all of the snapshot at an address.

    Writes tokens, probabilities (the estimate of each), results and what the next step of each request may rely on.
    """
    frame = frame_at(workspace)
    table, (ring, tail_start, tail_stop) = table_at(snapshot), tail_at(snapshot)
    lanes, walkers, rows, votes = frame.lanes, frame.walkers, frame.rows, votes_at(frame.votes)
    pool, levels, number = frame.pool, frame.levels, table_number(table)
    for row in range(num_rows):
        context, limit = int32_array(rows[row, 0], rows[row, 1]), rows[row, 2]
        texts, state = Texts(context, ring, tail_start, tail_stop), frame.states[rows[row, 3]]
        judge = Judge(frame.biases[row], threshold, weights)
        out = Out(frame.tokens[row], frame.probabilities[row], frame.results[row])
        out.result[:] = 0
        longest = pattern_length(context, max_length) if limit > 0 else 0
        if longest < min_length:
            continue
        num_levels = follow(state, number, texts, max_length, pool, levels)
        chain(texts, pool, levels, num_levels, limit, judge, votes, out)
        if out.result[0] < limit:  # there is nothing to follow, or it does not lead far enough
            open_lanes(table, context, longest, frame.patterns, lanes, walkers)
            search_lanes(lanes, len(table))
            num_levels = gather(
                texts, lanes, walkers, len(table), longest, min_length, MAX_LEVELS, frame.own, frame.tail, pool, levels
            )
            chain(texts, pool, levels, num_levels, limit, judge, votes, out)
        keep(state, number, texts, pool, levels, num_levels)


@kernel
def propose_suffix_one(
    workspace: int,
    snapshot: int,
    context: TokenIds,
    limit: int,
    bias: float,
    state: int,
    is_new: bool,
    max_length: int,
    min_length: int,
    threshold: float,
    weights: Weights,
) -> None:
    """Place one request in row 0 and draft for it: one call from Python instead of two."""
    place(workspace, 0, context, limit, bias, state, is_new)
    propose_suffix(workspace, snapshot, 1, max_length, min_length, threshold, weights)
