"""What the engine asks its drafter, how much of the answer is verified, and what is learned from that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import replace
from itertools import product
from threading import Thread

import numpy as np

from ssd.config import DraftConfig
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest, NoDrafter, ScoredPass, ScoreObserver
from ssd.drafting.source import OneByOne
from ssd.engine.batch import Batch
from ssd.engine.metrics import BestEffort
from ssd.engine.sequence import Prepared, Sequence
from ssd.engine.verify import Pass, branches, possible_shape, usable
from ssd.model.target import Target
from ssd.pricing.calibration import KeptShares, Throttle
from ssd.pricing.price_list import PriceList

_ROWS = 8
_WIDTHS = (1, 2, 5)
_TIMES = 4
_MOST_S = 2.0
"""After which no size is timed again: what long passes take shows in one."""


def timed_passes(target: Target, max_width: int) -> Iterator[tuple[int, int, float]]:
    """Rows, positions of each row and seconds of passes of several widths at two batch sizes, each at least once."""
    all_rows = {1, min(_ROWS, target.num_slots)}
    widths = {*(width for width in _WIDTHS if width < max_width), max_width}
    began = time.perf_counter()
    for attempt in range(_TIMES + 1):
        for num_rows, width in product(all_rows, widths):
            slots, tokens = list(range(num_rows)), np.ones((num_rows, width), np.int64)
            started = time.perf_counter()
            target.forward(slots, tokens, [width] * num_rows).logits.argmax(-1).cpu()
            seconds = time.perf_counter() - started
            for slot in slots:
                target.rollback(slot, 0)
            if attempt:  # the first one allocates
                yield num_rows, width, seconds
        if attempt and time.perf_counter() - began > _MOST_S:
            return


_PASSES_AHEAD = 3
"""Passes that are drafted for at once where one text is said again."""

_NOTHING_FOUND = Draft(EMPTY_DRAFT.token_ids)
"""Of a row that was asked for: unlike EMPTY_DRAFT it says that what was distrusted has not been tried again."""

_SURE = 0.9
"""Chance of its first token that a draft must have in the pass that a client waits for."""


class Proposals:
    """Drafts for the rows of a pass, as many tokens as pay. Only speed depends on it, never a token.

    A drafter that fails proposes nothing, see `BestEffort`.
    """

    def __init__(self, target: Target, drafter: Drafter, draft: DraftConfig, best_effort: BestEffort) -> None:
        self._target = target
        self._drafter = drafter
        self._asked = OneByOne(drafter)
        self._best_effort = best_effort
        self._limit = draft.num_speculative_tokens if target.can_roll_back and not isinstance(drafter, NoDrafter) else 0
        self._shape = possible_shape(draft.draft_shape, target)
        self._observer = drafter if draft.recycling and self._limit and isinstance(drafter, ScoreObserver) else None
        self._price_list = PriceList()
        self._kept_shares = KeptShares()
        self._throttle = Throttle()
        self._scored: ScoredPass | None = None
        """What the last pass said, until it is learned from."""
        self._telling_s = 0.0
        self._reads_contexts = isinstance(drafter, SuffixDrafter)  # others may take long, ask others, learn from counts
        self._is_asked = True
        self._compiling: Thread | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the drafter is asked and told: not before its kernels are compiled, where that is done aside."""
        if self._compiling is not None and not self._compiling.is_alive():
            self._compiling, self._is_asked = None, True
        return self._is_asked

    def wait(self) -> None:
        """Leave the drafter alone until ``warm_up``; one that runs a model of its own is not left alone."""
        self._is_asked = not isinstance(self._drafter, SuffixDrafter)

    @property
    def num_failures(self) -> int:
        """Times that a drafter or a cache failed; one that owns several survives the failure of one, and counts it."""
        own = self._best_effort.num_failures + self._asked.num_failures
        return own + int(getattr(self._drafter, "num_failures", 0))

    def warm_up(self, patience_s: float | None) -> None:
        """Compile what drafts; where ``wait`` was called, on a thread that is waited for so long."""

        def compile_kernels() -> None:
            self._best_effort(lambda: getattr(self._drafter, "warm_up", lambda: None)())
            prices = PriceList()
            prices.calibrate(1, 1.0, is_wide=False)
            prices.begin()
            prices.price(1)

        if self._is_asked:
            compile_kernels()
        else:
            self._compiling = Thread(target=compile_kernels, name="ssd-compile", daemon=True)
            self._compiling.start()
            self._compiling.join(patience_s)

    def publish(self) -> None:
        """Have the drafter publish what it learned about namespaces, to be kept with their text."""
        if self.is_ready:
            self._best_effort(lambda: getattr(self._drafter, "publish", lambda: None)())

    def calibrate(self) -> None:
        """Time passes of several sizes, on free slots."""
        if self._limit > 0:
            for num_rows, width, seconds in timed_passes(self._target, self._limit + 1):
                self._price_list.calibrate(num_rows * width, seconds, is_wide=width > 1)
            self._price_list.begin()

    def propose(self, batch: Batch) -> list[Draft]:
        """One draft per sequence; those that are not asked for get none, and all where this fails."""
        rows = batch.sequences
        is_asked = rows and self._limit and self.is_ready
        drafts = self._best_effort(lambda: self._paying_drafts(rows)) if is_asked else None
        return drafts or [EMPTY_DRAFT] * len(rows)

    def _paying_drafts(self, batch: Rows[Sequence]) -> list[Draft] | None:
        """A draft for each row; None where none is due one and none was prepared."""
        due = self._throttle.due(batch)
        if not any(due) and all(sequence.prepared is None and sequence.used is None for sequence in batch):
            self._throttle.observe_asking((), (), 0.0, spares_some=True)
            return None
        drafts = [self._prepared(sequence) for sequence in batch]
        asked = [b for b, draft in enumerate(drafts) if draft is EMPTY_DRAFT and due[b]]
        shares = self._shares(batch)
        rows, trusted = [batch[b] for b in asked], [shares[b] for b in asked]
        started = time.perf_counter()
        if asked:
            limits = [sequence.most_drafted(self._limit) for sequence in rows]
            found = self._ask(rows, trusted, limits, len(batch), may_branch=branches(self._shape, len(batch)))
            for b, draft in zip(asked, found, strict=True):
                if batch[b].has_output or _is_sure(draft, shares[b]):
                    drafts[b] = draft
        seconds = time.perf_counter() - started
        width = self._price_list.paying_width(drafts, shares)
        drafts = [draft.cut(width) for draft in drafts]
        lengths = [len(drafts[b].token_ids) for b in asked]
        self._throttle.observe_asking(rows, lengths, seconds, spares_some=not all(due))
        return drafts

    def _shares(self, batch: Rows[Sequence]) -> list[float]:
        """How far what drafts promise is trusted, of each row."""
        temperatures = [sequence.request.sampling.temperature for sequence in batch]
        by_temperature = {temperature: self._kept_shares.share(temperature) for temperature in set(temperatures)}
        return [by_temperature[temperature] for temperature in temperatures]

    def _prepared(self, sequence: Sequence) -> Draft:
        """What was prepared, where all before it came true; else nothing."""
        prepared, sequence.prepared, sequence.used = sequence.prepared, None, None
        if prepared is None or prepared.length != sequence.num_tokens:
            return EMPTY_DRAFT
        whole, begin = prepared.whole, prepared.begin
        end = begin + sequence.most_drafted(self._limit)
        if not begin < end <= len(whole.token_ids):
            return EMPTY_DRAFT
        if whole.token_ids[begin - 1] != sequence.tokens[prepared.length - 1]:
            return EMPTY_DRAFT
        sequence.used = prepared
        chances = None if whole.probabilities is None else whole.probabilities[begin:end]
        return Draft(whole.token_ids[begin:end], whole.match_length, whole.source, chances)

    def prepare(self, under_way: Pass) -> None:
        """While a pass runs, draft on behind what it verifies, for rows whose last draft came true: where one text is
        said again, drafting is most of what a device waits for. Where the target chooses otherwise, nothing is lost."""
        if self._reads_contexts and self.is_ready:
            self._best_effort(lambda: self._prepare(under_way))

    def _prepare(self, under_way: Pass) -> None:
        asked = list[tuple[Sequence, Draft]]()
        batch = under_way.batch
        for b in np.flatnonzero((batch.drafted > 0) & (batch.accepted == batch.drafted)).tolist():
            sequence, draft = batch.sequences[b], under_way.drafts[b]
            size = len(draft.token_ids)
            if not size or draft.parents is not None or sequence.finish_reason is not None:
                continue
            used, length = sequence.used, sequence.num_tokens + size + 1
            if used is not None and used.begin + size + 1 + self._limit <= len(used.whole.token_ids):
                sequence.prepared = Prepared(used.whole, used.begin, used.begin + size + 1, length)
            else:
                asked.append((sequence, draft))
        if not asked:
            return
        sequences = [sequence for sequence, _ in asked]
        limits = [
            sequence.most_drafted(len(draft.token_ids) + _PASSES_AHEAD * (1 + self._limit)) for sequence, draft in asked
        ]
        found = self._ask(sequences, self._shares(sequences), limits, len(under_way.drafts), may_branch=False)
        for (sequence, draft), whole in zip(asked, found, strict=True):
            size, common = len(draft.token_ids), 0
            while common < min(size, len(whole.token_ids)) and whole.token_ids[common] == draft.token_ids[common]:
                common += 1
            length = sequence.num_tokens + size + 1 if common == size else -1
            sequence.prepared = Prepared(whole, 0, common + 1, length)

    def observe_scores(self, ended: Pass) -> None:
        """Tell the drafter all that a pass said, before any of its tokens is taken; not where that costs too much.

        It learns from that in `observe_pass`.
        """
        self._scored = None
        observer = self._observer
        if (
            observer is None
            or not self.is_ready
            or not self._throttle.tells(has_drafts=any(len(d.token_ids) for d in ended.drafts))
        ):
            return
        started = time.perf_counter()
        self._scored = self._best_effort(ended.scored)
        if (scored := self._scored) is not None:
            self._best_effort(lambda: observer.observe_scores(scored))
        self._telling_s = time.perf_counter() - started

    def observe(self, ended: Pass) -> None:
        """Tell the drafter of the drafts of all rows that took all tokens that were said.

        Not one that sees in the next context what came of its drafts: it is told of a request's last one alone.
        """
        if self._limit and not self._reads_contexts:
            for b in np.flatnonzero(ended.batch.taken > 0).tolist():
                self.observe_one(ended, b, int(ended.sizes[b]) - 1)

    def observe_one(self, ended: Pass, b: int, num_accepted: int) -> None:
        """Tell the drafter of one row's draft, of which ``num_accepted`` tokens were emitted."""
        sequence, draft = ended.batch.sequences[b], ended.drafts[b]
        if not self.is_ready or (self._reads_contexts and sequence.finish_reason is None):
            return
        path = ended.path(b)
        if path is not None:
            draft = replace(draft, path=path[:num_accepted])
        if (prepared := sequence.prepared) is not None:  # the drafter speaks of the draft that it made last
            draft = prepared.whole.cut(prepared.begin - 1)
            num_accepted = min(prepared.verified + num_accepted, len(draft.token_ids))
        elif sequence.used is not None:
            return
        try:
            self._drafter.observe(sequence.request.request_id, draft, num_accepted)
        except BaseException as error:
            self._best_effort.note(error)

    def count(self, ended: Pass) -> None:
        """Learn how far what drafts promise comes true."""
        if not self._limit:
            return
        taken, right = ended.batch.taken.tolist(), (ended.sizes - 1).tolist()
        for b, draft in enumerate(ended.drafts):
            is_told = draft.probabilities is not None or not len(draft.token_ids)
            if is_told and draft is not EMPTY_DRAFT and taken[b] > 0:  # else nobody was asked, or it was put aside
                path = range(right[b]) if (on_tree := ended.path(b)) is None else on_tree.tolist()
                promised = 0.0 if draft.probabilities is None else draft.promise_tested(path)
                temperature = ended.batch.sequences[b].request.sampling.temperature
                self._kept_shares.observe(temperature, promised, right[b])

    def observe_pass(self, ended: Pass, num_tokens: int) -> None:
        """Learn from a pass that put out ``num_tokens``: what it took, and what the target said."""
        if not self._limit:
            return
        self._best_effort(lambda: self._observe_pass(ended.drafts, num_tokens, ended.seconds))
        observer, scored = self._observer, self._scored
        if observer is not None and scored is not None:
            self._scored = None
            started = time.perf_counter()
            self._best_effort(lambda: observer.learn_scores(scored))
            self._throttle.observe_telling(self._telling_s + time.perf_counter() - started)

    def _observe_pass(self, drafts: Rows[Draft], num_tokens: int, seconds: float) -> None:
        self._throttle.observe_pass(seconds)
        width = 1 + max(len(draft.token_ids) for draft in drafts)
        self._price_list.observe(len(drafts) * width, num_tokens, seconds, is_wide=width > 1)

    def forget(self, sequence: Sequence) -> None:
        """Forget a request: nothing of it will be asked for, or all of it anew."""
        if self._scored is not None and sequence.namespace is None:  # its own is not learned any more
            is_its = [name == sequence.request.request_id for name in self._scored.request_ids]
            self._scored.counts[is_its] = 0
        sequence.note_context()
        self._asked.forget(sequence.request.request_id)
        if self.is_ready:
            self._best_effort(lambda: self._drafter.finish(sequence.request.request_id))

    def _ask(
        self, asked: Rows[Sequence], shares: Rows[float], limits: Rows[int], num_rows: int, *, may_branch: bool
    ) -> list[Draft]:
        """A draft of so many tokens for each sequence, in a pass of ``num_rows``; see ``_shares``."""
        is_priced = self._price_list.pass_time is not None
        price = self._price_list.price(num_rows)
        prices = {share: np.array([price / share]) if is_priced else None for share in set(shares)}
        requests = []
        for sequence, share, limit in zip(asked, shares, limits, strict=True):
            request = self._request(sequence)
            request.limit, request.prices = limit, prices[share]
            request.tree = may_branch and sequence.request.sampling.structured_output is None
            requests.append(request)
        drafts = self._best_effort(lambda: self._asked.propose(requests))
        if drafts is None or len(drafts) != len(asked):
            return [EMPTY_DRAFT] * len(asked)
        return [
            self._usable(draft, request) if len(draft.token_ids) else _NOTHING_FOUND
            for draft, request in zip(drafts, requests, strict=True)
        ]

    def _request(self, sequence: Sequence) -> DraftRequest:
        """What is asked for a sequence, but for its limit, its prices and its shape."""
        cache = None if sequence.namespace is None else sequence.namespace.cache
        sequence.note_context()
        if (request := sequence.asking) is None:
            request = sequence.asking = DraftRequest(
                request_id=sequence.request.request_id,
                context=sequence.context,
                prompt_length=sequence.num_prompt_tokens,
                snapshot=None,
                limit=0,
                prediction=sequence.prediction,
                sampling=sequence.sampling,
                may_teach=sequence.request.learn,
            )
        request.context, request.slot = sequence.context, sequence.slot
        if cache is not None:
            request.snapshot, request.learned = cache.snapshot(), cache.learned
        return request

    def _usable(self, draft: Draft, request: DraftRequest) -> Draft:
        """The draft, or nothing where a token or parent cannot be; cut to what may still be generated."""
        found = usable(draft, request.limit, vocab_size=self._target.vocab_size, allow_tree=request.tree)
        self._best_effort.num_failures += found is None
        return EMPTY_DRAFT if found is None else found


def _is_sure(draft: Draft, share: float) -> bool:
    """Whether a draft may be verified in the pass that a client waits for to see the first token.

    That pass takes longer with a draft, and the first token is the target's own in any case. A text that comes again
    is worth it: its first token is almost certain.
    """
    return draft.probabilities is None or share * float(draft.probabilities[0]) >= _SURE
