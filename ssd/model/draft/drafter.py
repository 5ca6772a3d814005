"""A network as a drafter: a head that reads what the target made of the text so far, or a smaller model beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from ssd.config import SamplingParams
from ssd.cost_model.calibration import PlattScaling
from ssd.cost_model.cost_model import CostModel
from ssd.cost_model.pass_costs import OUTLIER
from ssd.cost_model.throughput import cost_at
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import (
    EMPTY_DRAFT,
    HEAD,
    MAX_PROPOSED_TOKENS,
    MODEL,
    Draft,
    DraftRequest,
    SamplingRow,
    TokenCosts,
)
from ssd.errors import ModelError
from ssd.model.draft.candidates import Floats, Ints, candidates, comb
from ssd.model.draft.slots import READ_WIDTH, HeadSlots, ModelSlots, TextSlot, TextSlots, bytes_per_token
from ssd.model.heads.networks import Head
from ssd.model.kv.tree import leading_chain
from ssd.model.layers.tap import Tapped
from ssd.model.loading.load_target import load_model, model_limit, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec
from ssd.text.load_tokenizer import HubOptions


@dataclass(slots=True, eq=False)
class _Row:
    """One request while it is drafted for. ``chance`` : expected of the whole chain to be accepted."""

    index: int
    request: DraftRequest
    sampling: SamplingRow
    limit: int
    token_costs: TokenCosts
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
        return self.sampling.with_text(self.state.text[:end], self.request.prompt_length)


_UNKNOWN_SAMPLING = SamplingRow(params=SamplingParams(temperature=0.0), noise=SequenceNoise.seeded(0))
_WARM_UP_ROWS, _WARM_UP_TOKENS = 8, 64
_CHUNK_TOKENS = 512
_NO_TOKEN_COSTS = np.array([0.2])
"""Of a drafted token, in expected accepted tokens, where a request names none."""


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

    def __init__(self, slots: TextSlots, vocab_size: int) -> None:
        """``vocab_size`` : tokens below it are drafted."""
        self._slots, self._vocab_size = slots, vocab_size
        self._chances = {True: PlattScaling(shift=0.5, scale=1.0), False: PlattScaling(shift=1.0, scale=0.5)}
        """Of greedy rows and of sampled ones."""
        self._cost_model = CostModel()
        self._last: dict[str, tuple[bool, Floats]] = {}

    def seconds_per_token(self, num_rows: int) -> float:
        """Measured time to draft one more token for each of ``num_rows`` requests together; 0 until it is known."""
        return self._cost_model.seconds(num_rows)

    def seconds_to_start(self, request: DraftRequest) -> float:
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
        self._chances[greedy].learn(own[:tested], np.arange(tested) < right)

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
                    DraftRequest(f"warm-up-{slot}", context, 1, None, limit, token_costs=np.zeros(1), slot=slot)
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
            draft = comb(row.token_ids, row.chances, row.token_costs, row.limit)
            drafts[row.index] = replace(draft, source=self.source)
        return drafts

    def _row(self, index: int, request: DraftRequest) -> _Row | None:
        limit = min(request.limit, self._slots.target.max_length - len(request.context), MAX_PROPOSED_TOKENS)
        if limit < 1 or not self._has_slot(request):
            return None
        state = self._slots.follow(request)
        if state is None:
            return None
        token_costs = _NO_TOKEN_COSTS if request.token_costs is None else request.token_costs
        return _Row(index, request, request.sampling or _UNKNOWN_SAMPLING, limit, token_costs, state)

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
            row.chance *= float(self._chances[row.sampling.params.greedy].estimate(own)[0])
            row.token_ids.append(token_ids[b])
            row.chances.append(chances[b])

    def _pays(self, row: _Row) -> bool:
        """Whether one more token is worth its price, going by what is known before it is drafted."""
        most = row.limit if self._slots.num_tokens is None else min(row.limit, self._slots.num_tokens)
        return row.depth < most and row.chance > cost_at(row.token_costs, row.depth)

    def _observe_pass(self, num_rows: int, seconds: float) -> None:
        expected = self._cost_model.seconds(num_rows)
        # One that took many times as long was probably interrupted: it counts as slow, but not as that slow.
        self._cost_model.observe(num_rows, 0, min(seconds, OUTLIER * expected) if expected else seconds)


class HeadDrafter(NetworkDrafter):
    """Drafts with a head, from the features that the target's passes leave in its slots."""

    kind = HEAD
    source = "head"

    def __init__(self, head: Head, target: Target, chunk_tokens: int = _CHUNK_TOKENS) -> None:
        """``target`` : keeps the features that ``head`` reads. chunk_tokens : most positions read in one call."""
        super().__init__(HeadSlots(head, target, chunk_tokens), target.vocab_size)


def tapped_by(head: Head, device: torch.device, dtype: torch.dtype) -> Tapped:
    """What a target must keep of every position for ``head``, and what the head keeps besides."""
    return Tapped(head.feature_layers, head.combine, head.feature_size, bytes_per_token(head, device, dtype))


class DraftModelDrafter(NetworkDrafter):
    """Drafts with a causal language model that has the target's vocabulary."""

    kind = MODEL
    source = "model"

    def __init__(self, model: Target, vocab_size: int | None = None, chunk_tokens: int = _CHUNK_TOKENS) -> None:
        """Drive ``model``, which belongs to this drafter alone and has a slot for each of the target's.

        vocab_size : of the target; None is the model's own. Raises ModelError for a model that cannot take tokens back.
        """
        if not model.can_roll_back:
            raise ModelError(
                f"{type(model.model).__name__} is recurrent and cannot take tokens back, which a draft model must: "
                "choose one with attention"
            )
        super().__init__(ModelSlots(model, chunk_tokens), min(vocab_size or model.vocab_size, model.vocab_size))


def load_draft_model(
    name_or_path: str | Path,
    target: Target,
    codec: TextCodec,
    *,
    dtype: str = "auto",
    device: str = "auto",
    hub: HubOptions | None = None,
    enforce_eager: bool = False,
) -> DraftModelDrafter:
    """A drafter around a Hugging Face causal language model that shares the target's tokenizer.

    codec : the target's. hub : where an id is fetched from. The others are as for the target. Contexts longer than the
    draft model takes get no drafts. Raises ModelError when it cannot be loaded, has another tokenizer or does not fit.
    """
    own = TextCodec.load(str(name_or_path), hub)
    if own.fingerprint != codec.fingerprint:
        raise ModelError(
            f"draft model {str(name_or_path)!r} has another tokenizer than the target: {own.vocab_size} tokens "
            f"(fingerprint {own.fingerprint}), expected {codec.vocab_size} ({codec.fingerprint}). Choose a draft model "
            "of the target's family, or leave the draft model out"
        )
    model = load_model(name_or_path, dtype=dtype, device=device, hub=hub)
    vocab_size: int = model.config.get_text_config().vocab_size
    if vocab_size < codec.vocab_size:
        raise ModelError(
            f"draft model {str(name_or_path)!r} scores {vocab_size} tokens, but its tokenizer has {codec.vocab_size}: "
            "its files do not belong together. Download it again"
        )
    limit = model_limit(model)
    draft_target = open_target(
        model,
        num_slots=target.num_slots,
        max_length=target.max_length if limit is None else min(limit, target.max_length),
        max_draft_tokens=READ_WIDTH - 1,
        enforce_eager=enforce_eager,
        exact="off",  # a draft may be any
    )
    return DraftModelDrafter(draft_target, vocab_size=target.vocab_size)
