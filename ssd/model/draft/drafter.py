"""Drafters with a neural network: a draft head on the target's hidden states, or a smaller draft model."""

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
    DraftOutcome,
    DraftRequest,
    SamplingContext,
    ScoredPass,
    TokenCosts,
)
from ssd.errors import ModelError
from ssd.model.draft.candidates import Floats, Ints, best_candidates, build_draft
from ssd.model.draft.slots import READ_WIDTH, HeadSlots, ModelSlots, TextSlot, TextSlots, bytes_per_token
from ssd.model.heads.networks import Head
from ssd.model.kv.tree import leading_chain
from ssd.model.layers.hidden_states import FeatureSpec
from ssd.model.loading.load_target import load_model, model_limit, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec
from ssd.text.load_tokenizer import HubOptions


@dataclass(slots=True, eq=False)
class _GrowingDraft:
    """The state of one request's draft while `NetworkDrafter.propose` appends tokens to the draft."""

    index: int
    request: DraftRequest
    sampling: SamplingContext
    limit: int
    token_costs: TokenCosts
    state: TextSlot
    chain_acceptance: float = 1.0  # the expected probability that all tokens of the chain are accepted
    token_ids: list[Ints] = field(default_factory=list)
    acceptance_probs: list[Floats] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return len(self.token_ids)

    def sampling_context(self) -> SamplingContext:
        end = len(self.request.context) + self.depth
        return self.sampling.with_text(self.state.text[:end], self.request.prompt_length)


_UNKNOWN_SAMPLING = SamplingContext(params=SamplingParams(temperature=0.0), noise=SequenceNoise.seeded(0))
_WARM_UP_ROWS, _WARM_UP_TOKENS = 8, 64
_CHUNK_TOKENS = 512
_DEFAULT_COSTS = np.array([0.2])  # the cost of a draft token, in expected accepted tokens, if a request gives none


class NetworkDrafter:
    """Drafts tokens for batches of requests with a neural network: a draft model or a draft head.

    After reading the new tokens of the contexts, the network drafts one token per forward pass: the token that the
    target would sample if it predicted the same distribution, with the target's Gumbel noise. The chain ends when the
    probability that all of its tokens are accepted falls below the token cost. Only for this decision, the network's
    probabilities are calibrated by the outcomes of earlier drafts; ``Draft.probabilities`` are uncalibrated.

    Other likely candidates are added to the chain as leaves, so a draft is a tree. If a request accepts only chains,
    the caller must use the tree's chain. Only one thread may use the drafter. After a failed forward pass, the network
    reads all contexts again.
    """

    kind: ClassVar[int]  # for the acceptance model
    source: ClassVar[str]  # the ``Draft.source`` of its drafts

    def __init__(self, slots: TextSlots, vocab_size: int) -> None:
        self._slots, self._vocab_size = slots, vocab_size
        # The calibrations of acceptance probabilities, for greedy (True) and for sampled requests (False).
        self._calibration = {True: PlattScaling(shift=0.5, scale=1.0), False: PlattScaling(shift=1.0, scale=0.5)}
        self._cost_model = CostModel()
        self._last: dict[str, tuple[bool, Floats]] = {}

    def seconds_per_token(self, num_rows: int) -> float:
        """Return the seconds to add one token to each of ``num_rows`` drafts; 0 before the first measurement."""
        return self._cost_model.seconds(num_rows)

    def seconds_to_start(self, request: DraftRequest) -> float:
        """Return the expected seconds that the network takes to read a request's new tokens before it can draft.

        Returns 0 for at most 8 new tokens, because these are read together with other requests, and before a
        measurement.
        """
        return self._slots.seconds_to_read(request) if self._has_slot(request) else 0.0

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft per request, in order. A draft is empty until the network has read the whole context."""
        return self._propose(requests, [self._slots.can_read(request) for request in requests])

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        """Calibrate the network's acceptance probabilities with the number of draft tokens that the target accepted.

        Only the tokens of the draft's main chain are used, up to the chain's first rejected token.
        """
        for outcome in outcomes:
            draft, (greedy, own) = outcome.draft, self._last.get(outcome.request_id, (True, np.empty(0)))
            if draft.source != self.source or not len(own):
                continue
            length = min(len(own), len(draft.token_ids) if draft.parents is None else leading_chain(draft.parents))
            path = np.arange(outcome.num_accepted) if draft.path is None else draft.path
            wrong = np.flatnonzero(path[:length] != np.arange(min(length, len(path))))
            right = int(wrong[0]) if len(wrong) else min(length, len(path))
            tested = min(length, right + 1)
            self._calibration[greedy].learn(own[:tested], np.arange(tested) < right)

    def finish(self, request_id: str) -> None:
        """Drop the drafter's state of a request that has ended."""
        self._last.pop(request_id, None)
        self._slots.release(request_id)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Time forward passes of the draft network before the first request; clears all of its KV cache slots."""
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
        self._slots.clear()

    def _propose(self, requests: Sequence[DraftRequest], can_follow: Sequence[bool]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(requests)
        try:
            rows = [
                row
                for index, request in enumerate(requests)
                if can_follow[index] and (row := self._row(index, request)) is not None
            ]
            rows = self._draft_rows(rows)
        except BaseException:
            self._slots.clear()
            raise
        for row in rows:
            own = np.array([probs[0] for probs in row.acceptance_probs])
            self._last[row.request.request_id] = row.sampling.params.greedy, own
            draft = build_draft(row.token_ids, row.acceptance_probs, row.token_costs, row.limit)
            drafts[row.index] = replace(draft, source=self.source)
        return drafts

    def _row(self, index: int, request: DraftRequest) -> _GrowingDraft | None:
        limit = min(request.limit, self._slots.target.max_length - len(request.context), MAX_PROPOSED_TOKENS)
        if limit < 1 or not self._has_slot(request):
            return None
        state = self._slots.assign(request)
        if state is None:
            return None
        token_costs = _DEFAULT_COSTS if request.token_costs is None else request.token_costs
        return _GrowingDraft(index, request, request.sampling or _UNKNOWN_SAMPLING, limit, token_costs, state)

    def _has_slot(self, request: DraftRequest) -> bool:
        return request.slot is not None and 0 <= request.slot < len(self._slots.states)

    def _draft_rows(self, rows: list[_GrowingDraft]) -> list[_GrowingDraft]:
        ready, result = self._slots.read([row.state for row in rows])
        rows = writing = [rows[index] for index in ready]
        if result is None:
            return []
        logits, carried = result
        self._add_candidates(logits, writing)
        while going := [b for b, row in enumerate(writing) if self._is_worthwhile(row)]:
            began = time.perf_counter()
            if len(going) < len(writing):
                carried = carried[going]
                writing = [writing[b] for b in going]
            tokens = np.array([row.token_ids[-1][0] for row in writing])
            logits, carried = self._slots.append_drafted([row.state for row in writing], tokens, carried)
            self._add_candidates(logits, writing)
            self._observe_pass(len(writing), time.perf_counter() - began)
        return rows

    def _add_candidates(self, logits: torch.Tensor, rows: Sequence[_GrowingDraft]) -> None:
        sampling = [row.sampling_context() for row in rows]
        token_ids, probs = best_candidates(logits, sampling, self._slots.draft_to_target, self._vocab_size)
        for b, row in enumerate(rows):
            row.state.text[len(row.request.context) + row.depth] = token_ids[b, 0]
            own = probs[b, :1]
            row.chain_acceptance *= float(self._calibration[row.sampling.params.greedy].estimate(own)[0])
            row.token_ids.append(token_ids[b])
            row.acceptance_probs.append(probs[b])

    def _is_worthwhile(self, row: _GrowingDraft) -> bool:
        most = row.limit if self._slots.num_tokens is None else min(row.limit, self._slots.num_tokens)
        return row.depth < most and row.chain_acceptance > cost_at(row.token_costs, row.depth)

    def _observe_pass(self, num_rows: int, seconds: float) -> None:
        expected = self._cost_model.seconds(num_rows)
        # A pass that took many times as long as expected was probably interrupted, so its time is limited.
        self._cost_model.observe(num_rows, 0, min(seconds, OUTLIER * expected) if expected else seconds)


class HeadDrafter(NetworkDrafter):
    """Drafts tokens with a draft head, from the hidden states that the target's forward passes store in the KV cache.

    ``chunk_tokens`` is the maximum number of context positions that the head reads in one call.
    """

    kind = HEAD
    source = "head"

    def __init__(self, head: Head, target: Target, chunk_tokens: int = _CHUNK_TOKENS) -> None:
        super().__init__(HeadSlots(head, target, chunk_tokens), target.vocab_size)


def feature_spec(head: Head, device: torch.device, dtype: torch.dtype) -> FeatureSpec:
    """Return a description of the hidden states that the target must store for a draft head.

    It includes the bytes per token of the head's own KV cache. On a CPU the hidden states themselves are stored, and
    the head combines those that it reads: with the bundled model, combining takes 4 % of a pass, and the head may be
    asked seldom. On a GPU, where memory is scarcer, the combined features are stored.
    """
    own_bytes = bytes_per_token(head, device, dtype)
    if device.type == "cpu":
        return FeatureSpec(head.feature_layers, None, head.input_size, own_bytes)
    return FeatureSpec(head.feature_layers, head.combine, head.feature_size, own_bytes)


class DraftModelDrafter(NetworkDrafter):
    """Drafts tokens with a smaller causal language model that has the target's vocabulary.

    ``model`` must have a slot for each of the target's slots, and no other code may use it. ``chunk_tokens`` is the
    maximum number of context tokens that the model reads in one call. Raises ModelError for a recurrent model, which
    cannot roll back.
    """

    kind = MODEL
    source = "model"

    def __init__(self, model: Target, vocab_size: int | None = None, chunk_tokens: int = _CHUNK_TOKENS) -> None:
        if not model.can_roll_back:
            raise ModelError(
                f"the draft model {type(model.model).__name__} is recurrent, so rejected tokens cannot be removed from "
                "its state: choose a draft model with attention"
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
    """Load a Hugging Face causal language model as a draft model; it must have the target's tokenizer.

    Requests with a longer context than the draft model supports get no drafts. ``codec`` is the target's tokenizer; the
    other options are those of `load_model`. Raises ModelError if the model cannot be loaded, has another tokenizer or
    does not fit into memory.
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
            f"draft model {str(name_or_path)!r} scores {vocab_size} tokens, but its own tokenizer has "
            f"{codec.vocab_size}, so its files do not belong together: download the draft model again"
        )
    limit = model_limit(model)
    draft_target = open_target(
        model,
        num_slots=target.num_slots,
        max_length=target.max_length if limit is None else min(limit, target.max_length),
        max_draft_tokens=READ_WIDTH - 1,
        enforce_eager=enforce_eager,
        batch_invariant="off",  # any draft is valid, so bit-identical logits are not needed
    )
    return DraftModelDrafter(draft_target, vocab_size=target.vocab_size)
