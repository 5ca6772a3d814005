"""Run the same requests on several engines alternately, measure the engines, and compare their outputs."""

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
    """Open an engine with its own target over ``model``, and warm it up.

    Args:
        drafter: A drafter or its name; "none" turns speculation off.
        slots: The number of slots in the KV cache.
        length: The maximum number of tokens per sequence.
        config: The engine's settings. By default, prefix caching is off, so that earlier requests do not speed up later
            ones.
        head: The directory of a draft head that proposes drafts too.
        more: Further arguments of `Engine`.
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
    """The time, tokens and passes that requests took on one engine. ``passes`` counts decoding passes, not prefills."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """The CPU time of all threads of the process, including those that maintain the cache. GPU time is not included."""
    tokens: int = 0
    passes: int = 0
    drafted: int = 0

    @property
    def tokens_per_s(self) -> float:
        """The output tokens per second, including the prefill of prompts."""
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """The output tokens per CPU second, which other programs on the machine affect less than tokens per second."""
        return self.tokens / self.cpu_s

    @property
    def tokens_per_pass(self) -> float:
        """The output tokens of all rows per decoding pass."""
        return self.tokens / self.passes


_TURN_STEPS = 8
"""The number of steps that an engine runs in turn; small, so that a brief slowdown of the machine affects all engines.
"""


class _Asked:
    """The requests that run on one engine, and their outputs so far.

    Only steps in which all rows are busy are measured, because a server would refill the rows of finished requests.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], tally: Tally) -> None:
        self._engine, self._tally = engine, tally
        self._num_left, self._num_rows = len(requests), min(len(requests), engine.target.num_slots)
        self._said: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self._waiting = list(requests)

    @property
    def outputs(self) -> list[list[int]]:
        return list(self._said.values())

    def go_on(self) -> bool:
        """Run the next `_TURN_STEPS` steps, and return whether the engine has more work."""
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
    """Run the requests on ``engine``, as many at a time as it has slots, and return their output tokens."""
    asked = _Asked(engine, requests, Tally())
    while asked.go_on():
        pass
    return asked.outputs


@dataclass(slots=True)
class Comparison:
    """The result of comparing outputs with those of speculation off."""

    num_tokens: int = 0
    num_mismatches: int = 0
    is_exact: bool = False
    """Whether passes are batch-invariant. If so, or in float32, a mismatch is an error and not due to rounding."""

    def add(self, off: Engine, request: Request, got: Sequence[int], want: Sequence[int]) -> None:
        """Compare one output with ``want``, the output of the engine ``off``, whose speculation is off."""
        self.num_tokens += len(got)
        self.is_exact = off.target.batch_invariance.is_invariant
        self.num_mismatches += differs(off.target, request.prompt_token_ids, request.sampling, got, want)


def requests_of(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], first: int = 0) -> list[Request]:
    """Create a request for each prompt; the request ids are numbers that start at ``first``."""
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
    """Run the same requests on all engines, a few steps of each alternately; return the measurements by engine.

    The last of ``engines`` must have speculation off; all other outputs are compared with its outputs. ``number``
    rotates the order of the engines. The measurements are added to ``tallies`` if given.
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
    """Return, for each group of requests, the ratio of one variant's throughput to that of another variant."""
    return [getattr(group[name], rate) / getattr(group[other], rate) for group in groups]
