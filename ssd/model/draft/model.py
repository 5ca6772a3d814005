"""A smaller model as a drafter: it goes on writing where the target stopped, and the target checks it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ssd.drafting.protocol import EMPTY_DRAFT, MODEL, Draft, DraftRequest, SamplingRow
from ssd.errors import ModelError
from ssd.model.draft.network import UNKNOWN_SAMPLING, WARM_UP_ROWS, WARM_UP_TOKENS, NetworkDrafter
from ssd.model.draft.slots import READ_WIDTH, DraftSlots, TextSlot
from ssd.model.loading.load_target import load_model, model_limit, open_target
from ssd.model.sampling.sampler import argmax_with_noise
from ssd.model.sampling.target_tokens import truncated_scores, with_prefix_rules
from ssd.model.target import Target
from ssd.pricing.rate import AcceptanceRates, price_of
from ssd.text.codec import TextCodec
from ssd.text.load_tokenizer import HubOptions

SOURCE = "model"
"""``Draft.source`` of what a draft model proposes."""


@dataclass(slots=True, eq=False)
class _Row:
    """One request while its draft is being written. ``chance`` : that all of it is accepted."""

    index: int
    request: DraftRequest
    sampling: SamplingRow
    limit: int
    state: TextSlot
    rate: float
    chance: float = 1.0
    token_ids: list[int] = field(default_factory=list)
    own_chances: list[float] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)

    def sampling_row(self) -> SamplingRow:
        """What drawing the next token needs: the draft so far counts as output."""
        end = len(self.request.context) + len(self.token_ids)
        return self.sampling.at(self.state.text[:end], self.request.prompt_length)


class DraftModelDrafter(NetworkDrafter):
    """Drafts with a causal language model that has the target's vocabulary.

    It keeps a slot per request, which reads what is new in the context (rows together), and draws token by token by the
    request's own sampling rules and with the target's noise. A draft has one token at least; it ends where the chance
    that the next token is accepted falls below its price. Estimates come from the draft model's probability of each
    token, corrected by what was accepted.

    Owned by one thread. A pass that fails leaves no trace: the slots read their text again.
    """

    kind = MODEL

    def __init__(
        self, target: Target, *, vocab_size: int | None = None, price: float = 0.2, chunk_tokens: int = 512
    ) -> None:
        """Drive ``target``, which belongs to this drafter alone and has a slot for every request at once.

        vocab_size : tokens below it are drafted; None is the model's own number. price : of a drafted token, in
        expected accepted tokens, where a request names none. chunk_tokens : most tokens read in one call.
        Raises ModelError for a model that cannot take tokens back.
        """
        if not target.can_roll_back:
            raise ModelError(
                f"{type(target.model).__name__} is recurrent and cannot take tokens back, which a draft model must: "
                "choose one with attention"
            )
        super().__init__(price)
        self._target = target
        self._vocab_size = min(vocab_size or target.vocab_size, target.vocab_size)
        self._slots = DraftSlots(target, chunk_tokens)
        self._rates = AcceptanceRates()
        self._last: dict[str, _Row] = {}

    @property
    def num_free_slots(self) -> int:
        """Slots that no request has."""
        return self._slots.num_free

    def seconds_to_begin(self, request: DraftRequest) -> float:
        """Expected time for the model to read what is new to it in the context; 0 where that is little or not known."""
        return self._slots.seconds_to_read(request.request_id, len(request.context))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; empty where the model is still reading."""
        try:
            return self._propose(requests)
        except BaseException:
            self._slots.reread()
            raise

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn from what was accepted; tokens after the first rejected one were not tested."""
        row = self._last.get(request_id)
        if row is None or draft.source != SOURCE or not len(draft.token_ids):
            return
        self._rates.learn(request_id, len(draft.token_ids), num_accepted)
        tested = min(len(draft.token_ids), num_accepted + 1)
        self._chances_of(row.sampling.params.greedy).learn(
            np.array(row.own_chances[:tested]), np.arange(tested) < num_accepted
        )

    def finish(self, request_id: str) -> None:
        """Forget a request and free its slot."""
        self._slots.close(request_id)
        self._rates.forget(request_id)
        self._last.pop(request_id, None)

    def warm_up(self) -> None:
        """Run passes over one and over several slots, so that their time is known before the first request."""
        for num_rows in (1, 1, min(WARM_UP_ROWS, self._target.num_slots)):
            names = [f"warm-up-{row}" for row in range(num_rows)]
            context = np.ones(min(WARM_UP_TOKENS, self._target.max_length - 3), np.int32)
            for limit in (1, 3, 3):
                self._propose([DraftRequest(name, context, 1, None, limit, prices=np.zeros(1)) for name in names])
            for name in names:
                self.finish(name)

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(requests)
        rows = [row for index, request in enumerate(requests) if (row := self._row(index, request)) is not None]
        ready, said = self._slots.read([row.state for row in rows])
        rows = writing = [rows[index] for index in ready]
        for logits in said:
            self._draw(logits, writing)
        while writing := [row for row in writing if self._pays(row)]:
            began = time.perf_counter()
            self._draw(self._slots.feed([row.state for row in writing]), writing)
            self._observe_pass(len(writing), time.perf_counter() - began)
        for row in rows:
            self._last[row.request.request_id] = row
            drafts[row.index] = Draft(np.array(row.token_ids, np.int32), 0, SOURCE, np.array(row.estimates))
        return drafts

    def _row(self, index: int, request: DraftRequest) -> _Row | None:
        limit = min(request.limit, self._target.max_length - len(request.context))
        self._last.pop(request.request_id, None)
        if limit < 1:
            return None
        state = self._slots.follow(request.request_id, request.context)
        if state is None:
            return None
        rate = self._rates.rate(request.request_id)
        return _Row(index, request, request.sampling or UNKNOWN_SAMPLING, limit, state, rate)

    @torch.inference_mode()
    def _draw(self, logits: torch.Tensor, rows: Sequence[_Row]) -> None:
        """Append one token to the draft of each row."""
        token_ids, chances = draw(logits[:, : self._vocab_size], [row.sampling_row() for row in rows])
        for b, row in enumerate(rows):
            row.state.text[len(row.request.context) + len(row.token_ids)] = token_ids[b]
            row.token_ids.append(int(token_ids[b]))
            row.own_chances.append(float(chances[b]))
            row.estimates.append(float(self._chances_of(row.sampling.params.greedy).estimate(chances[b : b + 1])[0]))
            row.chance *= row.estimates[-1]

    def _pays(self, row: _Row) -> bool:
        """Whether one more token is worth its price, going by what is known before it is drawn."""
        depth = len(row.token_ids)
        prices = self._price if row.request.prices is None else row.request.prices
        return depth < row.limit and row.chance * row.rate >= price_of(prices, depth)


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """One token for each row, chosen by the target's own rules, and the draft model's probability of each: [B].

    logits : [B, V], the draft model's; V may be smaller than the target's vocabulary. rows : without a draft; the
    context is what comes before the token to draw.

    Sampled rows draw with the very noise the target uses at this position, so that a draft model with the target's law
    draws the target's token, and one with a similar law mostly does (the Gumbel coupling: Maddison et al. 2014).
    """
    scores = with_prefix_rules(logits[:, None], rows)[:, 0].float()
    token_ids = scores.argmax(-1)
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy]
    if sampled:
        scores = scores.clone()
        scores[sampled] = truncated_scores(scores[sampled], [rows[b].params for b in sampled])
        keys = np.concatenate([rows[b].keys() for b in sampled])
        token_ids[sampled] = torch.from_numpy(argmax_with_noise(scores[sampled], keys)).to(token_ids.device)
    chances = (scores.gather(-1, token_ids[:, None])[:, 0] - scores.logsumexp(-1)).double().exp()
    return token_ids.cpu().numpy(), chances.cpu().numpy()


def load_draft_model(
    name_or_path: str | Path,
    target: Target,
    codec: TextCodec,
    *,
    dtype: str = "auto",
    device: str = "auto",
    hub: HubOptions | None = None,
    enforce_eager: bool = False,
    fuse_linears: bool = False,
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
        fuse_linears=fuse_linears,
        exact="off",  # a draft may be any
    )
    return DraftModelDrafter(draft_target, vocab_size=target.vocab_size)
