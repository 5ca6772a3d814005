"""What does noise that requests share bring, where they ask the same, nearly the same, more and more, or nothing twice?

``python -m benchmarks.coupled [--model DIR] [--streams S...] [--temperatures T...] [--out FILE]``

Three engines answer the same questions one after the other: without speculation, with it and coupled noise, with it
and a seed for every request as before. Nothing twice: prompts that are all new, on empty caches. Asked again: every
prompt was answered once of every stream, then comes again with a stream that is drawn. Near-variants: the same prompts
with a word or a number changed or a sentence added. Growth: the mixed stream of ``benchmarks.growth``, its first and
its last fifth. Every timed output is compared with speculation off of the same noise. Ratios are of tokens/s within a
group of requests, prompts included: medians over groups, with the least and the most; beside them ratios by CPU time,
which other programs on the machine change less.

Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from benchmarks.run import SPREAD, Option, Run, bootstrap, in_turn, spread
from benchmarks.ways import Comparison, Tally, ask, open_engine
from benchmarks.workloads import MIXED, NO_REPEATS, made_stream, snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.engine import Request
from ssd.engine.sequence import Coupling
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

OFF, COUPLED, UNCOUPLED = NAMES = ("off", "coupled", "uncoupled")
REPEATS, VARIANTS, NEW = "asked again", "near-variants", "nothing twice"
FIRST_FIFTH, LAST_FIFTH = "growth, first fifth", "growth, last fifth"

OPTIONS: dict[str, Any] = {
    "streams": Option(default=[1, 4, 16], metavar="S", help="of noise"),
    "temperatures": Option(default=[0.7, 1.0], metavar="T"),
    "top_p": 0.9,
    "requests": Option(default=25, help="prompts of a workload"),
    "growth_requests": Option(default=120, least=0, help="of the growing stream, 0 for none"),
    "growth_streams": Option(default=4, metavar="S", help="of noise there and on new text"),
    "max_tokens": Option(default=64, help="of each answer"),
    "prompt_tokens": Option(default=256, help="most of a prompt"),
    "group": Option(default=5, help="requests timed together"),
    "window": Option(default=EngineConfig().coupled_window, metavar="K"),
    "num_speculative_tokens": DraftConfig().num_speculative_tokens,
    "seed": 0,
}
COLUMNS = (
    ("workload", "{workload}"),
    ("temperature", "{temperature}"),
    ("streams", "{streams}"),
    ("coupled: over off", SPREAD.replace("%s", "coupled[over_off]")),
    ("by CPU time", "{coupled[over_off_by_cpu_time][0]:.2f}"),
    ("tokens a pass", "{coupled[tokens_per_pass]:.2f}"),
    ("seeds: over off", "{uncoupled[over_off][0]:.2f}"),
    ("tokens a pass", "{uncoupled[tokens_per_pass]:.2f}"),
)
_BATCH = 8
"""Requests answered together where nothing is timed."""
_TOKENS_OF_A_CHANGE = 24
"""Most that a near-variant is longer by: a prompt that was cut would lose what was changed."""


@dataclass(frozen=True, slots=True)
class Question:
    """``stream`` : of the noise that it is drawn with where noise is coupled; ``seed`` : where it is not."""

    prompt: list[int]
    stream: int
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    run = Run("coupled", __doc__, argv, OPTIONS, COLUMNS, has_model=True)
    args = run.args
    if 0 < args.growth_requests < 3:
        run.parser.error("--growth-requests takes 0, or numbers from 3")
    comparison = Comparison()
    codec, model = run.load()
    workloads = Workloads(Contenders(model, codec, args, comparison), args)
    # New text first: what a pass costs is then measured alike by all, who later run passes of other widths.
    for temperature in args.temperatures:
        run.row(workloads.new(temperature))
    for temperature in args.temperatures:
        for num_streams in args.streams:
            for row in workloads.again(temperature, num_streams):
                run.row(row)
        if args.growth_requests:
            for row in workloads.growth(temperature):
                run.row(row)
    return run.end(
        compared_tokens=comparison.num_tokens,
        mismatches=comparison.num_mismatches,
        rows=run.rows,
        is_wrong=comparison.num_mismatches > 0,
    )


class Contenders:
    """Engines with one secret for each scene: off, with coupled noise, with a seed each."""

    def __init__(self, model: Any, codec: TextCodec, args: argparse.Namespace, comparison: Comparison) -> None:
        """``comparison`` : gets everything they say."""
        num_streams, window = max(*args.streams, args.growth_streams), args.window
        self.codec = codec
        self._args, self._comparison = args, comparison
        root = f"benchmark {args.seed}".encode()  # the same for the same seed, so that a run can be repeated
        config = EngineConfig(
            max_num_seqs=_BATCH, coupled_streams=num_streams, coupled_window=window, enable_prefix_caching=False
        )
        self._coupling = Coupling(num_streams, window, lambda: root)
        self._engines = {
            name: open_engine(
                model,
                "none" if name == OFF else "ssd",
                slots=_BATCH,
                length=args.prompt_tokens + args.max_tokens + 8,
                draft=DraftConfig(num_speculative_tokens=args.num_speculative_tokens),
                config=config,
                codec=codec,
                noise_root=lambda: root,
            )
            for name in NAMES
        }
        self._namespace = ""
        self._numbers = count()

    @contextmanager
    def scene(self, namespace: str) -> Iterator[None]:
        """Empty caches, and a namespace that has noise of its own."""
        self._namespace = namespace
        drafting = [engine for name, engine in self._engines.items() if name != OFF]
        with ExitStack() as stack:
            for engine in drafting:
                engine.caches = stack.enter_context(CacheSet(CacheConfig(), fingerprint=self.codec.fingerprint))
            yield
            for engine in drafting:
                engine.caches = None

    def ask(
        self,
        name: str,
        questions: Sequence[Question],
        temperature: float,
        tally: Tally | None = None,
        *,
        is_coupled: bool = True,
    ) -> list[list[int]]:
        """What one engine answers. Where nothing is timed its cache holds all of it afterwards."""
        requests = [self._request(question, temperature, is_coupled) for question in questions]
        answers, caches = ask(self._engines[name], requests, tally), self._engines[name].caches
        if tally is None and caches is not None:
            caches.flush()
        return answers

    def compare(
        self, question: Question, temperature: float, got: list[int], want: list[int], *, is_coupled: bool = True
    ) -> None:
        """Count whether an output is what speculation off says, or not."""
        request = self._request(question, temperature, is_coupled)
        noise, target = self._coupling.noise_of(request, 0), self._engines[OFF].target
        self._comparison.add(target, question.prompt, request.sampling, got, want, noise)

    def _request(self, question: Question, temperature: float, is_coupled: bool) -> Request:
        args = self._args
        sampling = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=temperature,
            top_p=args.top_p,
            seed=None if is_coupled else question.seed,
        )
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=tuple(question.prompt),
            sampling=sampling,
            noise_stream=question.stream if is_coupled else None,
            namespace=self._namespace,
        )


class Workloads:
    """Questions of a seed, and what contenders make of them: rows of the result."""

    def __init__(self, contenders: Contenders, args: argparse.Namespace) -> None:
        self._contenders, self._args = contenders, args
        self._random = np.random.default_rng([args.seed, 2])
        self._seeds = count(1)
        self._texts = fitting(contenders.codec, args)

    def again(self, temperature: float, num_streams: int) -> Iterator[dict[str, Any]]:
        """Every prompt once for every stream; then each again, and then each nearly so, of a stream that is drawn."""
        bench, texts = self._contenders, self._texts
        encode = bench.codec.encode_prompt
        with bench.scene(f"again-{temperature}-{num_streams}"):
            seen = [self._question(encode(text), stream) for stream in range(num_streams) for text in texts]
            bench.ask(COUPLED, seen, temperature)
            bench.ask(UNCOUPLED, seen, temperature, is_coupled=False)
            variants = [near_variant(text, self._random) for text in texts]
            for workload, asked in ((REPEATS, texts), (VARIANTS, variants)):
                questions = [self._question(encode(text), self._drawn(num_streams)) for text in asked]
                yield _row(workload, temperature, num_streams, self._timed(questions, temperature))

    def new(self, temperature: float) -> dict[str, Any]:
        """Prompts of which none comes twice, on empty caches."""
        args, num_streams = self._args, self._args.growth_streams
        prompts = made_stream(NO_REPEATS, self._contenders.codec, args.requests, args.seed + 1, args.prompt_tokens)
        questions = [self._question(prompt, self._drawn(num_streams)) for prompt in prompts.prompts]
        with self._contenders.scene(f"new-{temperature}-{num_streams}"):
            return _row(NEW, temperature, num_streams, self._timed(questions, temperature))

    def growth(self, temperature: float) -> Iterator[dict[str, Any]]:
        """The mixed stream of ``benchmarks.growth``, its first and last fifth timed beside speculation off."""
        args, num_streams = self._args, self._args.growth_streams
        stream = made_stream(MIXED, self._contenders.codec, args.growth_requests, args.seed, args.prompt_tokens)
        questions = [self._question(prompt, self._drawn(num_streams)) for prompt in stream.prompts]
        fifth = max(1, len(questions) // 5)
        with self._contenders.scene(f"growth-{temperature}-{num_streams}"):
            yield _row(FIRST_FIFTH, temperature, num_streams, self._timed(questions[:fifth], temperature))
            self._timed(questions[fifth:-fifth], temperature, (COUPLED, UNCOUPLED))
            yield _row(LAST_FIFTH, temperature, num_streams, self._timed(questions[-fifth:], temperature))

    def _timed(
        self, questions: Sequence[Question], temperature: float, names: Sequence[str] = NAMES
    ) -> list[dict[str, Tally]]:
        """Every question to every contender, one after the other, who is first changes; all answers are compared.

        Returns what each made of each group of requests.
        """
        bench, groups = self._contenders, list[dict[str, Tally]]()
        plain = bench.ask(OFF, questions, temperature, is_coupled=False)
        expected = [] if OFF in names else bench.ask(OFF, questions, temperature)
        for place, question in enumerate(questions):
            if place % self._args.group == 0:
                groups.append({name: Tally() for name in names})
            said = {
                name: bench.ask(name, [question], temperature, groups[-1][name], is_coupled=name != UNCOUPLED)[0]
                for name in in_turn(names, place)
            }
            bench.compare(question, temperature, said[COUPLED], said[OFF] if OFF in names else expected[place])
            bench.compare(question, temperature, said[UNCOUPLED], plain[place], is_coupled=False)
        return groups

    def _question(self, prompt: list[int], stream: int) -> Question:
        return Question(prompt, stream, next(self._seeds))

    def _drawn(self, num_streams: int) -> int:
        """A stream, as the engine draws one for a request that names none."""
        return int(self._random.integers(num_streams))


def _row(workload: str, temperature: float, streams: int, groups: Sequence[dict[str, Tally]]) -> dict[str, Any]:
    """Medians over groups, with the least and the most."""

    def over(name: str, other: str, rate: str = "tokens_per_s") -> list[float]:
        return [getattr(group[name], rate) / getattr(group[other], rate) for group in groups]

    against = over(COUPLED, UNCOUPLED)
    by_name = {}
    for name in (COUPLED, UNCOUPLED):
        tokens, passes = (sum(getattr(group[name], what) for group in groups) for what in ("tokens", "passes"))
        by_name[name] = {
            "tokens_per_pass": round(tokens / passes, 3),
            "over_off": spread(over(name, OFF)),
            "over_off_by_cpu_time": spread(over(name, OFF, "tokens_per_cpu_s")),
        }
    return {
        "workload": workload,
        "temperature": temperature,
        "streams": streams,
        "off_tokens_per_s": spread([group[OFF].tokens_per_s for group in groups], 2),
        **by_name,
        "coupled_over_uncoupled": spread(against),
        "coupled_over_uncoupled_95": bootstrap(against),
    }


_WORD = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{3,}\b")
_NUMBER = re.compile(r"\b[0-9]+\b")
_OTHER_WORDS = ("value", "item", "name", "result", "index", "count", "first", "other")
_SENTENCES = (
    "# This part is called by the tests too.",
    "# Keep this in step with the documentation.",
    "# The order of the arguments matters here.",
    "# Nothing else in the module depends on it.",
)


def near_variant(text: str, random: np.random.Generator) -> str:
    """``text`` with one word or one number changed, or with a sentence added as a line of its own, at a random place.

    Which of these, each is as likely; a text without a number has a word changed, one without words gets a sentence.
    """
    kind = int(random.integers(3))
    if kind == 0 and (found := _NUMBER.findall(text)):
        return _changed(text, _NUMBER, str(int(found[0]) + int(random.integers(1, 9))), random)
    if kind < 2 and any(not keyword.iskeyword(word) for word in _WORD.findall(text)):
        return _changed(text, _WORD, str(random.choice(_OTHER_WORDS)), random)
    lines = text.split("\n")
    at = int(random.integers(len(lines) - 1))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return "\n".join([*lines[:at], indent + str(random.choice(_SENTENCES)), *lines[at:]])


def _changed(text: str, pattern: re.Pattern[str], new: str, random: np.random.Generator) -> str:
    """With one occurrence of the pattern, no keyword and not ``new`` itself, replaced by it."""
    places = [found for found in pattern.finditer(text) if not keyword.iskeyword(found[0]) and found[0] != new]
    if not places:
        return f"{new}\n{text}"
    chosen = places[int(random.integers(len(places)))]
    return text[: chosen.start()] + new + text[chosen.end() :]


def fitting(codec: TextCodec, args: argparse.Namespace) -> list[str]:
    """Texts that make prompts short enough, all different."""
    room = args.prompt_tokens - _TOKENS_OF_A_CHANGE
    texts = (text for text in snippets(args.seed) if len(codec.encode_prompt(text)) <= room)
    return [text for text, _ in zip(texts, range(args.requests), strict=False)]


if __name__ == "__main__":
    sys.exit(main())
