"""The kernel of the suffix drafter: learn from what came since, gather evidence, draft."""

from __future__ import annotations

from typing import Final

from ssd.compiled.addresses import TokenIds, float64_array, inlined, int32_array, kernel
from ssd.drafting.suffix.acceptance import model_at
from ssd.drafting.suffix.extend import Out, Wish, chain, expansion_at, grow_tree
from ssd.drafting.suffix.follow import follow, keep
from ssd.drafting.suffix.gather import MAX_LEVELS, Texts, gather
from ssd.drafting.suffix.judge import candidates_at
from ssd.drafting.suffix.learn import begin_lessons, learn_from_context, learn_from_path
from ssd.drafting.suffix.prediction import follow_prediction, place_of
from ssd.drafting.suffix.workspace import CONTINUED_CONTEXT, Frame, frame_at, place
from ssd.retrieval.lanes import open_lanes, search_lanes
from ssd.retrieval.scan import pattern_length
from ssd.retrieval.snapshot import SnapshotRecord, segments_at, snapshot_at

_MOST_CONTINUED: Final = 4
"""Times that a draft is carried on past the end of all it was drawn from."""

_LEAST_CONTINUED: Final = 4
"""Shorter matches do not carry on a draft whose sources have ended: they mostly begin something else."""


@kernel
def _search(frame: Frame, snapshot: SnapshotRecord, texts: Texts, max_length: int, min_length: int) -> int:
    """Fill the pool with what stands after the context's last tokens elsewhere; how many levels."""
    longest = pattern_length(texts.context, max_length)
    if longest < min_length:
        return 0
    segments = segments_at(snapshot.segments, snapshot.num_segments)
    open_lanes(segments, texts.context, longest, frame.patterns, frame.lanes, frame.walkers)
    search_lanes(frame.lanes, snapshot.num_segments)
    return gather(
        texts,
        frame.lanes,
        frame.walkers,
        snapshot.num_segments,
        snapshot.num_static,
        longest,
        min_length,
        MAX_LEVELS,
        frame.own,
        frame.tail,
        frame.pool,
        frame.levels,
    )


@inlined
def _continued(frame: Frame, context: TokenIds, out: Out) -> TokenIds:
    """The end of the context and the draft after it, one text."""
    kept, drafted = min(len(context), CONTINUED_CONTEXT), out.result[0]
    frame.continued[:kept] = context[len(context) - kept :]
    frame.continued[kept : kept + drafted] = out.tokens[:drafted]
    return frame.continued[: kept + drafted]


@kernel
def propose_suffix(workspace: int, snapshot: int, model: int, num_rows: int, max_length: int, min_length: int) -> None:
    """Draft for the first ``num_rows`` rows of the workspace at an address, all of the snapshot and model at theirs.

    Learns first, of every row, what came of its last draft. Writes tokens, probabilities (the estimate of each),
    parents, results, and what the next step of each request may rely on.
    """
    frame, mixer = frame_at(workspace), model_at(model)
    searched = snapshot_at(snapshot)
    ring, tail_start, tail_stop = (
        int32_array(searched.ring, searched.ring_size),
        searched.tail_start,
        searched.tail_stop,
    )
    found, space = candidates_at(frame.candidates), expansion_at(frame.expansion)
    pool, levels, number = frame.pool, frame.levels, searched.table_number
    for row in range(num_rows):
        asked = frame.rows[row]
        context, limit, is_tree = int32_array(asked[0], asked[1]), asked[2], asked[9] != 0
        state, lessons, predicting = frame.states[asked[3]], frame.lessons[asked[3]], frame.predicting[asked[3]]
        out = Out(frame.tokens[row], frame.probabilities[row], frame.parents[row], frame.results[row])
        out.result[:] = 0
        learn_from_context(lessons, context, mixer)
        if limit < 1 or len(context) == 0:
            continue
        begin_lessons(lessons, len(context))
        prediction = int32_array(asked[5], asked[6])
        if len(prediction) > 0:
            follow_prediction(predicting, prediction, context, frame.own)
        at, agreed, is_fresh = place_of(predicting)
        wish = Wish(limit, float64_array(asked[7], asked[8]), asked[4], prediction[at:], agreed, is_fresh)
        texts = Texts(context, ring, tail_start, tail_stop)
        if is_tree:
            num_levels = _search(frame, searched, texts, max_length, min_length)
            grow_tree(texts, pool, levels, num_levels, wish, mixer, found, space, lessons, out)
            out.result[3] = 1
            keep(state, number, texts, pool, levels, 0)
            continue
        num_levels = follow(state, number, texts, max_length, pool, levels)
        has_ended = True
        if num_levels > 0:
            has_ended = chain(texts, pool, levels, num_levels, 0, wish, mixer, found, space, lessons, out)
        if out.result[0] < limit:  # there is nothing to follow, or it does not lead far enough
            begin_lessons(lessons, len(context))
            out.result[:] = 0
            num_levels = _search(frame, searched, texts, max_length, min_length)
            has_ended = chain(texts, pool, levels, num_levels, 0, wish, mixer, found, space, lessons, out)
        keep(state, number, texts, pool, levels, num_levels)
        for _ in range(_MOST_CONTINUED):
            # All that agreed has ended and the draft is still worth more: what it ends with may go on elsewhere.
            drafted = out.result[0]
            if not has_ended or drafted == 0 or drafted == limit:
                break
            texts = Texts(_continued(frame, context, out), ring, tail_start, tail_stop)
            num_levels = _search(frame, searched, texts, max_length, max(min_length, _LEAST_CONTINUED))
            if num_levels == 0:
                break
            has_ended = chain(texts, pool, levels, num_levels, drafted, wish, mixer, found, space, lessons, out)
            if out.result[0] == drafted:
                break


@kernel
def propose_suffix_one(
    workspace: int,
    snapshot: int,
    model: int,
    context: TokenIds,
    limit: int,
    state: int,
    is_new: bool,
    prompt_length: int,
    wish: int,
    max_length: int,
    min_length: int,
) -> None:
    """Place one request in row 0 and draft for it: one call from Python instead of two."""
    place(workspace, 0, context, limit, state, is_new, prompt_length, wish)
    propose_suffix(workspace, snapshot, model, 1, max_length, min_length)


@kernel
def end_request(workspace: int, state: int, num_verified: int, path: TokenIds, model: int) -> None:
    """Learn what came of a request's last draft: it has ended after the tokens of it that ``path`` names."""
    learn_from_path(frame_at(workspace).lessons[state], num_verified, path, model_at(model))
