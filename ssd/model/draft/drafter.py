"""A network as a drafter: a head that reads what the target made of the text so far, or a smaller model beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ssd.compiled.addresses import kernel
from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise, UInt64, gumbel_at
from ssd.drafting.protocol import EMPTY_DRAFT, HEAD, MAX_OFFERED, MODEL, Draft, DraftRequest, Prices, SamplingRow
from ssd.errors import ModelError
from ssd.model.draft.slots import HeadSlots, ModelSlots, TextSlot, TextSlots, bytes_per_token
from ssd.model.heads.networks import Head
from ssd.model.kv.tree import leading_chain
from ssd.model.layers.tap import Tapped
from ssd.model.sampling.noise import LOWEST_TEMPERATURE
from ssd.model.sampling.target_tokens import is_ruled, with_prefix_rules
from ssd.model.target import Target
from ssd.pricing.calibration import PlattScaling
from ssd.pricing.pass_costs import OUTLIER
from ssd.pricing.price_list import PriceList
from ssd.pricing.rate import price_of

MOST_CANDIDATES = 32

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def candidates(
    logits: torch.Tensor, rows: Sequence[SamplingRow], draft_to_target: torch.Tensor | None, vocab_size: int
) -> tuple[Ints, Floats]:
    """The most promising tokens after the contexts of ``rows``, which have no draft: int64[R, M], that to draft first.

    And the chance that each comes if the target has the network's law, float64[R, M]: its own probability where the
    request is greedy, else what the known noise makes of that; 0 where the request's rules leave a token out.

    logits : [R, Vd], the head's. draft_to_target : the target's id of each token it scores, int64[Vd]; None where it
    scores the target's own. vocab_size : of the target; what a head scores beyond is left out.

    Greedy rows go by probability. Sampled ones begin with what the target would draw if it had the head's law, with the
    very noise it will draw with, as far as that is one of the most probable tokens; the others follow as this noise
    favours them.
    """
    if draft_to_target is None:
        logits = logits[:, :vocab_size]
    if any(is_ruled(row) for row in rows):  # rules go by the target's ids
        if draft_to_target is not None:
            whole = logits.new_full((len(rows), vocab_size), float("-inf"))
            whole[:, draft_to_target] = logits
            logits, draft_to_target = whole, None
        logits = with_prefix_rules(logits[:, None], rows)[:, 0]
    scores = logits.float()
    is_sampled = np.array([not row.params.greedy for row in rows])
    if is_sampled.any():
        temperatures = [row.params.temperature if row.params.temperature > 0 else 1.0 for row in rows]
        scores = scores / torch.tensor(temperatures, device=scores.device).clamp_min(LOWEST_TEMPERATURE)[:, None]
    best = scores.topk(min(MOST_CANDIDATES, scores.shape[-1]))
    ids = best.indices if draft_to_target is None else draft_to_target[best.indices]
    token_ids: Ints = ids.cpu().numpy()
    logs: Floats = (best.values - scores.logsumexp(-1, keepdim=True)).double().cpu().numpy()
    if is_sampled.any():
        keys = np.array([row.keys()[0] if drawn else 0 for row, drawn in zip(rows, is_sampled, strict=True)], np.uint64)
        top_k = np.array([row.params.top_k if row.params.top_k > 0 else MOST_CANDIDATES for row in rows])
        top_p = np.array([row.params.top_p for row in rows])
        min_p = np.array([row.params.min_p for row in rows])
        _favour(token_ids, logs, is_sampled, keys, top_k, top_p, min_p)
    return token_ids, np.exp(logs)


@kernel
def _favour(
    token_ids: Ints,
    logs: Floats,
    is_sampled: npt.NDArray[np.bool_],
    keys: UInt64,
    top_k: Ints,
    top_p: Floats,
    min_p: Floats,
) -> None:
    """Bring the candidates of sampled rows, which come by probability, into the order of their noisy scores, in place.

    What top-k, top-p and min-p rule out goes to the end, with no chance. The greatest score of all others is Gumbel
    distributed (Maddison et al. 2014, section 3): so with probability p and noise g a token comes with the chance
    exp(-exp(-(log(p / (1 - p)) + g))). O(R M^2): M is small.
    """
    num_rows, most = token_ids.shape
    noisy = np.empty(most)
    for row in range(num_rows):
        if not is_sampled[row]:
            continue
        key, before = keys[row], 0.0
        for i in range(most):
            chance = math.exp(logs[row, i])
            is_kept = i == 0 or (
                i < top_k[row] and before < top_p[row] and chance >= min_p[row] * math.exp(logs[row, 0])
            )
            before += chance
            if not is_kept:
                logs[row, i] = -np.inf
            noisy[i] = logs[row, i] + gumbel_at(key, token_ids[row, i])
        for i in range(1, most):
            score, token, log, place = noisy[i], token_ids[row, i], logs[row, i], i
            while place > 0 and noisy[place - 1] < score:
                noisy[place], token_ids[row, place] = noisy[place - 1], token_ids[row, place - 1]
                logs[row, place] = logs[row, place - 1]
                place -= 1
            noisy[place], token_ids[row, place], logs[row, place] = score, token, log
        for i in range(most):
            logs[row, i] = math.expm1(logs[row, i]) * math.exp(-noisy[i]) if noisy[i] > -np.inf else -np.inf


_SIBLINGS = 3
"""Most tokens proposed beside that of the chain at any depth."""


def comb(token_ids: Sequence[Ints], chances: Sequence[Floats], prices: Floats, limit: int) -> Draft:
    """The chain of the first candidates, with the next ones of each depth as leaves where they may pay.

    token_ids, chances : of each depth the candidates, int64[M] and float64[M], after the first of the depth before.
    prices : as ``DraftRequest.prices``. limit : most tokens in all. The chain comes first, so that a draft that is cut
    keeps it; then the leaves, the likeliest first.
    """
    depth = min(len(token_ids), limit)
    leaves = []
    path = 1.0
    for i in range(depth):
        for rank in range(1, min(_SIBLINGS + 1, len(token_ids[i]))):
            chance = path * float(chances[i][rank])
            if chance > price_of(prices, depth):
                leaves.append((-chance, i, rank))
        path *= float(chances[i][0])
    nodes = [(int(token_ids[i][0]), i - 1, float(chances[i][0])) for i in range(depth)]
    for _chance, i, rank in sorted(leaves)[: limit - depth]:
        nodes.append((int(token_ids[i][rank]), i - 1, float(chances[i][rank])))
    tokens, parents, chances = zip(*nodes, strict=True)
    return Draft(
        np.array(tokens, np.int32),
        probabilities=np.array(chances),
        parents=None if parents == tuple(range(-1, len(parents) - 1)) else np.array(parents, np.int32),
    )


@dataclass(slots=True, eq=False)
class _Row:
    """One request while it is drafted for. ``chance`` : expected of the whole chain to be accepted."""

    index: int
    request: DraftRequest
    sampling: SamplingRow
    limit: int
    prices: Prices
    state: TextSlot
    chance: float = 1.0
    token_ids: list[Ints] = field(default_factory=list)
    chances: list[Floats] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return len(self.token_ids)

    def sampling_row(self) -> SamplingRow:
        """What choosing the next token needs: the chain before it counts as output."""
        end = len(self.request.context) + self.depth
        return self.sampling.at(self.state.text[:end], self.request.prompt_length)


_UNKNOWN_SAMPLING = SamplingRow(params=SamplingParams(temperature=0.0), noise=SequenceNoise.seeded(0))
_WARM_UP_ROWS, _WARM_UP_TOKENS = 8, 64


class NetworkDrafter:
    """Follows the text of each slot by itself, rows together, and then goes on token by token.

    A draft is the chain of what the target would choose if it had the network's law, with the next candidates as
    leaves: a tree, whether or not the request takes one; what judges it picks. The chain ends where the chance that all
    of it is accepted falls below the price of a token: by the network's own probabilities, corrected by what came of
    those before. ``Draft.probabilities`` are its own. Sampled requests are drafted for with the target's noise.

    Owned by one thread. A pass that fails leaves no trace: the network reads the slots again.
    """

    kind: ClassVar[int]
    source: ClassVar[str]
    """``Draft.source`` of what it proposes."""

    def __init__(self, slots: TextSlots, vocab_size: int, price: float) -> None:
        """``vocab_size`` : tokens below it are drafted. ``price`` : of a drafted token, in expected accepted tokens,
        where a request names none.
        """
        self._slots, self._vocab_size, self._price = slots, vocab_size, np.array([price])
        self._greedy_chances = PlattScaling(shift=0.5, scale=1.0)
        self._sampled_chances = PlattScaling(shift=1.0, scale=0.5)
        self._price_list = PriceList()
        self._last: dict[str, tuple[bool, Floats]] = {}

    def seconds_per_token(self, num_rows: int) -> float:
        """Measured time to draft one more token for each of ``num_rows`` requests together; 0 until it is known."""
        return self._price_list.seconds(num_rows)

    def seconds_to_begin(self, request: DraftRequest) -> float:
        """Expected time to read what is new in the context; 0 where that is little or not known."""
        return self._slots.seconds_to_read(request) if self._has_slot(request) else 0.0

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; empty where it is still read, and where it cannot be read."""
        return self._propose(requests, [self._slots.can_follow(request) for request in requests])

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn how far the chain was accepted; what follows the first wrong token was not tested."""
        greedy, own = self._last.get(request_id, (True, np.empty(0)))
        if draft.source != self.source or not len(own):
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
        self._slots.close(request_id)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run passes over one and over several slots, so that their time is known; while no slot holds a text."""
        target = self._slots.target
        context = np.ones(min(_WARM_UP_TOKENS, target.max_length - 3), np.int32)
        for num_rows in (1, 1, min(_WARM_UP_ROWS, target.num_slots)):
            for limit in (1, 3, 3):
                requests = [
                    DraftRequest(f"warm-up-{slot}", context, 1, None, limit, prices=np.zeros(1), slot=slot)
                    for slot in range(num_rows)
                ]
                self._propose(requests, [True] * num_rows)
                for request in requests:
                    self.finish(request.request_id)
        self._slots.reread()

    def _propose(self, requests: Sequence[DraftRequest], can_follow: Sequence[bool]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(requests)
        try:
            rows = [
                row
                for index, request in enumerate(requests)
                if can_follow[index] and (row := self._row(index, request)) is not None
            ]
            rows = self._go_on(rows)
        except BaseException:
            self._slots.reread()
            raise
        for row in rows:
            own = np.array([chances[0] for chances in row.chances])
            self._last[row.request.request_id] = row.sampling.params.greedy, own
            draft = comb(row.token_ids, row.chances, row.prices, row.limit)
            drafts[row.index] = replace(draft, source=self.source)
        return drafts

    def _row(self, index: int, request: DraftRequest) -> _Row | None:
        limit = min(request.limit, self._slots.target.max_length - len(request.context), MAX_OFFERED)
        if limit < 1 or not self._has_slot(request):
            return None
        state = self._slots.follow(request)
        if state is None:
            return None
        prices = self._price if request.prices is None else request.prices
        return _Row(index, request, request.sampling or _UNKNOWN_SAMPLING, limit, prices, state)

    def _has_slot(self, request: DraftRequest) -> bool:
        """A draft model may have fewer than the target, where memory lacks."""
        return request.slot is not None and 0 <= request.slot < len(self._slots.states)

    def _go_on(self, rows: list[_Row]) -> list[_Row]:
        """Draft token by token; the rows whose text has been read."""
        ready, said = self._slots.read([row.state for row in rows])
        rows = writing = [rows[index] for index in ready]
        if said is None:
            return []
        logits, carried = said
        self._choose(logits, writing)
        while going := [b for b, row in enumerate(writing) if self._pays(row)]:
            began = time.perf_counter()
            if len(going) < len(writing):
                carried = carried[going]
                writing = [writing[b] for b in going]
            tokens = np.array([row.token_ids[-1][0] for row in writing])
            logits, carried = self._slots.feed([row.state for row in writing], tokens, carried)
            self._choose(logits, writing)
            self._observe_pass(len(writing), time.perf_counter() - began)
        return rows

    def _choose(self, logits: torch.Tensor, rows: Sequence[_Row]) -> None:
        """Note the candidates of the next depth of each row, and go on with the first of them."""
        sampling = [row.sampling_row() for row in rows]
        token_ids, chances = candidates(logits, sampling, self._slots.draft_to_target, self._vocab_size)
        for b, row in enumerate(rows):
            row.state.text[len(row.request.context) + row.depth] = token_ids[b, 0]
            own = chances[b, :1]
            row.chance *= float(self._chances_of(row.sampling.params.greedy).estimate(own)[0])
            row.token_ids.append(token_ids[b])
            row.chances.append(chances[b])

    def _pays(self, row: _Row) -> bool:
        """Whether one more token is worth its price, going by what is known before it is drafted."""
        most = row.limit if self._slots.num_tokens is None else min(row.limit, self._slots.num_tokens)
        return row.depth < most and row.chance > price_of(row.prices, row.depth)

    def _observe_pass(self, num_rows: int, seconds: float) -> None:
        expected = self._price_list.seconds(num_rows)
        # One that took many times as long was probably interrupted: it counts as slow, but not as that slow.
        self._price_list.observe(num_rows, 0, min(seconds, OUTLIER * expected) if expected else seconds)

    def _chances_of(self, greedy: bool) -> PlattScaling:
        return self._greedy_chances if greedy else self._sampled_chances


class HeadDrafter(NetworkDrafter):
    """Drafts with a head, from the features that the target's passes leave in its slots."""

    kind = HEAD
    source = "head"

    def __init__(self, head: Head, target: Target, *, price: float = 0.2, chunk_tokens: int = 512) -> None:
        """``target`` : keeps the features that ``head`` reads. chunk_tokens : most positions read in one call."""
        super().__init__(HeadSlots(head, target, chunk_tokens), target.vocab_size, price)


class DraftModelDrafter(NetworkDrafter):
    """Drafts with a causal language model that has the target's vocabulary."""

    kind = MODEL
    source = "model"

    def __init__(
        self, model: Target, *, vocab_size: int | None = None, price: float = 0.2, chunk_tokens: int = 512
    ) -> None:
        """Drive ``model``, which belongs to this drafter alone and has a slot for each of the target's.

        vocab_size : of the target; None is the model's own. chunk_tokens : most tokens read in one call.
        Raises ModelError for a model that cannot take tokens back.
        """
        if not model.can_roll_back:
            raise ModelError(
                f"{type(model.model).__name__} is recurrent and cannot take tokens back, which a draft model must: "
                "choose one with attention"
            )
        super().__init__(ModelSlots(model, chunk_tokens), min(vocab_size or model.vocab_size, model.vocab_size), price)


def tapped_by(head: Head, device: torch.device, dtype: torch.dtype) -> Tapped:
    """What a target must keep of every position for ``head``, and what the head keeps besides."""
    return Tapped(head.feature_layers, head.combine, head.feature_size, bytes_per_token(head, device, dtype))
