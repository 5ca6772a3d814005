"""Measure the speed-up from coupled sampling, in which requests without a seed share their sampling noise.

``python -m benchmarks.coupled [--model DIR] [--streams S] [--temperatures T...] [--out FILE]``

Answers the same requests with coupled sampling and with one seed per request. Each of the two variants is compared with
speculation off that uses the same noise. There are three workloads:

- nothing twice: all prompts are new, and the caches are empty;
- asked again: every prompt was answered once with every noise stream, then is repeated with a random stream;
- near-variants: the same prompts with one name changed.

Every timed output is compared with the output of speculation off. The ratios are throughputs within a group of
requests, including the prefill of prompts: the median, minimum and maximum over groups. They are also given per CPU
second, because other programs on the machine affect that ratio less. Prints a table; the last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import numpy as np

from benchmarks.run import GAIN, Option, Run, in_turn, spread
from benchmarks.ways import Comparison, Tally, ask, contest, open_engine, ratios
from benchmarks.workloads import NO_REPEATS, cut, made_stream, renamed, snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.engine import Request
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

OFF, COUPLED, UNCOUPLED = NAMES = ("off", "coupled", "uncoupled")
REPEATS, VARIANTS, NEW = "asked again", "near-variants", "nothing twice"

OPTIONS: dict[str, Any] = {
    "streams": Option(default=4, metavar="S", help="number of noise streams"),
    "temperatures": Option(default=[0.7, 1.0], metavar="T"),
    "top_p": 0.9,
    "requests": Option(default=25, help="number of prompts per workload"),
    "max_tokens": Option(default=64, help="maximum number of output tokens per request"),
    "prompt_tokens": Option(default=256, help="maximum number of tokens per prompt"),
    "group": Option(default=5, help="number of requests per timed group"),
    "num_speculative_tokens": DraftConfig().num_speculative_tokens,
    "seed": 0,
}
COLUMNS = (
    ("model", "{model}"),
    ("workload", "{workload}"),
    (">temperature", "{temperature}"),
    (">noise streams", "{streams}"),
    (">speed-up, coupled sampling", GAIN.replace("%s", "coupled[over_off]")),
    (">tokens per forward pass, coupled sampling", "{coupled[tokens_per_pass]:.2f}"),
    (">speed-up, a seed per request", "{uncoupled[over_off][0]:.2f}x"),
    (">tokens per forward pass, a seed per request", "{uncoupled[tokens_per_pass]:.2f}"),
)
WORDS = {
    "workload": {
        REPEATS: "the same prompts again",
        VARIANTS: "the same prompts with one name changed",
        NEW: "new prompts, empty cache",
    },
}
NOTE = (
    "The speed-up is the throughput relative to speculation off with the same noise, including the prefill of prompts: "
    "median over groups of requests (minimum ... maximum). One request ran at a time. All outputs were equal to those "
    "with speculation off. The command is `python -m benchmarks.coupled`, with float32 weights. Measured on {measured}."
)
RUN = (
    "threads: {threads}, top-p {parameters[top_p]}, {parameters[requests]} prompts of {parameters[prompt_tokens]} "
    "tokens, {parameters[group]} requests per group"
)

_BATCH = 8
"""The batch size for requests that only fill the cache and are not timed."""

Group = dict[str, dict[str, Tally]]
"""The measurements of a group of requests by way of sampling: those of its engine and of speculation off."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if drafts changed an output, else 0."""
    run = Run("coupled", __doc__, argv, OPTIONS, COLUMNS, has_model=True)
    args = run.args
    codec, model = run.load()
    bench = Bench(model, codec, args)
    # New text first: what a pass costs is then measured alike by all, who later run passes of other widths.
    for temperature in args.temperatures:
        run.row(bench.new(temperature))
    for temperature in args.temperatures:
        for row in bench.again(temperature):
            run.row(row)
    return run.end(
        compared_tokens=bench.comparison.num_tokens,
        mismatches=bench.comparison.num_mismatches,
        is_wrong=bench.comparison.num_mismatches > 0,
    )


class Bench:
    """The engines that are compared (speculation off, coupled noise, one seed per request) and their workloads."""

    def __init__(self, model: Any, codec: TextCodec, args: argparse.Namespace) -> None:
        self.comparison = Comparison()
        self._codec, self._args = codec, args
        self._random = np.random.default_rng([args.seed, 2])
        self._numbers = count(1)
        self._namespace = ""
        root = f"benchmark {args.seed}".encode()  # the same for the same seed, so that a run can be repeated
        config = EngineConfig(max_num_seqs=_BATCH, coupled_streams=args.streams, enable_prefix_caching=False)
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

    def again(self, temperature: float) -> Iterator[dict[str, Any]]:
        """Yield the rows for repeated prompts and for variants of these prompts.

        First, all prompts are answered once with every noise stream, to fill the cache. Then each prompt, and each
        prompt with one name changed, is timed with a randomly chosen stream.
        """
        args, texts = self._args, snippets(self._args.seed)[: self._args.requests]
        variants = [renamed(text, self._random) for text in texts]
        prompts, changed = ([cut(self._codec, text, args.prompt_tokens) for text in some] for some in (texts, variants))
        with self._scene(f"again-{temperature}"):
            for name in (COUPLED, UNCOUPLED):
                engine = self._engines[name]
                asked = [(prompt, stream) for stream in range(args.streams) for prompt in prompts]
                ask(engine, [self._request(*each, temperature, name) for each in asked])
                if engine.caches is not None:
                    engine.caches.flush()
            for workload, some in ((REPEATS, prompts), (VARIANTS, changed)):
                yield _row(workload, temperature, args.streams, self._timed(some, temperature))

    def new(self, temperature: float) -> dict[str, Any]:
        """Return the row for prompts that never repeat, with empty caches."""
        args = self._args
        prompts = made_stream(NO_REPEATS, self._codec, args.requests, args.seed + 1, args.prompt_tokens).prompts
        with self._scene(f"new-{temperature}"):
            groups = self._timed(prompts, temperature)
        return _row(NEW, temperature, args.streams, groups)

    @contextmanager
    def _scene(self, namespace: str) -> Iterator[None]:
        self._namespace = namespace
        drafting = [engine for name, engine in self._engines.items() if name != OFF]
        with ExitStack() as stack:
            for engine in drafting:
                engine.caches = stack.enter_context(CacheManager(CacheConfig(), fingerprint=self._codec.fingerprint))
            yield
            for engine in drafting:
                engine.caches = None

    def _timed(self, prompts: Sequence[list[int]], temperature: float) -> list[Group]:
        """Time every prompt once for each way of sampling, with a random noise stream; return the timings by group."""
        groups: list[Group] = []
        for place, prompt in enumerate(prompts):
            if place % self._args.group == 0:
                groups.append({name: {name: Tally(), OFF: Tally()} for name in (COUPLED, UNCOUPLED)})
            stream = int(self._random.integers(self._args.streams))
            for name in in_turn((COUPLED, UNCOUPLED), place):
                pair = {each: self._engines[each] for each in (name, OFF)}
                asked = [self._request(prompt, stream, temperature, name)]
                contest(pair, asked, place // 2, self.comparison, groups[-1][name])
        return groups

    def _request(self, prompt: list[int], stream: int, temperature: float, name: str) -> Request:
        number, args = next(self._numbers), self._args
        seed = None if name == COUPLED else number
        sampling = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, top_p=args.top_p, seed=seed)
        return Request(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            noise_stream=stream if name == COUPLED else None,
            namespace=self._namespace,
        )


def _row(workload: str, temperature: float, streams: int, groups: Sequence[Group]) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": workload, "temperature": temperature, "streams": streams}
    for name in (COUPLED, UNCOUPLED):
        own = [group[name] for group in groups]
        tokens, passes = (sum(getattr(each[name], what) for each in own) for what in ("tokens", "passes"))
        row[name] = {
            "tokens_per_pass": round(tokens / passes, 3),
            "over_off": spread(ratios(own, name, OFF)),
            "over_off_by_cpu_time": spread(ratios(own, name, OFF, "tokens_per_cpu_s")),
        }
    return row


if __name__ == "__main__":
    sys.exit(main())
