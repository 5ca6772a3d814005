"""Measure whether the engine gets faster with use: a stream of requests on a new engine, compared with speculation off.

``python -m benchmarks.growth [MODEL] [--streams NAME...] [--requests N] [--max-tokens N] [--out FILE] [--json]``

First, the same 50 greedy requests run twice. The verification passes of both runs are counted, and the throughput of
the second run is compared with speculation off. Then every stream runs greedily and sampled (temperature 0.7, top-p
0.9, one seed per request). The streams are "mixed" (some requests repeat, some are variants, some are new), "new"
(no repeats), and the prompts of recorded requests by the name of their trace, cut to 320 tokens.

Requests are grouped in windows. In each window, engines with and without speculation run the same requests alternately.
The last fifth of the stream also runs on a new engine with an empty cache: the difference is the effect of the cached
earlier requests. Every output is compared with the output of speculation off. Prints a table; the last line of stdout
is one JSON object.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.run import GAIN, Option, Run, spread
from benchmarks.ways import Comparison, Tally, ask, contest, open_engine, ratios, requests_of
from benchmarks.workloads import Stream, cut, open_stream, snippets
from ssd.config import CacheConfig, EngineConfig, SamplingParams
from ssd.engine import Engine, Request
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

_LENGTH = 1024
"""The maximum number of tokens of a prompt with its output."""

OPTIONS: dict[str, Any] = {
    "streams": Option(default=["mixed", "new"], several=True, metavar="NAME"),
    "sampling": Option(default=["greedy", "sampled"], choices=("greedy", "sampled")),
    "requests": Option(default=160, help="number of requests per stream"),
    "repeated": Option(default=50, help="number of requests that are sent twice"),
    "max_tokens": 64,
    "window": Option(default=4, help="number of requests per measured window"),
    "seed": 0,
}
COLUMNS = (
    ("model", "{model}"),
    ("stream", "{stream}"),
    ("sampling", "{sampling}"),
    (">speed-up over speculation off, empty cache", GAIN.replace("%s", "speedup_last_anew")),
    (">speed-up, warmed cache", GAIN.replace("%s", "speedup_last")),
    (">tokens per forward pass, empty cache", "{acceptance_length_last_anew:.2f}"),
    (">tokens per forward pass, warmed cache", "{acceptance_length_last:.2f}"),
)
WORDS = {"stream": {"mixed": "some requests repeated", "no repeats": "no request repeated"}}
EACH = (
    "{model}: {repeated_requests[requests]} greedy requests took {repeated_requests[steps_first]} forward passes with "
    "an empty cache. The same requests, sent a second time, took {repeated_requests[steps_second]} forward passes, "
    "with {repeated_requests[speedup_second]:.1f}x the throughput of speculation off."
)
NOTE = (
    "The values are those of the last fifth of each stream. A new engine with an empty cache and an engine with the "
    "cache of all earlier requests decoded these requests. Each cell is the median over windows (minimum ... maximum). "
    "Speculation on and off were measured alternately, and all outputs were equal. The command is "
    "`python -m benchmarks.growth`, with float32 weights. Measured on {measured}."
)
RUN = (
    "threads: {threads}, {parameters[requests]} requests of at most {parameters[max_tokens]} output tokens per "
    "stream, {parameters[window]} requests per window"
)

Window = tuple[int, Mapping[str, Tally]]
"""The number of cached tokens before a window of requests, and its measurements with speculation "on" and "off"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if drafts changed an output, else 0."""
    run = Run("growth", __doc__, argv, OPTIONS, COLUMNS, has_model=True, has_shapes=True)
    args = run.args
    codec, model = run.load(speaks=True)
    again = repeat(model, codec, args.repeated, args.max_tokens, seed=args.seed)
    run.say(
        f"the same {again['requests']} greedy requests twice: {again['steps_first']} verify steps, then "
        f"{again['steps_second']}; the second run has {again['speedup_second']}x the tokens/s of off"
    )
    for name in args.streams:
        stream = open_stream(name, codec, args.requests, args.seed, _LENGTH - args.max_tokens)
        for sampling in args.sampling:
            windows, anew, comparison = run_stream(model, codec, stream, sampling, args)
            run.row(summary(stream, sampling, windows, anew, comparison))
    differs = again["mismatches"] or any(row["mismatches"] for row in run.rows)
    is_wrong = bool(differs) and (again["is_exact"] or model.dtype == torch.float32)
    return run.end(repeated_requests=again, is_exact=again["is_exact"], is_wrong=is_wrong)


def repeat(
    model: PreTrainedModel, codec: TextCodec, num_requests: int, max_tokens: int, *, seed: int = 0
) -> dict[str, Any]:
    """Run the same greedy requests twice, one at a time, on a cache that is empty at first.

    Returns the number of verification passes of both runs and the second run's speed-up over speculation off.
    """
    length = max(512, 256 + max_tokens + 8)
    prompts = [cut(codec, text, 256) for text in snippets(seed + 1)[:num_requests]]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    requests = requests_of(prompts, [params] * num_requests)
    with CacheManager(CacheConfig(), fingerprint=codec.fingerprint) as caches:
        on, off = _pair(model, codec, caches, length)
        first = ask(on, requests)
        steps_first = on.metrics.num_verify_steps
        caches.flush()
        comparison, over_off, num_tokens = Comparison(), list[float](), 0
        for number, request in enumerate(requests):
            tallies = contest({"on": on, "off": off}, [request], number, comparison)
            over_off.append(tallies["off"].seconds / tallies["on"].seconds)
            num_tokens += tallies["off"].tokens
        steps_second = on.metrics.num_verify_steps - steps_first
        for request, once in zip(requests, first, strict=True):
            comparison.add(off, request, once, ask(off, [request])[0])
    return {
        "requests": num_requests,
        "output_tokens": num_tokens,
        "steps_first": steps_first,
        "steps_second": steps_second,
        "tokens_per_step_first": round(num_tokens / steps_first, 2),
        "tokens_per_step_second": round(num_tokens / steps_second, 2),
        "speedup_second": round(median(over_off), 2),
        "mismatches": comparison.num_mismatches,
        "is_exact": comparison.is_exact,
    }


def run_stream(
    model: PreTrainedModel, codec: TextCodec, stream: Stream, sampling: str, args: Namespace
) -> tuple[list[Window], list[Window], Comparison]:
    """Run one stream with and without speculation, and then its last fifth again on new engines.

    Returns the windows of the stream, the windows on the new engines, and the comparison of all outputs.
    """
    comparison = Comparison()
    temperature, top_p = (0.0, 1.0) if sampling == "greedy" else (0.7, 0.9)
    # A seed of its own for each request: who asks the same again gets another sample, as on any service.
    seeds = range(len(stream.prompts))
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=temperature, top_p=top_p, seed=seed) for seed in seeds
    ]
    requests = requests_of(stream.prompts, params)
    groups = [requests[first : first + args.window] for first in range(0, len(requests), args.window)]

    def asked(some: Sequence[Sequence[Request]]) -> Iterator[Window]:
        with CacheManager(CacheConfig(), fingerprint=codec.fingerprint) as caches:
            on, off = _pair(model, codec, caches, _LENGTH)
            for number, group in enumerate(some):
                cached = caches.get("default").snapshot().num_tokens
                yield cached, contest({"on": on, "off": off}, group, number, comparison)

    return list(asked(groups)), list(asked(groups[-_fifth(groups) :])), comparison


def _fifth(windows: Sequence[object]) -> int:
    return max(1, len(windows) // 5)


def _pair(model: PreTrainedModel, codec: TextCodec, caches: CacheManager, length: int) -> list[Engine]:
    config = EngineConfig(max_num_seqs=1)
    return [
        open_engine(model, name, slots=1, length=length, config=config, codec=codec, caches=known)
        for name, known in (("ssd", caches), ("none", None))
    ]


def summary(
    stream: Stream, sampling: str, windows: Sequence[Window], anew: Sequence[Window], comparison: Comparison
) -> dict[str, Any]:
    """Return the result row of a stream: figures of its last fifth with a warmed cache and with an empty one.

    ``anew`` are the windows with an empty cache. Ratios compare speculation on and off within a window; the row
    contains their medians over windows.
    """
    fifth = _fifth(windows)
    over_off, over_off_anew = (ratios([tallies for _, tallies in some], "on", "off") for some in (windows, anew))
    widths, widths_anew = ([tallies["on"].tokens_per_pass for _, tallies in some] for some in (windows, anew))
    return {
        "stream": stream.name,
        "shares": stream.shares,
        "sampling": sampling,
        "checksum": stream.checksum,
        "output_tokens": comparison.num_tokens,
        "mismatches": comparison.num_mismatches,
        "speedup_last": spread(over_off[-fifth:]),
        "speedup_last_anew": spread(over_off_anew),
        "acceptance_length_last": round(median(widths[-fifth:]), 3),
        "acceptance_length_last_anew": round(median(widths_anew), 3),
        "windows": [
            [cached, *(round(tallies[way].tokens_per_s, 1) for way in ("on", "off")), round(width, 3)]
            for (cached, tallies), width in zip(windows, widths, strict=True)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
