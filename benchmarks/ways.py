"""Engines that answer the same requests in different ways: opened alike, asked in turn, compared token by token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks.exactness import differs
from benchmarks.run import in_turn
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import HybridDrafter, make_drafter
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine, Request
from ssd.model.draft.drafter import HeadDrafter, feature_spec
from ssd.model.heads.layouts import load_head
from ssd.model.loading.load_target import open_target


def open_engine(
    model: PreTrainedModel,
    drafter: str | Drafter,
    *,
    slots: int,
    length: int,
    draft: DraftConfig | None = None,
    config: EngineConfig | None = None,
    head: Path | None = None,
    **more: Any,
) -> Engine:
    """An engine with a target of its own over ``model``, ready. ``drafter`` : "none" is speculation off.

    ``head`` : a draft head of the model, asked too. ``more`` : of the engine. Without ``config`` nothing is kept of
    prompts, which would help who is asked next.
    """
    draft = draft or DraftConfig()
    loaded = None if head is None else load_head(head, model)
    target = open_target(
        model,
        num_slots=slots,
        max_length=length,
        max_draft_tokens=draft.num_speculative_tokens,
        keeps_top=drafter != "none" and draft.recycling,
        tapped=None if loaded is None else feature_spec(loaded, model.device, model.dtype),
    )
    asked = make_drafter(drafter, draft) if isinstance(drafter, str) else drafter
    engine = Engine(
        target,
        drafter=asked if loaded is None else HybridDrafter([asked, HeadDrafter(loaded, target)]),
        config=config or EngineConfig(max_num_seqs=slots, enable_prefix_caching=False),
        draft=draft,
        **more,
    )
    engine.warm_up()
    return engine


@dataclass(slots=True)
class Tally:
    """What requests took of one engine. Passes are those that decode."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of all threads, those that keep the cache too; a device's work is not in it."""
    tokens: int = 0
    passes: int = 0
    drafted: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Prompts included."""
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """What other programs on the machine change less."""
        return self.tokens / self.cpu_s

    @property
    def tokens_per_pass(self) -> float:
        """Those of all rows."""
        return self.tokens / self.passes


_TURN_STEPS = 8
"""Of one engine, before the next one goes on: what slows the machine for a moment slows all."""


class _Asked:
    """Requests that an engine answers; ``outputs`` : tokens so far, in order.

    What they take is counted while all rows are busy: a service would fill those that the last requests leave.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], tally: Tally) -> None:
        """``tally`` : what they take is added to that."""
        self._engine, self._tally = engine, tally
        self._num_left, self._num_rows = len(requests), min(len(requests), engine.target.num_slots)
        self._said: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self._waiting = list(requests)

    @property
    def outputs(self) -> list[list[int]]:
        return list(self._said.values())

    def go_on(self) -> bool:
        """A few steps; whether there is more to do."""
        engine, tally = self._engine, self._tally if self._num_left >= self._num_rows else Tally()
        passes, drafted = engine.metrics.num_verify_steps, engine.metrics.num_draft_tokens
        began, cpu = time.perf_counter(), time.process_time()
        for request in self._waiting:
            engine.submit(request)
        self._waiting.clear()
        parts = [part for _ in range(_TURN_STEPS) if engine.has_work() for part in engine.step()]
        tally.seconds += time.perf_counter() - began
        tally.cpu_s += time.process_time() - cpu
        for part in parts:
            self._said[part.request_id] += part.token_ids
            self._num_left -= part.finish_reason is not None
        tally.tokens += sum(len(part.token_ids) for part in parts)
        tally.passes += engine.metrics.num_verify_steps - passes
        tally.drafted += engine.metrics.num_draft_tokens - drafted
        return engine.has_work()


def ask(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """What ``engine`` answers, as many requests at a time as it has slots."""
    asked = _Asked(engine, requests, Tally())
    while asked.go_on():
        pass
    return asked.outputs


@dataclass(slots=True)
class Comparison:
    """How outputs compare with those of speculation off."""

    num_tokens: int = 0
    num_mismatches: int = 0
    is_exact: bool = False
    """Whether passes promise the same bits: then, as in float32, a mismatch is a fault and no rounding."""

    def add(self, off: Engine, request: Request, got: Sequence[int], want: Sequence[int]) -> None:
        """One output and what ``off`` said."""
        self.num_tokens += len(got)
        self.is_exact = off.target.batch_invariance.is_invariant
        self.num_mismatches += differs(off.target, request.prompt_token_ids, request.sampling, got, want)


def requests_of(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], first: int = 0) -> list[Request]:
    """A request for each prompt, named by its number from ``first`` on."""
    return [
        Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=each)
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True), first)
    ]


def contest(
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    number: int,
    comparison: Comparison,
    tallies: Mapping[str, Tally] | None = None,
) -> Mapping[str, Tally]:
    """What the same requests take of each engine, a few steps in turn; adds to ``tallies`` if given.

    Another engine leads each ``number``. The last of ``engines`` is speculation off: all outputs are compared with what
    it says.
    """
    tallies = {name: Tally() for name in engines} if tallies is None else tallies
    asked = {name: _Asked(engines[name], requests, tallies[name]) for name in in_turn(list(engines), number)}
    going = list(asked.values())
    while going:
        going = [each for each in going if each.go_on()]
    *others, off = engines
    for name in others:
        for request, got, want in zip(requests, asked[name].outputs, asked[off].outputs, strict=True):
            comparison.add(engines[off], request, got, want)
    return tallies


def ratios(groups: Sequence[Mapping[str, Tally]], name: str, other: str, rate: str = "tokens_per_s") -> list[float]:
    """Of one way's rate over another's within each group of requests."""
    return [getattr(group[name], rate) / getattr(group[other], rate) for group in groups]
