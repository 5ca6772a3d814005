"""A batch of two classes decoded by the engine, whose passes take what a cost model says and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from benchmarks.host.recited import RecitingTarget
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest, make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine, Request
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

Text = npt.NDArray[np.int32]

CLASSES: Final = ("again", "new")
"""Greedy, a text that is stored with few tokens changed; at temperature 1, one half of whose tokens are other ones."""

COSTS: Final = {"cpu": (4.6e-3, 7.8e-5), "h100": (7.09e-3, 2.1e-5)}
"""Seconds of a pass and of each of its positions: of the bundled model on two cores, of Llama-3.1-8B on an H100."""

PROMPT_TOKENS: Final = 96
LIMIT: Final = 16
_FIRST_STEPS: Final = 20
_CHANGED: Final = {"again": 0.04, "new": 0.5}


@dataclass(frozen=True, slots=True)
class Prices:
    """How drafts are priced: as the engine does, or where it is given ``by_class``. ``drafts`` : of which classes any
    are made."""

    name: str
    by_class: tuple[float, float] | None = None
    drafts: tuple[str, ...] = CLASSES


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of the clock, by class. ``is_right`` : whether each row said its text."""

    again: float
    new: float
    width: float
    is_right: bool

    @property
    def total(self) -> float:
        """Of all rows."""
        return self.again + self.new


def decode(
    model: PreTrainedModel,
    codec: TextCodec,
    text: Text,
    batch: int,
    cost: str,
    prices: Prices,
    num_steps: int,
    seed: int,
) -> Rates:
    """``num_steps`` steps of a batch that is half of each class. The same for the same arguments, but for the order in
    which the engine's own clock lets rows be asked."""
    fixed, per_position = COSTS[cost]
    length = PROMPT_TOKENS + (num_steps + _FIRST_STEPS) * (LIMIT + 1)
    target = RecitingTarget(model, batch, length, LIMIT + 1, lambda _positions: 0.0)
    draft = DraftConfig(num_speculative_tokens=LIMIT)
    drafter = make_drafter("none", draft) if not prices.drafts else _Priced(SuffixDrafter(), prices)
    with CacheSet(CacheConfig(), fingerprint=codec.fingerprint, inline=True) as caches:
        config = EngineConfig(max_num_seqs=batch, enable_prefix_caching=False)
        engine = Engine(target, drafter=drafter, caches=caches, config=config, draft=draft)
        target.warm_up()
        clock = _Clock(engine, fixed, per_position)
        said: list[list[int]] = [[] for _ in range(batch)]
        texts = _submit(engine, target, caches, text, batch, length, seed)
        counted = [0] * batch
        while not all(said):
            _step(engine, said)
        for step in range(_FIRST_STEPS + num_steps):
            if step == _FIRST_STEPS:
                clock.restart()
                counted = [len(tokens) for tokens in said]
            _step(engine, said)
        new = [len(tokens) - before for tokens, before in zip(said, counted, strict=True)]
        return Rates(
            sum(new[0::2]) / clock.seconds,
            sum(new[1::2]) / clock.seconds,
            clock.positions / clock.passes / batch,
            all(
                text[PROMPT_TOKENS:].tolist()[: len(tokens)] == tokens for text, tokens in zip(texts, said, strict=True)
            ),
        )


def _submit(
    engine: Engine, target: RecitingTarget, caches: CacheSet, text: Text, batch: int, length: int, seed: int
) -> list[Text]:
    random = np.random.default_rng(seed)
    texts = []
    for row in range(batch):
        name = CLASSES[row % 2]
        begin = int(random.integers(0, len(text) - length))
        original = text[begin : begin + length]
        said, is_changed = original.copy(), random.random(length) < _CHANGED[name]
        said[is_changed] = random.choice(text, int(is_changed.sum()))
        if name == "again":
            caches.get("default").append(original, prompt_length=PROMPT_TOKENS)
        target.recite(row, said)  # free slots are given from the lowest on
        sampling = SamplingParams(
            max_tokens=length - PROMPT_TOKENS, temperature=float(name == "new"), seed=row, ignore_eos=True
        )
        prompt = tuple(said[:PROMPT_TOKENS].tolist())
        engine.submit(Request(request_id=str(row), prompt_token_ids=prompt, sampling=sampling, learn=False))
        texts.append(said)
    caches.maintain()
    return texts


def _step(engine: Engine, said: list[list[int]]) -> None:
    for output in engine.step():
        said[int(output.request_id)] += output.token_ids


class _Clock:
    """Tells the engine that its passes take what they cost, and adds that up."""

    def __init__(self, engine: Engine, fixed: float, per_position: float) -> None:
        self._cost = fixed, per_position
        proposals = engine._proposals
        prices = proposals._price_list
        for rows in (1, 8):
            for width in (1, 2, 5, LIMIT + 1):
                for _ in range(4):
                    prices.calibrate(rows * width, self._seconds(rows * width), is_wide=width > 1)
        prices.begin()
        self._observe = proposals.observe_pass
        proposals.observe_pass = self._observe_pass  # type: ignore[method-assign]
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.seconds, self.positions, self.passes = 0.0, 0, 0

    def _seconds(self, num_positions: int) -> float:
        fixed, per_position = self._cost
        return fixed + per_position * num_positions

    def _observe_pass(self, drafts: Sequence[Draft], num_tokens: int, seconds: float) -> None:
        positions = len(drafts) * (1 + max(len(draft.token_ids) for draft in drafts))
        seconds = self._seconds(positions)
        self.seconds += seconds
        self.positions += positions
        self.passes += 1
        self._observe(drafts, num_tokens, seconds)


class _Priced(Drafter):
    """A drafter that is told other prices, and drafts for some classes only."""

    def __init__(self, drafter: SuffixDrafter, prices: Prices) -> None:
        self._drafter = drafter
        self._prices = prices

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        for request in requests:
            assert request.sampling is not None
            number = 0 if request.sampling.params.greedy else 1
            if self._prices.by_class is not None:
                request.prices = np.array([self._prices.by_class[number]])
            if CLASSES[number] not in self._prices.drafts:
                request.limit = 0
        return self._drafter.propose(requests)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Tell the drafter."""
        self._drafter.observe(request_id, draft, num_accepted)

    def finish(self, request_id: str) -> None:
        """Tell the drafter."""
        self._drafter.finish(request_id)
