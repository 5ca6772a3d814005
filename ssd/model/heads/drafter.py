"""A draft head as a drafter: it reads what the target made of the text so far, and says what comes next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import EMPTY_DRAFT, HEAD, MAX_OFFERED, Draft, DraftRequest, Prices, SamplingRow
from ssd.model.heads.candidates import SOURCE, Candidates, Floats, Ints, candidates, comb, product
from ssd.model.heads.head import Head, ParallelHead, RecurrentHead
from ssd.model.heads.slots import HeadSlot, HeadSlots, bytes_per_token
from ssd.model.kv.tree import leading_chain
from ssd.model.layers.tap import Tapped
from ssd.model.target import Target
from ssd.pricing.calibration import PlattScaling
from ssd.pricing.pass_costs import OUTLIER
from ssd.pricing.price_list import PriceList
from ssd.pricing.rate import price_of

_UNKNOWN_SAMPLING = SamplingRow(params=SamplingParams(temperature=0.0), noise=SequenceNoise.seeded(0))
_WARM_UP_ROWS = 8
_WARM_UP_TOKENS = 64


@dataclass(slots=True, eq=False)
class _Row:
    """One request while it is drafted for. ``text`` : its context, and room for the chain that is drafted after it.

    ``chance`` : expected of the whole chain to be accepted.
    """

    index: int
    request: DraftRequest
    sampling: SamplingRow
    slot: int
    limit: int
    prices: Prices
    text: np.ndarray[tuple[int], np.dtype[np.int32]]
    state: HeadSlot | None
    chance: float = 1.0
    token_ids: list[Ints] = field(default_factory=list)
    chances: list[Floats] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return len(self.token_ids)

    def sampling_row(self, depth: int) -> SamplingRow:
        """What choosing the token at ``depth`` needs: the chain before it counts as output."""
        return self.sampling.at(self.text[: len(self.request.context) + depth], self.request.prompt_length)


class HeadDrafter:
    """Drafts with a head from the features that the target's passes leave in its slots.

    A recurrent head follows the text of each slot by itself, rows together, and then goes on token by token; a draft is
    the chain of what it would choose, with the next candidates as leaves, and the chain ends where the chance that it
    is accepted falls below the price of a token. A parallel head says all its tokens in one pass; a draft is the
    likeliest paths through them. Either is a tree, whether or not the request takes one: what judges it picks.
    ``Draft.probabilities`` are the head's own. Sampled requests are drafted for with the target's noise.

    Owned by one thread. A pass that fails leaves no trace: the head reads the slots again.
    """

    kind = HEAD

    def __init__(self, head: Head, target: Target, *, price: float = 0.2, chunk_tokens: int = 512) -> None:
        """``target`` : keeps the features that ``head`` reads. price : of a drafted token, in expected accepted tokens,
        where a request names none. chunk_tokens : most positions that are read in one call.
        """
        assert target.features is not None and target.features.size == head.feature_size
        assert isinstance(head, (RecurrentHead, ParallelHead))
        self._head: RecurrentHead | ParallelHead = head
        self._target = target
        self._features = target.features
        self._price = np.array([price])
        self._slots = HeadSlots(head, target, chunk_tokens) if isinstance(head, RecurrentHead) else None
        self._greedy_chances = PlattScaling(shift=0.5, scale=1.0)
        self._sampled_chances = PlattScaling(shift=1.0, scale=0.5)
        self._price_list = PriceList()
        self._last: dict[str, tuple[bool, Floats]] = {}

    def seconds_per_token(self, num_rows: int) -> float:
        """Measured time to draft one more token for each of ``num_rows`` requests together; 0 until it is known."""
        seconds = self._price_list.seconds(num_rows)
        return seconds / self._head.num_tokens if isinstance(self._head, ParallelHead) else seconds

    def seconds_to_begin(self, request: DraftRequest) -> float:
        """Expected time for the head to read what is new to it in the context; 0 where that is little or not known."""
        if self._slots is None or request.slot is None or request.slot < 0:
            return 0.0
        return self._slots.seconds_to_read(request.slot, request.request_id, len(request.context))

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; empty where the head is still reading, and where it cannot read."""
        rows = [
            self._row(index, request)
            for index, request in enumerate(requests)
            if self._takes(request) and self._target.length(request.slot or 0) >= len(request.context) - 1
        ]
        return self._propose(rows, len(requests))

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn how far the chain was accepted; what follows the first wrong token was not tested."""
        greedy, own = self._last.get(request_id, (True, np.empty(0)))
        if draft.source != SOURCE or not len(own):
            return
        length = min(len(own), len(draft.token_ids) if draft.parents is None else leading_chain(draft.parents))
        path = np.arange(num_accepted) if draft.path is None else draft.path
        wrong = np.flatnonzero(path[:length] != np.arange(min(length, len(path))))
        right = int(wrong[0]) if len(wrong) else min(length, len(path))
        tested = min(length, right + 1)
        self._chances_of(greedy).learn(own[:tested], np.arange(tested) < right)

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._last.pop(request_id, None)
        if self._slots is not None:
            self._slots.close(request_id)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run passes over one and over several slots, so that their time is known; while no slot holds a text."""
        context = np.ones(min(_WARM_UP_TOKENS, self._target.max_length - 3), np.int32)
        for num_rows in (1, 1, min(_WARM_UP_ROWS, self._target.num_slots)):
            for limit in (1, 3, 3):
                names = [f"warm-up-{slot}" for slot in range(num_rows)]
                requests = [
                    DraftRequest(name, context, 1, None, limit, prices=np.zeros(1), slot=slot)
                    for slot, name in enumerate(names)
                ]
                self._propose([self._row(index, request) for index, request in enumerate(requests)], num_rows)
                for name in names:
                    self.finish(name)
        if self._slots is not None:
            self._slots.reread()

    def _takes(self, request: DraftRequest) -> bool:
        has_room = min(request.limit, self._target.max_length - len(request.context)) >= 1
        return request.slot is not None and request.slot >= 0 and has_room and len(request.context) > 1

    def _row(self, index: int, request: DraftRequest) -> _Row:
        length, slot = len(request.context), request.slot
        assert slot is not None
        limit = min(request.limit, self._target.max_length - length, MAX_OFFERED)
        text = np.empty(length + limit, np.int32)
        text[:length] = request.context
        state = None
        if self._slots is not None:
            adapter = self._target.adapters[slot]
            state = self._slots.follow(slot, request.request_id, request.context, adapter, request.learned)
        prices = self._price if request.prices is None else request.prices
        return _Row(index, request, request.sampling or _UNKNOWN_SAMPLING, slot, limit, prices, text, state)

    def _propose(self, rows: list[_Row], num_requests: int) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * num_requests
        try:
            ready = self._say_all(rows) if self._slots is None else self._go_on(self._slots, rows)
        except BaseException:
            if self._slots is not None:
                self._slots.reread()
            raise
        for row in ready:
            shape = comb if self._slots is not None else _product
            draft = shape(row.token_ids, row.chances, row.prices, row.limit)
            own = np.array([chances[0] for chances in row.chances])
            self._last[row.request.request_id] = row.sampling.params.greedy, own
            drafts[row.index] = draft
        return drafts

    def _go_on(self, slots: HeadSlots, rows: list[_Row]) -> list[_Row]:
        """Draft token by token; the rows whose text has been read."""
        states = [row.state for row in rows if row.state is not None]
        ready, logits, features = slots.read(states)
        rows = writing = [rows[index] for index in ready]
        if logits is None or features is None:
            return []
        self._choose(logits, writing)
        while True:
            going = [b for b, row in enumerate(writing) if self._pays(row)]
            if not going:
                return rows
            began = time.perf_counter()
            if len(going) < len(writing):
                features = features[going]
                writing = [writing[b] for b in going]
            tokens = np.array([row.token_ids[-1][0] for row in writing])
            logits, features = slots.feed([row.state for row in writing if row.state is not None], tokens, features)
            self._choose(logits, writing)
            self._observe_pass(len(writing), time.perf_counter() - began)

    def _say_all(self, rows: list[_Row]) -> list[_Row]:
        """Draft all depths at once."""
        assert isinstance(self._head, ParallelHead)
        if not rows:
            return []
        began = time.perf_counter()
        device = self._target.device
        places = torch.tensor([[len(row.request.context) - 2] for row in rows], device=device)
        slots = torch.tensor([row.slot for row in rows], device=device)
        logits = self._head(self._features.read(slots, places)[:, 0])
        for depth in range(min(self._head.num_tokens, max(row.limit for row in rows))):
            going = [b for b, row in enumerate(rows) if depth < row.limit]
            self._choose(logits[going, depth], [rows[b] for b in going])
        self._observe_pass(len(rows), time.perf_counter() - began)
        return rows

    def _choose(self, logits: torch.Tensor, rows: Sequence[_Row]) -> None:
        """Note the candidates of the next depth of each row, and go on with the first of them."""
        mapping = self._head.draft_to_target if isinstance(self._head, RecurrentHead) else None
        found: Candidates = candidates(
            logits, [row.sampling_row(row.depth) for row in rows], mapping, self._target.vocab_size
        )
        for b, row in enumerate(rows):
            row.text[len(row.request.context) + row.depth] = found.token_ids[b, 0]
            own = found.chances[b, :1]
            row.chance *= float(self._chances_of(row.sampling.params.greedy).estimate(own)[0])
            row.token_ids.append(found.token_ids[b])
            row.chances.append(found.chances[b])

    def _pays(self, row: _Row) -> bool:
        """Whether one more token is worth its price, going by what is known before it is drafted."""
        return row.depth < row.limit and row.chance > price_of(row.prices, row.depth)

    def _observe_pass(self, num_rows: int, seconds: float) -> None:
        expected = self._price_list.seconds(num_rows)
        # One that took many times as long was probably interrupted: it counts as slow, but not as that slow.
        self._price_list.observe(num_rows, 0, min(seconds, OUTLIER * expected) if expected else seconds)

    def _chances_of(self, greedy: bool) -> PlattScaling:
        return self._greedy_chances if greedy else self._sampled_chances


def _product(token_ids: Sequence[Ints], chances: Sequence[Floats], prices: Prices, limit: int) -> Draft:
    return product(np.stack(token_ids), np.stack(chances), prices, limit)


def tapped_by(head: Head, device: torch.device, dtype: torch.dtype) -> Tapped:
    """What a target must keep of every position for ``head``, and what the head keeps besides."""
    own = bytes_per_token(head, device, dtype) if isinstance(head, RecurrentHead) else 0
    return Tapped(head.feature_layers, head.combine, head.feature_size, own)
