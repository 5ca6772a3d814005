"""The kernel of the suffix drafter: learn from what came since, look up, draft."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import (
    Address,
    Int64s,
    Record,
    TokenIds,
    inlined,
    int32_array,
    kernel,
    view_of,
)
from ssd.drafting.acceptance import Model, model_at
from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, DraftRecord, clear_draft
from ssd.drafting.foreseen import foresee
from ssd.drafting.grow import (
    CONTINUED_CONTEXT,
    LEAST_CONTINUED,
    ChainScratch,
    FurtherLookups,
    TreeScratch,
    begin_text,
    chain,
    grow_tree,
)
from ssd.drafting.judge import Candidates, JudgedDraft, begin_draft, forget_draft, learn_from_context, learn_from_path
from ssd.drafting.lookup import (
    EVIDENCE_BYTES,
    NO_TABLE,
    Evidence,
    Followed,
    Hits,
    LookupScratch,
    Texts,
    evidence_at,
    follow,
    keep,
    look_up,
    texts_of,
)
from ssd.drafting.offered import (
    Guesses,
    PredictionPlace,
    begin_prediction,
    follow_prediction,
    keep_guesses,
    offer_guesses,
    plant_offers,
)
from ssd.retrieval.snapshot import SnapshotRecord, snapshot_at


class RequestState(Record):
    """What is kept of a request from one step to the next."""

    followed: Followed
    judged: JudgedDraft
    prediction: PredictionPlace
    guesses: Guesses


class DraftRow(Record):
    """One sequence as it is drafted for: what is asked, what was drafted last, what is kept until it ends.

    It stays where it is for as long as the sequence is drafted for.
    """

    params: DraftParams
    draft: DraftRecord
    state: RequestState


class Frame(Record):
    """What kernels find in a workspace: scratch.

    ``evidences`` : Evidence[1 + MOST_CARRIED], of the row that is drafted for, and of a tree's further lookups.
    """

    evidences: Address
    lookups: LookupScratch
    prediction_hits: Hits
    candidates: Candidates
    chain: ChainScratch
    tree: TreeScratch
    continued: Annotated[TokenIds, np.int32, CONTINUED_CONTEXT + MAX_DRAFT]


frame_at, row_at = view_of(Frame), view_of(DraftRow)


@inlined
def begin_row(row: DraftRow, prompt_length: int) -> None:
    """Forget what was kept of another request."""
    row.params.prompt_length, state = prompt_length, row.state
    state.followed.table = NO_TABLE
    forget_draft(state.judged)
    begin_prediction(state.prediction, prompt_length)
    state.guesses.count = 0


@kernel
def begin_row_at(row: int, prompt_length: int) -> None:
    """`begin_row` of the row at an address."""
    begin_row(row_at(row), prompt_length)


@kernel
def keep_all_guesses(
    rows: Int64s,
    ends: Int64s,
    fed: Int64s,
    counts: Int64s,
    parents: Int64s,
    is_tree: bool,
    chosen: Int64s,
) -> None:
    """Keep what the target chose behind wrong tokens, of every row of a `ScoredPass`.

    ``rows`` : int64[B], addresses of `DraftRow`, 0 for none. ``ends`` : int64[B], the last of the positions that were
    right, less than 0 for none. ``parents`` : looked at where ``is_tree``.
    """
    for b in range(len(rows)):
        if rows[b] != 0:
            guesses = row_at(rows[b]).state.guesses
            keep_guesses(guesses, fed[b], parents[b], is_tree, counts[b], chosen[b], ends[b])


_MOST_CONTINUED: Final = 4
"""Times that a draft is carried on past the end of all it was drawn from."""


@kernel
def _search(
    frame: Frame,
    snapshot: SnapshotRecord,
    params: DraftParams,
    context: TokenIds,
    max_length: int,
    min_length: int,
    evidence: Evidence,
) -> None:
    """Make what stands after the context's last tokens elsewhere the evidence."""
    if params.no_lookup == 1:
        evidence.num_levels = 0
    else:
        look_up(snapshot, frame.lookups, context, max_length, min_length, evidence)


@inlined
def _continued(frame: Frame, context: TokenIds, out: DraftRecord) -> TokenIds:
    """The end of the context and the draft after it, one text."""
    kept, drafted = begin_text(context, frame.continued), out.size
    frame.continued[kept : kept + drafted] = out.tokens[:drafted]
    return frame.continued[: kept + drafted]


@kernel
def _draft_tree(
    frame: Frame,
    snapshot: SnapshotRecord,
    texts: Texts,
    params: DraftParams,
    state: RequestState,
    model: Model,
    max_length: int,
    min_length: int,
    out: DraftRecord,
) -> None:
    evidence, out.is_tree = evidence_at(frame.evidences), 1
    _search(frame, snapshot, params, texts.context, max_length, min_length, evidence)
    further_at, least = frame.evidences + EVIDENCE_BYTES, max(min_length, LEAST_CONTINUED)
    further = FurtherLookups(snapshot, frame.lookups, further_at, max_length, least)
    grow_tree(
        texts, evidence, further, params, state.prediction, model, frame.candidates, frame.tree, state.judged, out
    )
    state.followed.table = NO_TABLE


@kernel
def _draft_chain(
    frame: Frame,
    snapshot: SnapshotRecord,
    texts: Texts,
    params: DraftParams,
    state: RequestState,
    model: Model,
    max_length: int,
    min_length: int,
    out: DraftRecord,
) -> None:
    prediction, judged, found, space = state.prediction, state.judged, frame.candidates, frame.chain
    evidence = evidence_at(frame.evidences)
    follow(state.followed, snapshot.table_number, texts, max_length, evidence)
    has_ended, may_look_up = True, params.no_lookup == 0
    if evidence.num_levels > 0:
        has_ended = chain(texts, evidence, 0, may_look_up, params, prediction, model, found, space, judged, out)
    if out.size < params.limit:  # there is nothing to follow, or it does not lead far enough
        begin_draft(judged, len(texts.context))
        clear_draft(out)
        _search(frame, snapshot, params, texts.context, max_length, min_length, evidence)
        has_ended = chain(texts, evidence, 0, may_look_up, params, prediction, model, found, space, judged, out)
    keep(state.followed, snapshot.table_number, texts, evidence)
    context = texts.context
    for number in range(_MOST_CONTINUED + 1):
        # All that agreed has ended and the draft is still worth more: what it ends with may go on elsewhere.
        drafted = out.size
        if not has_ended or drafted == 0 or drafted == params.limit:
            break
        texts = texts_of(_continued(frame, context, out), snapshot)
        may_look_up = may_look_up and number < _MOST_CONTINUED
        if may_look_up:
            _search(frame, snapshot, params, texts.context, max_length, max(min_length, LEAST_CONTINUED), evidence)
        else:
            evidence.num_levels = 0
        has_ended = chain(texts, evidence, drafted, may_look_up, params, prediction, model, found, space, judged, out)
        if out.size == drafted:
            break


@kernel
def draft_row(frame: Frame, row: DraftRow, max_length: int, min_length: int) -> None:
    """Learn what came of a row's last draft, and draft for it what it asks for."""
    params, out, state = row.params, row.draft, row.state
    searched, learned = snapshot_at(params.snapshot), model_at(params.model)
    context = int32_array(params.context, params.context_length)
    clear_draft(out)
    learn_from_context(state.judged, context, learned)
    if params.limit < 1 or len(context) == 0:
        return
    begin_draft(state.judged, len(context))
    if params.prediction_length > 0:
        prediction = int32_array(params.prediction, params.prediction_length)
        follow_prediction(state.prediction, prediction, context, frame.prediction_hits)
    frame.candidates.successors = params.recycling_table
    foresee(params, frame.candidates.foreseen, frame.candidates.keyed)
    plant_offers(params, frame.candidates.forest)
    offer_guesses(state.guesses, context, frame.candidates.forest)
    texts = texts_of(context, searched)
    if params.is_tree:
        _draft_tree(frame, searched, texts, params, state, learned, max_length, min_length, out)
    else:
        _draft_chain(frame, searched, texts, params, state, learned, max_length, min_length, out)


@kernel
def draft_rows(workspace: int, rows: Int64s, max_length: int, min_length: int) -> None:
    """Draft for the rows at addresses, one after the other, each from the snapshot and the model that it names.

    What comes of a row's draft is learned before the next row is drafted for. Writes ``draft`` and ``state`` of each.
    """
    frame = frame_at(workspace)
    for i in range(len(rows)):
        draft_row(frame, row_at(rows[i]), max_length, min_length)


@kernel
def end_row(row: int, num_verified: int, path: TokenIds, model: int) -> None:
    """Learn what came of a request's last draft: it has ended after the tokens of it that ``path`` names."""
    learn_from_path(row_at(row).state.judged, num_verified, path, model_at(model))
