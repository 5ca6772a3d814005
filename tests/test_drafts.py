"""What an engine makes of the drafts of a batch, in kernels: against a slow twin, step after step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ssd.config import SamplingParams
from ssd.cost_model.calibration import FIRST_TOKEN_THRESHOLD, AcceptanceCalibration
from ssd.cost_model.cost_model import CostModel
from ssd.drafting.draft_batch import DraftBatch
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import EMPTY_DRAFT, Draft
from ssd.drafting.suffix_drafter import draft_of
from ssd.engine.batch import Batch, fill_input_ids
from ssd.engine.draft_buffers import (
    CHAIN,
    PREPARED_CHAIN,
    collect_drafts,
    fill_draft_params,
    learn_from_pass,
    plan_prepared_drafts,
    start_drafts,
    store_prepared_drafts,
)
from ssd.engine.drafter_backends import write_draft
from ssd.engine.request import Request
from ssd.engine.sequence import Sequence
from ssd.jit.addresses import Records
from tests.reference.drafts import PASSES_AHEAD, SlowDrafts, SlowRow
from tests.reference.tree import node_parents

VOCAB = 5
LIMIT = 4


def some_draft(random: np.random.Generator, most: int, *, is_tree: bool, beginning: list[int] | None = None) -> Draft:
    """Of up to ``most`` tokens, rarely one of them no token; a chain may begin as said."""
    size = int(random.integers(0, most + 1))
    tokens = random.integers(0, VOCAB + (random.random() < 0.1), size).astype(np.int32)
    if beginning is not None and random.random() < 0.8:
        common = min(size, len(beginning))
        tokens[:common] = beginning[:common]
    nodes = np.array([random.integers(-1, i) if i else -1 for i in range(size)], np.int32)
    is_chain = not is_tree or nodes.tolist() == [*range(-1, size - 1)]
    chances = random.uniform(0.05, 1.0, size) if random.random() < 0.95 else None
    return Draft(
        tokens, int(random.integers(0, 9)), "context" if size else "none", chances, None if is_chain else nodes
    )


def known_prices(random: np.random.Generator) -> CostModel:
    """Of passes of some size; or nothing is known of them."""
    prices, (position, wide) = CostModel(), random.uniform(0.0, 0.2, 2)
    if random.random() < 0.9:
        for rows in (1, 2, 5):
            for width in (1, 2, 5):
                seconds = 1.0 + position * rows * width + wide * (width > 1)
                prices.calibrate(rows * width, seconds, is_wide=width > 1)
        prices.end_warm_up()
    return prices


@dataclass
class Both:
    """A batch and its twin."""

    batch: Batch
    slow: SlowDrafts
    shares: AcceptanceCalibration
    settings: Records[DraftBatch]
    buffer: int = 0

    def check(self) -> None:
        for sequence, row in zip(self.batch.sequences, self.slow.rows, strict=True):
            record = sequence.row
            assert said(draft_of(record.drafts[self.buffer])) == said(row.verified)
            assert bool(record.was_drafted[self.buffer]) == (row.verified is not EMPTY_DRAFT)
            assert record.num_empty_drafts == row.num_fruitless
            assert bool(record.prepared_length) == (row.prepared is not None)
            assert bool(record.used_offset) == (row.used is not None)
            assert self.shares.share(row.kind / 4) == self.slow.shares.share(row.kind)
        assert self.batch.needs_draft.tolist() == [row.is_wanted for row in self.slow.rows]


def said(draft: Draft) -> tuple[object, ...]:
    size = len(draft.token_ids)
    parents = draft.parents_of_all()
    chances = None if draft.probabilities is None or not size else draft.probabilities.tolist()
    return draft.token_ids.tolist(), parents, chances, draft.match_length if size else 0


def both(random: np.random.Generator) -> Both:
    sequences, rows = [], []
    for number in range(int(random.integers(1, 5))):
        prompt = random.integers(0, VOCAB, int(random.integers(1, 6))).tolist()
        kind, most = int(random.integers(0, 9)), int(random.choice([LIMIT, LIMIT, 2, 0]))
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            num_speculative_tokens=most,
            sampling=SamplingParams(max_tokens=40, temperature=kind / 4),
        )
        sequence = Sequence(request, max_length=60, eos_token_ids=(), stream=None, noise=SequenceNoise.seeded(number))
        sequences.append(sequence)
        rows.append(SlowRow(prompt, len(prompt), sequence.max_length, most, kind))
    slow, shares, settings = SlowDrafts(rows, known_prices(random), VOCAB), AcceptanceCalibration(), Records(DraftBatch)
    record = settings[0]
    record.costs, record.calibration = slow.prices.address, shares.address
    record.limit, record.vocab_size = LIMIT, VOCAB
    record.first_threshold, record.default_token_cost = FIRST_TOKEN_THRESHOLD, 0.1
    return Both(Batch(sequences), slow, shares, settings)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_drafts_are_taken_cut_prepared_and_counted_as_by_the_twin(seed: int) -> None:
    random = np.random.default_rng(seed)
    pair = both(random)
    batch, slow, at, settings = pair.batch, pair.slow, pair.batch.address, pair.settings.address
    came_true = [False] * len(slow.rows)
    for step in range(8):
        if step:
            num_marked = plan_prepared_drafts(at, pair.buffer, settings)
            slow.plan_ahead(LIMIT, came_true)
            assert num_marked == sum(row.is_wanted for row in slow.rows)
            fill_draft_params(at, pair.buffer, settings, PREPARED_CHAIN)
            found = list[Draft]()
            for sequence, row in zip(batch.sequences, slow.rows, strict=True):
                most = row.most_drafted(len(row.verified.token_ids) + PASSES_AHEAD * (1 + LIMIT))
                assert not row.is_wanted or sequence.row.draft_row.params.limit == most
                beginning = [*row.verified.token_ids.tolist(), *[1] * 20]
                found.append(some_draft(random, most, is_tree=False, beginning=beginning))
                write_draft(found[-1], sequence.row.draft_row.draft)
            store_prepared_drafts(at, pair.buffer, settings)
            slow.take_ahead(found)
            event(f"prepared: {sum(row.prepared is not None for row in slow.rows)}")
            came_true = advance(pair, random)
        pair.buffer ^= 1
        should_draft_all, is_tree = bool(random.random() < 0.3), bool(random.random() < 0.3)
        num_marked = start_drafts(at, pair.buffer, settings, should_draft_all)
        slow.begin(LIMIT, should_draft_all=should_draft_all)
        assert num_marked == sum(row.is_wanted for row in slow.rows)
        found = [some_draft(random, row.most_drafted(LIMIT), is_tree=is_tree) for row in slow.rows]
        if num_marked:
            assert fill_draft_params(at, pair.buffer, settings, CHAIN) == num_marked
            for sequence, draft in zip(batch.sequences, found, strict=True):
                write_draft(draft, sequence.row.draft_row.draft)
            collect_drafts(at, pair.buffer, settings)
        slow.take(found)
        pair.check()
        check_fed(pair)


def check_fed(pair: Both) -> None:
    """What a pass is fed is what was said last, and the drafts."""
    batch, rows = pair.batch, pair.slow.rows
    width, has_trees = batch.record.width, bool(batch.record.has_trees)
    assert width == 1 + max(len(row.verified.token_ids) for row in rows)
    assert has_trees == any(row.verified.parents is not None and len(row.verified.token_ids) for row in rows)
    fed, parents = np.empty((len(rows), width), np.int64), np.empty((len(rows), width * has_trees), np.int64)
    before, (lengths, counts) = np.empty(len(rows), np.int32), np.empty((2, len(rows)), np.int64)
    fill_input_ids(batch.address, pair.buffer, fed, parents, before, lengths, counts)
    for row, tokens, count in zip(rows, fed.tolist(), counts.tolist(), strict=True):
        assert tokens[:count] == [row.tokens[-1], *row.verified.token_ids.tolist()] and not any(tokens[count:])
    assert lengths.tolist() == [len(row.tokens) for row in rows]
    assert before.tolist() == [row.tokens[-2] if len(row.tokens) > 1 else -1 for row in rows]
    if has_trees:
        assert parents.tolist() == node_parents([row.verified.parents for row in rows], width).tolist()


def advance(pair: Both, random: np.random.Generator) -> list[bool]:
    """The pass ends: a part of each draft came, and one token more. Of which rows all of it did."""
    rows, width = pair.slow.rows, pair.batch.record.width
    paths, sizes = np.zeros((len(rows), width), np.int64), np.ones(len(rows), np.int64)
    came_true, accepted = list[bool](), list[list[int]]()
    for b, (sequence, row) in enumerate(zip(pair.batch.sequences, rows, strict=True)):
        path, last, is_right = list[int](), -1, random.random() < 0.7
        for node, parent in enumerate(row.verified.parents_of_all()):
            if parent == last and (is_right or random.random() < 0.5):
                path.append(node)
                last = node
        accepted.append(path)
        sizes[b] = 1 + len(path)
        paths[b, 1 : sizes[b]] = np.array(path, np.int64) + 1
        new = [*row.verified.token_ids[path].tolist(), 1]
        row.tokens += new
        sequence.tokens[sequence.num_tokens : sequence.num_tokens + len(new)] = new
        sequence.row.length += len(new)
        came_true.append(0 < len(row.verified.token_ids) == len(path))
    pair.batch.committed[:] = sizes
    pair.batch.num_accepted[:], pair.batch.num_drafted[:] = sizes - 1, [len(row.verified.token_ids) for row in rows]
    learn_from_pass(pair.batch.address, pair.buffer, pair.settings.address, sizes, paths, 1, 0, 0.0)
    pair.slow.count(accepted)
    return came_true
