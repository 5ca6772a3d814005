"""A draft head as a drafter: it reads what the target made of the text so far, and says what comes next."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ssd.compiled.addresses import inlined, kernel
from ssd.drafting.noise import UInt64, gumbel_at
from ssd.drafting.protocol import EMPTY_DRAFT, HEAD, MAX_OFFERED, Draft, DraftRequest, Prices, SamplingRow
from ssd.model.draft.network import UNKNOWN_SAMPLING, WARM_UP_ROWS, WARM_UP_TOKENS, NetworkDrafter
from ssd.model.heads.head import Head, ParallelHead, RecurrentHead
from ssd.model.heads.slots import HeadSlot, HeadSlots, bytes_per_token
from ssd.model.kv.tree import leading_chain
from ssd.model.layers.tap import Tapped
from ssd.model.sampling.noise import LOWEST_TEMPERATURE
from ssd.model.sampling.target_tokens import is_ruled, with_prefix_rules
from ssd.model.target import Target
from ssd.pricing.rate import price_of

MOST_CANDIDATES = 32

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Of R rows M tokens each, the one to draft first.

    ``token_ids`` : int64[R, M], the target's. ``chances`` : float64[R, M], the chance that each comes if the
    target has the head's law: its own probability where the request is greedy, else what the known noise makes of that
    at the request's temperature; 0 where the request's rules leave a token out.
    """

    token_ids: npt.NDArray[np.int64]
    chances: npt.NDArray[np.float64]


def candidates(
    logits: torch.Tensor, rows: Sequence[SamplingRow], draft_to_target: torch.Tensor | None, vocab_size: int
) -> Candidates:
    """The most promising tokens after the contexts of ``rows``, which have no draft.

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
    return Candidates(token_ids, np.exp(logs))


@inlined
def _foreseen(log: float, noisy: float) -> float:
    """The logarithm of the chance of a token of log-probability ``log`` whose noisy score, ``log`` and noise, is known.

    The greatest score of the others is Gumbel distributed (Maddison et al. 2014, section 3): with probability p and
    noise g it is exp(-exp(-(log(p / (1 - p)) + g))).
    """
    return math.expm1(log) * math.exp(-noisy) if noisy > -np.inf else -np.inf


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

    What top-k, top-p and min-p rule out goes to the end, with no chance; the others get that of `_foreseen`. O(R M^2):
    M is small.
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
            logs[row, i] = _foreseen(logs[row, i], noisy[i])


SOURCE = "head"
"""``Draft.source`` of what a draft head proposes."""

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
    return _draft(nodes)


def product(token_ids: Ints, chances: Floats, prices: Floats, limit: int) -> Draft:
    """The likeliest paths where each depth has candidates of its own, whatever came before: one token at least.

    token_ids, chances : int64[K, M] and float64[K, M]. prices, limit : as for `comb`, and the same order.
    O(limit log limit).
    """
    nodes: list[tuple[int, int, float]] = []
    chain: list[int] = []
    found = [
        (-float(chances[0, 0]), 0, 0, 0, -1, 1.0)
    ]  # chance of the path, serial number, depth, rank, parent, before
    serial = 0
    while found and len(nodes) < limit:
        negative, _, depth, rank, parent, before = heapq.heappop(found)
        if nodes and -negative <= price_of(prices, len(nodes)):
            continue
        if rank == 0 and parent == (chain[-1] if chain else -1):
            chain.append(len(nodes))
        nodes.append((int(token_ids[depth, rank]), parent, float(chances[depth, rank])))
        followers = [(depth, rank + 1, parent, before), (depth + 1, 0, len(nodes) - 1, -negative)]
        for next_depth, next_rank, next_parent, chance in followers:
            if next_depth < len(token_ids) and next_rank < token_ids.shape[1]:
                serial += 1
                path = chance * float(chances[next_depth, next_rank])
                heapq.heappush(found, (-path, serial, next_depth, next_rank, next_parent, chance))
    order = chain + sorted(set(range(len(nodes))) - set(chain))
    new = {old: index for index, old in enumerate(order)} | {-1: -1}
    return _draft([(nodes[old][0], new[nodes[old][1]], nodes[old][2]) for old in order])


def _draft(nodes: Sequence[tuple[int, int, float]]) -> Draft:
    tokens, parents, chances = zip(*nodes, strict=True)
    return Draft(
        np.array(tokens, np.int32),
        source=SOURCE,
        probabilities=np.array(chances),
        parents=None if parents == tuple(range(-1, len(parents) - 1)) else np.array(parents, np.int32),
    )


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


class HeadDrafter(NetworkDrafter):
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
        super().__init__(price)
        self._head: RecurrentHead | ParallelHead = head
        self._target = target
        self._features = target.features
        self._slots = HeadSlots(head, target, chunk_tokens) if isinstance(head, RecurrentHead) else None
        self._last: dict[str, tuple[bool, Floats]] = {}

    def seconds_per_token(self, num_rows: int) -> float:
        """Measured time to draft one more token for each of ``num_rows`` requests together; 0 until it is known."""
        seconds = super().seconds_per_token(num_rows)
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
        context = np.ones(min(WARM_UP_TOKENS, self._target.max_length - 3), np.int32)
        for num_rows in (1, 1, min(WARM_UP_ROWS, self._target.num_slots)):
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
        return _Row(index, request, request.sampling or UNKNOWN_SAMPLING, slot, limit, prices, text, state)

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
        ready, said = slots.read(states)
        rows = writing = [rows[index] for index in ready]
        if not said:
            return []
        logits, features = said
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


def _product(token_ids: Sequence[Ints], chances: Sequence[Floats], prices: Prices, limit: int) -> Draft:
    return product(np.stack(token_ids), np.stack(chances), prices, limit)


def tapped_by(head: Head, device: torch.device, dtype: torch.dtype) -> Tapped:
    """What a target must keep of every position for ``head``, and what the head keeps besides."""
    own = bytes_per_token(head, device, dtype) if isinstance(head, RecurrentHead) else 0
    return Tapped(head.feature_layers, head.combine, head.feature_size, own)
