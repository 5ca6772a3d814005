"""What is asked: the same again, nearly the same, a stream that grows, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from benchmarks.coupled.contenders import COUPLED, NAMES, OFF, UNCOUPLED, Contenders, Question, Sampling
from benchmarks.coupled.variants import near_variant
from benchmarks.overhead import bootstrap
from benchmarks.sources.rounds import Tally, spread
from benchmarks.streams import made_stream
from benchmarks.workloads import MIXED, NO_REPEATS, snippets

REPEATS = "asked again"
VARIANTS = "near-variants"
NEW = "nothing twice"
FIRST_FIFTH = "growth, first fifth"
LAST_FIFTH = "growth, last fifth"

_TOKENS_OF_A_CHANGE = 24
"""Most that a near-variant is longer by: a prompt that was cut would lose what was changed."""


@dataclass(slots=True)
class Row:
    """One workload at one temperature with so many streams: what each contender made of each group of requests."""

    workload: str
    temperature: float
    streams: int
    groups: list[dict[str, Tally]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians over groups, with the least and the most."""

        def over(name: str, other: str) -> list[float]:
            return [group[name].tokens_per_s / group[other].tokens_per_s for group in self.groups]

        against = over(COUPLED, UNCOUPLED)
        return {
            "workload": self.workload,
            "temperature": self.temperature,
            "streams": self.streams,
            "off_tokens_per_s": spread([group[OFF].tokens_per_s for group in self.groups], 2),
            **{
                name: {
                    "tokens_per_pass": round(
                        sum(group[name].tokens for group in self.groups)
                        / sum(group[name].passes for group in self.groups),
                        3,
                    ),
                    "over_off": spread(over(name, OFF), 3),
                    "over_off_by_cpu_time": spread(
                        [group[name].tokens_per_cpu_s / group[OFF].tokens_per_cpu_s for group in self.groups], 3
                    ),
                }
                for name in (COUPLED, UNCOUPLED)
            },
            "coupled_over_uncoupled": spread(against, 3),
            "coupled_over_uncoupled_95": bootstrap(against),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is asked. ``group`` : requests whose times are taken together."""

    requests: int
    growth_requests: int
    prompt_tokens: int
    group: int
    seed: int


class Workloads:
    """Questions of a seed, and what contenders make of them."""

    def __init__(self, contenders: Contenders, plan: Plan) -> None:
        self._contenders, self._plan = contenders, plan
        self._random = np.random.default_rng([plan.seed, 2])
        self._seeds = count(1)
        self.texts = fitting(contenders, plan)

    def again(self, sampling: Sampling, num_streams: int) -> Iterator[Row]:
        """Every prompt once for every stream; then each again, and then each nearly so, of a stream that is drawn."""
        bench, texts = self._contenders, self.texts
        encode = bench.codec.encode_prompt
        with bench.scene(f"again-{sampling.temperature}-{num_streams}"):
            seen = [self._question(encode(text), stream) for stream in range(num_streams) for text in texts]
            bench.ask_all(COUPLED, seen, sampling)
            bench.ask_all(UNCOUPLED, seen, sampling, is_coupled=False)
            variants = [near_variant(text, self._random) for text in texts]
            for workload, asked in ((REPEATS, texts), (VARIANTS, variants)):
                questions = [self._question(encode(text), self._drawn(num_streams)) for text in asked]
                yield self._timed(Row(workload, sampling.temperature, num_streams), questions, sampling)

    def new(self, sampling: Sampling, num_streams: int) -> Row:
        """Prompts of which none comes twice, on empty caches."""
        plan = self._plan
        prompts = made_stream(NO_REPEATS, self._contenders.codec, plan.requests, plan.seed + 1, plan.prompt_tokens)
        questions = [self._question(prompt, self._drawn(num_streams)) for prompt in prompts.prompts]
        with self._contenders.scene(f"new-{sampling.temperature}-{num_streams}"):
            return self._timed(Row(NEW, sampling.temperature, num_streams), questions, sampling)

    def growth(self, sampling: Sampling, num_streams: int) -> Iterator[Row]:
        """The mixed stream of ``benchmarks.growth``, its first and last fifth timed beside speculation off."""
        plan, bench = self._plan, self._contenders
        stream = made_stream(MIXED, bench.codec, plan.growth_requests, plan.seed, plan.prompt_tokens)
        questions = [self._question(prompt, self._drawn(num_streams)) for prompt in stream.prompts]
        fifth = max(1, len(questions) // 5)
        with bench.scene(f"growth-{sampling.temperature}-{num_streams}"):
            row = Row(FIRST_FIFTH, sampling.temperature, num_streams)
            yield self._timed(row, questions[:fifth], sampling)
            self._timed(Row("", 0.0, 0), questions[fifth:-fifth], sampling, (COUPLED, UNCOUPLED))
            row = Row(LAST_FIFTH, sampling.temperature, num_streams)
            yield self._timed(row, questions[-fifth:], sampling)

    def _timed(self, row: Row, questions: Sequence[Question], sampling: Sampling, names: Sequence[str] = NAMES) -> Row:
        """Every question to every contender, one after the other, who is first changes; all answers are compared."""
        bench = self._contenders
        plain = bench.ask_all(OFF, questions, sampling, is_coupled=False)
        expected = [] if OFF in names else bench.ask_all(OFF, questions, sampling)
        for place, question in enumerate(questions):
            if place % self._plan.group == 0:
                row.groups.append({name: Tally() for name in names})
            first = place % len(names)
            said = {
                name: bench.ask(name, question, sampling, row.groups[-1][name], is_coupled=name != UNCOUPLED)
                for name in (*names[first:], *names[:first])
            }
            bench.compare(question, sampling, said[COUPLED], said[OFF] if OFF in names else expected[place])
            bench.compare(question, sampling, said[UNCOUPLED], plain[place], is_coupled=False)
        return row

    def _question(self, prompt: list[int], stream: int) -> Question:
        return Question(prompt, stream, next(self._seeds))

    def _drawn(self, num_streams: int) -> int:
        """A stream, as the engine draws one for a request that names none."""
        return int(self._random.integers(num_streams))


def fitting(contenders: Contenders, plan: Plan) -> list[str]:
    """Texts that make prompts short enough, all different."""
    room = plan.prompt_tokens - _TOKENS_OF_A_CHANGE
    texts = (text for text in snippets(plan.seed) if len(contenders.codec.encode_prompt(text)) <= room)
    return [text for text, _ in zip(texts, range(plan.requests), strict=False)]
