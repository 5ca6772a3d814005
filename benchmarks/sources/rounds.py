"""The same requests to every contender, in turn, and what each made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.exactness import differs
from benchmarks.sources.contenders import ALL, OFF
from ssd.config import CacheConfig, SamplingParams
from ssd.engine import Engine, Request
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec


@dataclass(slots=True)
class Tally:
    """What one contender made of one round."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Prompts included."""
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """Of all threads, those that keep the cache too; a device's work is not in it."""
        return self.tokens / self.cpu_s

    @property
    def tokens_per_pass(self) -> float:
        """Of passes that decode."""
        return self.tokens / self.passes


@dataclass(slots=True)
class Outcome:
    """All rounds of one sampling: ``rounds[i][name]``, and how the outputs compare with speculation off."""

    rounds: list[dict[str, Tally]] = field(default_factory=list)
    num_tokens: int = 0
    num_mismatches: int = 0

    def ratios(self, name: str, other: str) -> list[float]:
        """Tokens/s of one contender over another's, within each round."""
        return [each[name].tokens_per_s / each[other].tokens_per_s for each in self.rounds]

    def cpu_ratios(self, name: str, other: str) -> list[float]:
        """The same per second of this process's CPU time: what it would be where nothing else ran on the machine."""
        return [each[name].tokens_per_cpu_s / each[other].tokens_per_cpu_s for each in self.rounds]

    def rows(self) -> list[dict[str, Any]]:
        """A row a contender: medians over rounds, with the least and the most."""
        return [
            {
                "source": name,
                "tokens_per_pass": spread([each[name].tokens_per_pass for each in self.rounds], 3),
                "tokens_per_s": spread([each[name].tokens_per_s for each in self.rounds], 2),
                "over_off": spread(self.ratios(name, OFF), 3),
                "over_off_by_cpu_time": spread(self.cpu_ratios(name, OFF), 3),
                "drafted_per_pass": spread([each[name].drafted / each[name].passes for each in self.rounds], 3),
                "accepted_per_pass": spread([each[name].accepted / each[name].passes for each in self.rounds], 3),
            }
            for name in self.rounds[0]
        ]

    def all_over_best(self) -> dict[str, Any] | None:
        """Which source is the best alone, and tokens/s of all together over its; None where there is no such pair."""
        alone = [name for name in self.rounds[0] if name not in (OFF, ALL)]
        if not alone or ALL not in self.rounds[0]:
            return None
        best = max(alone, key=lambda name: median(self.ratios(name, OFF)))
        return {
            "best": best,
            "ratio": spread(self.ratios(ALL, best), 3),
            "ratio_by_cpu_time": spread(self.cpu_ratios(ALL, best), 3),
        }


def run_rounds(
    engines: Mapping[str, Engine],
    codec: TextCodec,
    prompts: Sequence[list[int]],
    params: Callable[[int], SamplingParams],
    num_rounds: int,
) -> Outcome:
    """Every request to every engine, one at a time, before the next request; who is first changes with each.

    A round begins with empty caches, one of each engine's own. ``params`` : of the request of this number, which goes
    on counting over rounds, so that rounds differ in their seeds.
    """
    outcome = Outcome()
    names = list(engines)
    for number in range(num_rounds):
        tallies = {name: Tally() for name in names}
        with ExitStack() as stack:
            for engine in engines.values():
                engine.caches = stack.enter_context(CacheSet(CacheConfig(), fingerprint=codec.fingerprint))
            for index, prompt in enumerate(prompts):
                asked = number * len(prompts) + index
                first = asked % len(names)
                request = Request(request_id=str(asked), prompt_token_ids=tuple(prompt), sampling=params(asked))
                said = {name: complete(engines[name], request, tallies[name]) for name in names[first:] + names[:first]}
                compare(outcome, engines[OFF], prompt, params(asked), said)
            for engine in engines.values():
                engine.caches = None
        outcome.rounds.append(tallies)
    return outcome


def complete(engine: Engine, request: Request, tally: Tally) -> list[int]:
    """One request, alone; its output, and in ``tally`` what it took."""
    metrics = engine.metrics
    before = (metrics.num_verify_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens)
    output: list[int] = []
    began, cpu = time.perf_counter(), time.process_time()
    engine.submit(request)
    while engine.has_work():
        for part in engine.step():
            output += part.token_ids
    tally.seconds += time.perf_counter() - began
    tally.cpu_s += time.process_time() - cpu
    tally.tokens += len(output)
    tally.passes += metrics.num_verify_steps - before[0]
    tally.drafted += metrics.num_draft_tokens - before[1]
    tally.accepted += metrics.num_accepted_tokens - before[2]
    return output


def compare(
    outcome: Outcome, off: Engine, prompt: list[int], params: SamplingParams, said: Mapping[str, list[int]]
) -> None:
    """Count how outputs differ from those of ``off``."""
    for name, got in said.items():
        if name != OFF:
            outcome.num_tokens += len(got)
            outcome.num_mismatches += differs(off.target, prompt, params, got, said[OFF])


def spread(values: Sequence[float], digits: int) -> list[float]:
    """The median, the least and the most."""
    return [round(value, digits) for value in (median(values), min(values), max(values))]


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """A `spread` as tables print it."""
    middle, least, most = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({least} ... {most})"
