"""What the engine does: the same greedy requests with speculation on and off, one at a time, in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from transformers import PreTrainedModel

from benchmarks.exactness import differs
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec


@dataclass(slots=True)
class Timed:
    """One engine and the requests it has answered. ``seconds`` : of every step of each, the first with its prompt."""

    engine: Engine
    outputs: list[list[int]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)

    def complete(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Answer one request."""
        output: list[int] = []
        steps: list[float] = []
        self.engine.submit(Request(request_id="x", prompt_token_ids=tuple(prompt), sampling=params))
        while self.engine.has_work():
            began = time.perf_counter()
            for each in self.engine.step():
                output += each.token_ids
            steps.append(time.perf_counter() - began)
        self.outputs.append(output)
        self.seconds.append(steps)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round came to. ``speedup`` : of the output, the computing of prompts left out; ``whole`` : with it."""

    outputs: list[list[int]]
    speedup: float
    whole: float
    tokens_per_step: float
    num_mismatches: int


def run_round(model: PreTrainedModel, codec: TextCodec, prompts: Sequence[list[int]], max_tokens: int) -> Round:
    """Answer ``prompts`` in their order on fresh engines, the cache empty at first; which goes first alternates.

    What computing a prompt takes is what the first step of the engine without speculation takes more than its others;
    the other one computes as much, or as little where a slot still holds it.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    length = max(map(len, prompts)) + max_tokens + 1
    with ExitStack() as resources:
        caches = resources.enter_context(CacheSet(CacheConfig(), fingerprint=codec.fingerprint))
        on, off = (_open(model, codec, name, length, known) for name, known in (("ssd", caches), ("none", None)))
        for number, prompt in enumerate(prompts):
            for timed in (on, off) if number % 2 == 0 else (off, on):
                timed.complete(prompt, params)
            caches.flush()
        plain_s = median(seconds for steps in off.seconds for seconds in steps[1:])
        prompt_s = sum(max(0.0, steps[0] - plain_s) for steps in off.seconds)
        on_s, off_s = (sum(map(sum, timed.seconds)) for timed in (on, off))
        pairs = zip(prompts, on.outputs, off.outputs, strict=True)
        return Round(
            off.outputs,
            (off_s - prompt_s) / (on_s - prompt_s),
            off_s / on_s,
            sum(map(len, on.outputs)) / on.engine.metrics.num_verify_steps,
            sum(differs(off.engine.target, prompt, params, got, want) for prompt, got, want in pairs),
        )


def _open(model: PreTrainedModel, codec: TextCodec, name: str, length: int, caches: CacheSet | None) -> Timed:
    draft = DraftConfig()
    target = open_target(
        model,
        num_slots=1,
        max_length=length,
        max_draft_tokens=draft.num_speculative_tokens,
        keeps_top=draft.recycling and name == "ssd",
    )
    drafter, config = make_drafter(name, draft), EngineConfig(max_num_seqs=1)
    engine = Engine(target, drafter=drafter, codec=codec, caches=caches, config=config, draft=draft)
    engine.warm_up()
    return Timed(engine)
