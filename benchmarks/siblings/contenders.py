"""Engines that answer many samples of one prompt, and differ in what they draft from alone."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedModel

from benchmarks.exactness import differs
from benchmarks.ways import Tally
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest
from ssd.drafting.suffix.drafter import SuffixDrafter
from ssd.engine import Engine, Request
from ssd.engine.coupling import Coupling
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

OFF = "off"
ALONE = "each for itself"
LIVE = "from each other"
ALONE_CHEAP = "each for itself, cheap"
LIVE_CHEAP = "from each other, cheap"
NAMES = (OFF, ALONE, LIVE, ALONE_CHEAP, LIVE_CHEAP)

SEEDED = "of a seed"
COUPLED = "coupled, a stream each"
ONE_STREAM = "coupled, one stream"

TOGETHER = (SEEDED, COUPLED)
"""Noise of samples that begin together. Those of one stream say the same then, at the same time."""
APART = (SEEDED, COUPLED, ONE_STREAM)
"""Of samples that begin one after another."""

_ROOT = b"of this benchmark"

Samples = list[list[int]]


class Cheap(SuffixDrafter):
    """Drafts at a price of its own, of all that is measured, and is not cut: its drafts bring no estimates."""

    def __init__(self, draft: DraftConfig, price: float) -> None:
        super().__init__(max_match_length=draft.max_match_length, min_match_length=draft.min_match_length)
        self._prices = np.array([price])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        drafts = super().propose([replace(request, prices=self._prices) for request in requests])
        return [replace(draft, probabilities=None) if len(draft.token_ids) else draft for draft in drafts]


@dataclass(slots=True)
class Answered(Tally):
    """A round of one contender. ``steps`` : passes of the target, each over all samples that run."""

    steps: int = 0
    accepted_live: int = 0


@dataclass(slots=True)
class Comparison:
    """How outputs compare with speculation off."""

    num_tokens: int = 0
    num_mismatches: int = 0


class Siblings:
    """Engines with a slot for each of ``num_samples``, which differ in what they draft from alone."""

    def __init__(self, model: PreTrainedModel, codec: TextCodec, num_samples: int, args: argparse.Namespace) -> None:
        self.comparison = Comparison()
        self._num_samples = num_samples
        self._args = args
        self._codec = codec
        config = EngineConfig(max_num_seqs=num_samples, coupled_streams=num_samples)
        self._coupling = Coupling(config.coupled_streams, config.coupled_window, lambda: _ROOT)
        self._engines: dict[str, Engine] = {}
        for name in NAMES:
            draft = DraftConfig(num_speculative_tokens=args.num_speculative_tokens, live=name in (LIVE, LIVE_CHEAP))
            target = open_target(
                model,
                num_slots=num_samples,
                max_length=args.prompt_tokens + args.max_tokens + 8,
                max_draft_tokens=args.num_speculative_tokens,
                keeps_top=name != OFF and draft.recycling,
            )
            self._engines[name] = Engine(
                target,
                drafter=_drafter(name, draft, args.price),
                codec=codec,
                config=config,
                draft=draft,
                noise_root=lambda: _ROOT,
            )
            self._engines[name].warm_up()

    def round(self, prompts: Sequence[list[int]], noise: str, apart: int, number: int) -> dict[str, Answered]:
        """All prompts to every contender, in turn, who begins changing with each prompt; caches are empty at first.

        ``apart`` : passes between two samples, 0 where all begin together.
        """
        found = {name: Answered() for name in NAMES}
        with ExitStack() as stack:
            for engine in self._engines.values():
                engine.caches = stack.enter_context(CacheSet(CacheConfig(), fingerprint=self._codec.fingerprint))
            for asked, prompt in enumerate(prompts):
                first = asked % len(NAMES)
                requests = self._requests(prompt, noise, 1000 * number + asked)
                said = {
                    name: _answer(self._engines[name], requests, apart, found[name])
                    for name in NAMES[first:] + NAMES[:first]
                }
                self._compare(requests, said)
            for engine in self._engines.values():
                engine.caches = None
        return found

    def _requests(self, prompt: list[int], noise: str, seed: int) -> list[Request]:
        args = self._args
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=seed if noise == SEEDED else None,
        )
        return [
            Request(
                request_id=f"{seed}-{sample}",
                prompt_token_ids=tuple(prompt),
                sampling=params,
                choice_index=sample,
                noise_stream=None if noise == SEEDED else sample if noise == COUPLED else 0,
            )
            for sample in range(self._num_samples)
        ]

    def _compare(self, requests: Sequence[Request], said: Mapping[str, Samples]) -> None:
        count, target = self.comparison, self._engines[OFF].target
        for name in NAMES[1:]:
            for request, got, want in zip(requests, said[name], said[OFF], strict=True):
                count.num_tokens += len(got)
                noise = self._coupling.noise_of(request, 0)
                count.num_mismatches += differs(target, request.prompt_token_ids, request.sampling, got, want, noise)


def _drafter(name: str, draft: DraftConfig, price: float) -> Drafter:
    if name in (ALONE_CHEAP, LIVE_CHEAP):
        return Cheap(draft, price)
    return make_drafter("none" if name == OFF else "ssd", draft)


def _answer(engine: Engine, requests: Sequence[Request], apart: int, found: Answered) -> Samples:
    """What is said to requests that run together; what it took is added to ``found``."""
    waiting = list(requests)
    metrics = engine.metrics
    before = metrics.num_verify_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens, _live(engine)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    began, cpu = time.perf_counter(), time.process_time()
    for step in itertools.count():
        while waiting and step >= apart * (len(requests) - len(waiting)):
            engine.submit(waiting.pop(0))
        if not (waiting or engine.has_work()):
            break
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        found.steps += 1
    found.seconds += time.perf_counter() - began
    found.cpu_s += time.process_time() - cpu
    found.tokens += sum(map(len, answers.values()))
    found.passes += metrics.num_verify_steps - before[0]
    found.drafted += metrics.num_draft_tokens - before[1]
    found.accepted += metrics.num_accepted_tokens - before[2]
    found.accepted_live += _live(engine) - before[3]
    return list(answers.values())


def _live(engine: Engine) -> int:
    counts = engine.metrics.by_source.get("live")
    return 0 if counts is None else counts.num_accepted_tokens
