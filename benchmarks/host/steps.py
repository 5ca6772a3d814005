"""Steps of an engine whose target recites, and where the time that is the host's goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from benchmarks.host.recited import RecitingTarget
from benchmarks.hybrid.costs import pass_seconds
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

Text = npt.NDArray[np.int32]

TRAFFIC: Final = ("off", "new", "again", "sampled")
"""Speculation off; on where nothing of the text is stored; where all is; the same at temperature 1."""

PARTS: Final = ("propose", "launch", "verify", "commit", "spell", "rest")
PROMPT_TOKENS: Final = 96
_FIRST_STEPS: Final = 8
"""Not timed: prompts, and prices that are not known yet."""


@dataclass(slots=True)
class Steps:
    """Timed steps. ``parts`` : seconds of each, of each step. ``exposed`` : seconds of each step that a device waits
    for: from the tokens of a pass to the launch of the next. ``drafted``, ``accepted`` : tokens. ``is_right`` : whether
    every row said its text."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    exposed: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    is_right: bool = True

    @property
    def host(self) -> list[float]:
        """Seconds of each step that were the host's."""
        return [sum(parts) for parts in zip(*self.parts.values(), strict=True)]


def time_steps(
    model: PreTrainedModel, codec: TextCodec, texts: Sequence[Text], traffic: str, num_steps: int, limit: int
) -> Steps:
    """``num_steps`` steps of one request for each of ``texts``, which must be as long as `tokens_said`."""
    batch, length = len(texts), PROMPT_TOKENS + tokens_said(num_steps, limit)
    target = RecitingTarget(model, batch, length, limit + 1, lambda positions: pass_seconds(positions, 0))
    draft = DraftConfig(num_speculative_tokens=limit)
    with ExitStack() as resources:
        caches = resources.enter_context(CacheSet(CacheConfig(), fingerprint=codec.fingerprint, inline=True))
        engine = Engine(
            target,
            drafter=make_drafter("none" if traffic == "off" else "ssd", draft),
            codec=codec,
            caches=caches,
            config=EngineConfig(max_num_seqs=batch, enable_prefix_caching=False),
            draft=draft,
        )
        engine.warm_up()
        if traffic in ("again", "sampled"):
            for text in texts:
                caches.get("default").append(text, prompt_length=PROMPT_TOKENS)
            caches.maintain()
        return _timed(engine, target, texts, float(traffic == "sampled"), num_steps)


def tokens_said(num_steps: int, limit: int) -> int:
    """Most tokens that a row says in ``num_steps`` timed steps and those before."""
    return (num_steps + _FIRST_STEPS) * (limit + 1)


def _timed(engine: Engine, target: RecitingTarget, texts: Sequence[Text], temperature: float, num_steps: int) -> Steps:
    for row, text in enumerate(texts):  # free slots are given from the lowest on
        target.recite(row, text)
        sampling = SamplingParams(
            max_tokens=len(text) - PROMPT_TOKENS, temperature=temperature, seed=row, ignore_eos=True
        )
        engine.submit(
            Request(request_id=str(row), prompt_token_ids=tuple(text[:PROMPT_TOKENS].tolist()), sampling=sampling)
        )
    said: list[list[int]] = [[] for _ in texts]
    found, clock = Steps(), _Clock(engine, target)
    while not all(said):
        _step(engine, said)
    for number in range(_FIRST_STEPS + num_steps):
        if min(len(text) - PROMPT_TOKENS - len(tokens) for text, tokens in zip(texts, said, strict=True)) < 1:
            break
        before = engine.metrics.num_draft_tokens, engine.metrics.num_accepted_tokens
        clock.begin()
        began = time.perf_counter()
        _step(engine, said)
        took = time.perf_counter() - began
        if number < _FIRST_STEPS:
            continue
        for part, seconds in clock.parts(took).items():
            found.parts[part].append(seconds)
        found.exposed.append(clock.launched - began - clock.device)
        found.drafted += engine.metrics.num_draft_tokens - before[0]
        found.accepted += engine.metrics.num_accepted_tokens - before[1]
    while engine.has_work():
        _step(engine, said)
    found.is_right = all(tokens == text[PROMPT_TOKENS:].tolist() for tokens, text in zip(said, texts, strict=True))
    return found


def _step(engine: Engine, said: list[list[int]]) -> None:
    for output in engine.step():
        said[int(output.request_id)] += output.token_ids


class _Clock:
    """Times the parts of a step, each a method of the engine."""

    def __init__(self, engine: Engine, target: RecitingTarget) -> None:
        self.launched = self.device = 0.0
        self._target = target
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._before = 0.0
        self._time(engine._proposals, "propose", "propose")
        for name in ("verify", "commit", "spell"):
            self._time(engine, f"_{name}", name)
        self._time(engine, "_forward", "launch")

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._before = self._target.device_s

    def parts(self, took: float) -> dict[str, float]:
        """Seconds of each part of a step that took so long; what the device took is in none."""
        self.device = self._target.device_s - self._before
        self._seconds["launch"] -= self.device
        self._seconds["rest"] = took - self.device - sum(self._seconds.values())
        return self._seconds

    def _time(self, owner: Any, name: str, part: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                ended = time.perf_counter()
                self._seconds[part] += ended - began
                if part == "launch":
                    self.launched = ended

        setattr(owner, name, timed)
