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
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest, ScoreObserver
from ssd.drafting.source import OneByOne
from ssd.engine.metrics import BestEffort
from ssd.engine.sequence import Sequence
from ssd.engine.verify import Pass, RowOwners, Verification, branches, possible_shape, usable
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
        self._limit = draft.num_speculative_tokens if target.can_roll_back else 0
        self._shape = possible_shape(draft.draft_shape, target)
        self._owners: RowOwners | None = None
        self._observer = drafter if draft.recycling and self._limit and isinstance(drafter, ScoreObserver) else None
        self._price_list = PriceList()
        self._kept_shares = KeptShares()
        self._throttle = Throttle()
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

    def propose(self, batch: Rows[Sequence]) -> list[Draft]:
        """One draft per sequence; those that are not asked for get none, and all where this fails."""
        is_asked = batch and self._limit and self.is_ready
        drafts = self._best_effort(lambda: self._paying_drafts(batch)) if is_asked else None
        return drafts or [EMPTY_DRAFT] * len(batch)

    def _paying_drafts(self, batch: Rows[Sequence]) -> list[Draft]:
        due = self._throttle.due(batch)
        temperatures = [sequence.request.sampling.temperature for sequence in batch]
        by_temperature = {temperature: self._kept_shares.share(temperature) for temperature in set(temperatures)}
        shares = [by_temperature[temperature] for temperature in temperatures]
        started = time.perf_counter()
        asked = [(sequence, share) for sequence, share, is_due in zip(batch, shares, due, strict=True) if is_due]
        found = iter(self._ask(asked, len(batch)) if asked else ())
        seconds = time.perf_counter() - started
        kept = [next(found) if is_due else EMPTY_DRAFT for is_due in due]
        width = self._price_list.paying_width(kept, shares)
        drafts = [draft.cut(width) for draft in kept]
        self._throttle.observe_asking(batch, due, [len(draft.token_ids) for draft in drafts], seconds)
        return drafts

    def observe_scores(self, ended: Pass) -> None:
        """Tell the drafter all that a pass said, before any of its tokens is taken; not where that costs too much."""
        observer = self._observer
        if (
            observer is None
            or not self.is_ready
            or not self._throttle.tells(has_drafts=any(len(d.token_ids) for d in ended.drafts))
        ):
            return
        started = time.perf_counter()
        self._best_effort(lambda: observer.observe_scores(ended.scored(self._owners_of(ended))))
        self._throttle.observe_telling(time.perf_counter() - started)

    def _owners_of(self, ended: Pass) -> RowOwners:
        self._owners = RowOwners.of(ended.batch, self._owners)
        return self._owners

    def observe_pass(self, drafts: Rows[Draft], num_tokens: int, seconds: float) -> None:
        """Learn what the pass over such drafts took, which put out ``num_tokens``."""
        self._best_effort(lambda: self._observe_pass(drafts, num_tokens, seconds))

    def _observe_pass(self, drafts: Rows[Draft], num_tokens: int, seconds: float) -> None:
        self._throttle.observe_pass(seconds)
        width = 1 + max(len(draft.token_ids) for draft in drafts)
        self._price_list.observe(len(drafts) * width, num_tokens, seconds, is_wide=width > 1)

    def observe_verification(
        self, sequence: Sequence, draft: Draft, verification: Verification, num_accepted: int
    ) -> None:
        """Learn from what the target said to a draft, of which ``num_accepted`` tokens were emitted."""
        self._best_effort(lambda: self._observe_verification(sequence, draft, verification, num_accepted))

    def _observe_verification(
        self, sequence: Sequence, draft: Draft, verification: Verification, num_accepted: int
    ) -> None:
        if verification.path is not None:
            draft = replace(draft, path=verification.path[:num_accepted])
        is_told = draft.probabilities is not None or not len(draft.token_ids)
        if is_told and draft is not EMPTY_DRAFT:  # else nobody was asked, or what was said has been put aside
            promised = 0.0 if draft.probabilities is None else draft.promised
            self._kept_shares.observe(sequence.request.sampling.temperature, promised, len(verification.token_ids) - 1)
        if self.is_ready:
            self._drafter.observe(sequence.request.request_id, draft, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """Forget a request: nothing of it will be asked for, or all of it anew."""
        self._owners = None  # it holds the sequence
        sequence.note_context()
        self._asked.forget(sequence.request.request_id)
        if self.is_ready:
            self._best_effort(lambda: self._drafter.finish(sequence.request.request_id))

    def _ask(self, asked: list[tuple[Sequence, float]], num_rows: int) -> list[Draft]:
        """A draft for each sequence with its share, in a pass of ``num_rows``."""
        is_priced = self._price_list.pass_time is not None
        price = self._price_list.price(num_rows)
        prices = {share: np.array([price / share]) if is_priced else None for share in {share for _, share in asked}}
        may_branch = branches(self._shape, num_rows)
        requests = []
        for sequence, share in asked:
            cache = None if sequence.namespace is None else sequence.namespace.cache
            sequence.note_context()
            requests.append(
                DraftRequest(
                    request_id=sequence.request.request_id,
                    context=sequence.context,
                    prompt_length=sequence.num_prompt_tokens,
                    snapshot=None if cache is None else cache.snapshot(),
                    learned=None if cache is None else cache.learned,
                    limit=sequence.most_drafted(self._limit),
                    prices=prices[share],
                    tree=may_branch and sequence.request.sampling.structured_output is None,
                    prediction=sequence.prediction,
                    sampling=sequence.sampling,
                    slot=sequence.slot,
                    may_teach=sequence.request.learn,
                )
            )
        drafts = self._best_effort(lambda: self._asked.propose(requests))
        if drafts is None or len(drafts) != len(asked):
            return [EMPTY_DRAFT] * len(asked)
        return [
            self._usable(draft, request)
            if len(draft.token_ids) and (sequence.stats.num_verify_steps or _is_sure(draft, share))
            else EMPTY_DRAFT
            for draft, request, (sequence, share) in zip(drafts, requests, asked, strict=True)
        ]

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
