"""Does the service get faster with use? A stream of requests on a fresh engine, speculation on and off in turn.

``python -m benchmarks.growth [MODEL] [--streams NAME...] [--requests N] [--max-tokens N] [--out DIR] [--json]``

First the same 50 greedy requests twice: verify steps of both runs, and the second's tokens/s against speculation off.
Then two runs of every stream, greedy and sampled (temperature 0.7, top-p 0.9, a seed per request). Streams: "mixed", in
which some requests recur, some are near-variants and some are new; "new", with no repeats; and the prompts of recorded
requests by the name of their trace, cut to 320 tokens. Requests go in windows; every window runs once with speculation
and once without, the order alternating, so that a machine that slows down slows both. Every output is compared token by
token. Prints tables, writes ``growth.png`` and ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from benchmarks.environment import head, model_facts, model_name
from benchmarks.exactness import differs
from benchmarks.models import add_model
from benchmarks.streams import Stream, cut, made_stream, recorded_stream
from benchmarks.workloads import MIXED, NO_REPEATS, snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

MADE = {"mixed": MIXED, "new": NO_REPEATS}
"""Streams made of the standard library, by their names."""


@dataclass(slots=True)
class Window:
    """One group of requests, run on and off."""

    cached_tokens: int
    on_tokens_per_s: float
    off_tokens_per_s: float
    mean_acceptance_length: float
    acceptance_rate: float


@dataclass(slots=True)
class Run:
    """One stream under one sampling."""

    stream: Stream
    sampling: str
    windows: list[Window]
    num_tokens: int
    num_mismatches: int

    def summary(self) -> dict[str, Any]:
        """First and last fifth of the stream; ratios are on / off within a window, medians over windows."""
        fifth = max(1, len(self.windows) // 5)
        ratios = [w.on_tokens_per_s / w.off_tokens_per_s for w in self.windows]
        return {
            "stream": self.stream.name,
            "shares": self.stream.shares,
            "sampling": self.sampling,
            "checksum": self.stream.checksum,
            "output_tokens": self.num_tokens,
            "mismatches": self.num_mismatches,
            "cached_tokens": self.windows[-1].cached_tokens,
            "off_tokens_per_s": round(median(w.off_tokens_per_s for w in self.windows), 1),
            "speedup_first": round(median(ratios[:fifth]), 3),
            "speedup_last": round(median(ratios[-fifth:]), 3),
            "speedup_min": round(min(ratios), 3),
            "speedup_max": round(max(ratios), 3),
            "acceptance_length_first": round(median(w.mean_acceptance_length for w in self.windows[:fifth]), 3),
            "acceptance_length_last": round(median(w.mean_acceptance_length for w in self.windows[-fifth:]), 3),
            "windows": [
                [
                    w.cached_tokens,
                    round(w.on_tokens_per_s, 1),
                    round(w.off_tokens_per_s, 1),
                    round(w.mean_acceptance_length, 3),
                ]
                for w in self.windows
            ],
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, plot."""
    args = _parse(argv)
    codec = TextCodec.load(str(args.model))
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    print(f"growth: {model_name(args.model)}, {model.device}, {model.dtype}, {args.requests} requests of at most "
          f"{args.max_tokens} new tokens, windows of {args.window}, batch {args.batch}, "
          f"draft limit {args.num_speculative_tokens}, seed {args.seed}")  # fmt: skip
    repeated = repeat(model, codec, args)
    print(f"\nthe same {repeated['requests']} greedy requests twice: {repeated['steps_first']} verify steps, then "
          f"{repeated['steps_second']} ({repeated['tokens_per_step_first']} and {repeated['tokens_per_step_second']} "
          f"tokens a step); second run {repeated['speedup_second']} x the tokens/s of speculation off")  # fmt: skip
    runs = []
    for name in args.streams:
        stream = open_stream(name, codec, args)
        for sampling in ("greedy", "sampled"):
            # Two targets over one model: each engine has its own slots.
            on, off = (
                open_target(model, num_slots=args.batch, max_length=args.max_model_len,
                            max_draft_tokens=args.num_speculative_tokens)
                for _ in range(2)
            )  # fmt: skip
            runs.append(run_stream(on, off, codec, stream, sampling, args))
            print_run(runs[-1])
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        plot(runs, args.out / f"{args.name}.png")
        print(f"wrote {args.out / args.name}.png")
    result = {
        **head("growth"),
        **model_facts(model_name(args.model), model),
        "parameters": {k: v for k, v in vars(args).items() if k not in ("model", "name", "out", "json")},
        "repeated_requests": repeated,
        "runs": [run.summary() for run in runs],
    }
    line = json.dumps(result)
    if args.out:
        (args.out / f"{args.name}.json").write_text(line + "\n")
    if args.json:
        print(line)
    if repeated["mismatches"] or any(run.num_mismatches for run in runs):
        raise SystemExit("outputs differ: speculation changed a token")


def open_stream(name: str, codec: TextCodec, args: argparse.Namespace) -> Stream:
    """A made stream, or that of a trace. Raises ConfigError where there is none of this name."""
    if name in MADE:
        limit = args.max_model_len - args.max_tokens
        return made_stream(MADE[name], codec, args.requests, args.seed, limit)
    return recorded_stream(name, codec, args.requests)


def repeat(model: PreTrainedModel, codec: TextCodec, args: argparse.Namespace) -> dict[str, Any]:
    """The same greedy requests on an empty cache and again, one at a time; the second run against speculation off."""
    num_requests = args.repeated
    prompts = [cut(codec, text, 256) for text in snippets(args.seed + 1)[:num_requests]]
    params = [SamplingParams(max_tokens=args.max_tokens, temperature=0.0)] * num_requests
    draft = DraftConfig(num_speculative_tokens=args.num_speculative_tokens)
    everything = range(num_requests)
    with CacheSet(CacheConfig(), fingerprint=codec.fingerprint) as caches:
        on, off = (
            Engine(
                open_target(model, num_slots=1, max_length=512, max_draft_tokens=args.num_speculative_tokens),
                drafter=make_drafter(drafter, draft),
                codec=codec,
                caches=known,
                config=EngineConfig(max_num_seqs=1),
                draft=draft,
            )
            for drafter, known in (("ssd", caches), ("none", None))
        )
        on.warm_up()
        off.warm_up()
        first, _ = complete(on, prompts, params, everything)
        steps_first = on.metrics.num_verify_steps
        caches.flush()
        second: list[list[int]] = []
        plain: list[list[int]] = []
        ratios = []
        for index in everything:  # in turn, so that a machine that slows down slows both
            got, on_s = complete(on, prompts, params, range(index, index + 1))
            want, off_s = complete(off, prompts, params, range(index, index + 1))
            second += got
            plain += want
            ratios.append(off_s / on_s)
        steps_second = on.metrics.num_verify_steps - steps_first
    differing = sum(a != c or b != c for a, b, c in zip(first, second, plain, strict=True))
    num_mismatches = sum(
        differs(off.target, prompt, params[0], got, alone)
        for prompt, once, again, alone in zip(prompts, first, second, plain, strict=True)
        for got in (once, again)
    )
    num_tokens = sum(map(len, plain))
    return {
        "requests": num_requests,
        "output_tokens": num_tokens,
        "steps_first": steps_first,
        "steps_second": steps_second,
        "tokens_per_step_first": round(num_tokens / steps_first, 2),
        "tokens_per_step_second": round(num_tokens / steps_second, 2),
        "speedup_second": round(median(ratios), 2),
        "differing_outputs": differing,
        "mismatches": num_mismatches,
    }


def run_stream(
    on: Target, off: Target, codec: TextCodec, stream: Stream, sampling: str, args: argparse.Namespace
) -> Run:
    """One stream, window by window, with speculation and without."""
    draft = DraftConfig(num_speculative_tokens=args.num_speculative_tokens)
    config = EngineConfig(max_num_seqs=args.batch)
    result = Run(stream, sampling, [], 0, 0)
    prompts = stream.prompts
    params = [_params(sampling, args.max_tokens, index) for index in range(len(prompts))]
    with CacheSet(CacheConfig(), fingerprint=codec.fingerprint) as caches:
        speculating = Engine(
            on, drafter=make_drafter("ssd", draft), codec=codec, caches=caches, config=config, draft=draft
        )
        plain = Engine(off, drafter=make_drafter("none", draft), codec=codec, config=config, draft=draft)
        speculating.warm_up()
        plain.warm_up()
        for number, first in enumerate(range(0, len(prompts), args.window)):
            span = range(first, min(first + args.window, len(prompts)))
            cached = caches.get("default").snapshot().num_tokens
            before = (speculating.metrics.num_draft_tokens, speculating.metrics.num_accepted_tokens)
            steps = speculating.metrics.num_verify_steps
            order = (speculating, plain) if number % 2 == 0 else (plain, speculating)
            seconds: dict[int, float] = {}
            outputs: dict[int, list[list[int]]] = {}
            for engine in order:
                outputs[id(engine)], seconds[id(engine)] = complete(engine, prompts, params, span)
            ours, theirs = outputs[id(speculating)], outputs[id(plain)]
            num_tokens = sum(map(len, ours))
            drafted = speculating.metrics.num_draft_tokens - before[0]
            accepted = speculating.metrics.num_accepted_tokens - before[1]
            result.windows.append(
                Window(
                    cached,
                    num_tokens / seconds[id(speculating)],
                    sum(map(len, theirs)) / seconds[id(plain)],
                    num_tokens / (speculating.metrics.num_verify_steps - steps),
                    accepted / drafted if drafted else 0.0,
                )
            )
            result.num_tokens += num_tokens
            for index, got, want in zip(span, ours, theirs, strict=True):
                result.num_mismatches += differs(off, prompts[index], params[index], got, want)
    return result


def complete(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], span: range
) -> tuple[list[list[int]], float]:
    """Outputs of the requests in ``span``, as many at a time as the engine has slots, and the seconds they took."""
    outputs: dict[str, list[int]] = {}
    start = time.perf_counter()
    for index in span:
        name = str(index)
        outputs[name] = []
        engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompts[index]), sampling=params[index]))
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].extend(output.token_ids)
    return list(outputs.values()), time.perf_counter() - start


def _params(sampling: str, max_tokens: int, index: int) -> SamplingParams:
    if sampling == "greedy":
        return SamplingParams(max_tokens=max_tokens, temperature=0.0)
    # A seed of its own for each request: who asks the same again gets another sample, as on any service.
    return SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.9, seed=index)


def print_run(run: Run) -> None:
    """A table of windows, thinned to at most twelve lines."""
    print(f"\n{run.stream.name}, {run.sampling}: {run.stream.shares}; "
          f"{run.num_tokens} tokens compared, {run.num_mismatches} mismatches")  # fmt: skip
    print(
        f"{'cached tokens':>14} {'on tok/s':>9} {'off tok/s':>10} {'on/off':>7} {'tokens/step':>12} {'acc. rate':>10}"
    )
    stride = max(1, len(run.windows) // 12)
    for w in run.windows[::stride]:
        ratio = w.on_tokens_per_s / w.off_tokens_per_s
        print(f"{w.cached_tokens:>14} {w.on_tokens_per_s:>9.0f} {w.off_tokens_per_s:>10.0f} {ratio:>7.2f} "
              f"{w.mean_acceptance_length:>12.2f} {w.acceptance_rate:>10.2f}")  # fmt: skip


def plot(runs: Sequence[Run], path: Path) -> None:
    """Tokens per second, on and off, against tokens cached: a panel a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(runs) // 2
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 3.5 * rows), sharex=False, sharey=True, squeeze=False)
    for axis, run in zip(axes.flat, runs, strict=True):
        x = [w.cached_tokens / 1000 for w in run.windows]
        for label, colour, values in (
            ("speculation on", "tab:green", [w.on_tokens_per_s for w in run.windows]),
            ("speculation off", "tab:gray", [w.off_tokens_per_s for w in run.windows]),
        ):
            axis.plot(x, values, ".", color=colour, alpha=0.35)
            axis.plot(x, smoothed(values), color=colour, label=label, linewidth=2)
        axis.set_title(f"{run.sampling}: {run.stream.shares}")
        axis.set_xlabel("tokens cached (thousands)")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens per second")
    axes[0, 0].legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def smoothed(values: Sequence[float], width: int = 7) -> list[float]:
    """Centred running median."""
    half = width // 2
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    add_model(parser)
    parser.add_argument("--streams", nargs="+", default=list(MADE), metavar="NAME", help="(default: mixed new)")
    parser.add_argument("--requests", type=int, default=160, help="of each stream (default: %(default)s)")
    parser.add_argument("--repeated", type=int, default=50, help="requests asked twice (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--window", type=int, default=8, help="requests per measured window")
    parser.add_argument("--batch", type=int, default=1, help="requests decoded together")
    parser.add_argument("--num-speculative-tokens", type=int, default=DraftConfig().num_speculative_tokens)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="directory for growth.png and growth.json")
    parser.add_argument("--name", default="growth", help="what these two are called instead")
    parser.add_argument("--json", action="store_true", help="end stdout with one JSON line")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
