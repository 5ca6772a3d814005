"""Check that outputs with drafts are bit-identical to plain decoding, and measure how much that slows forward passes.

``python -m benchmarks.exact [MODEL] [--shape 8b] [--dtype float32 ...] [--drafters NAME...] [--out FILE]``

For each dtype, tokens and log-probabilities are compared, bit by bit, with those of one request at a time without
speculation, both greedy and sampled. In float32, every pair of values of drafter, draft limit and batch size occurs in
a setting, and greedy outputs are also compared with transformers' ``generate``. For other dtypes, two settings are
tested, one of them with the longest drafts and the largest batch.

Then decoding passes of one row and of eight rows and a prefill are timed alternately with bit-identical outputs and
with ``--batch-invariant off``; the table shows the median, minimum and maximum of the speed ratio over rounds. Prints a
table; the last line of stdout is one JSON object. The exit status is 1 if an output differs.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.exactness import NUM_TOP, Report, Setting, compare, covering_settings, reference_greedy, run
from benchmarks.models import load
from benchmarks.run import SPREAD, Option, Run, in_turn, spread
from benchmarks.steps import passes_of, synchronize
from benchmarks.workloads import snippets
from ssd.config import BatchInvariant, SamplingParams
from ssd.model.loading.load_target import DTYPES, open_target
from ssd.model.loading.threads import tune_threads
from ssd.model.runners.batch_invariance import verify_batch_invariance
from ssd.model.target import Target
from ssd.text.codec import TextCodec

_PREFILL = 448
_PLANS: tuple[BatchInvariant, ...] = ("off", "on")
_PASSES = 4
_DEVICE_PASSES = 24
"""The number of passes per timing on a GPU, larger because each timing includes two synchronizations."""

OPTIONS: dict[str, Any] = {
    "dtype": Option(default=["float32", "bfloat16"], choices=sorted(DTYPES)),
    "drafters": Option(default=["ssd", "random", "oracle"], metavar="NAME"),
    "draft": Option(default=[1, 4, 16], metavar="K", help="maximum numbers of draft tokens to test"),
    "batch": Option(default=[1, 4, 16], metavar="B", help="batch sizes to test: numbers of concurrent requests"),
    "prompts": 32,
    "max_tokens": 48,
    "rounds": Option(default=15, help="number of rounds of the timing"),
    "seed": 1,
}
COLUMNS = (
    ("model", "{model}"),
    ("data type", "{dtype}"),
    (">distinct token positions", "{num_distinct:,}"),
    (">comparisons of tokens", "{num_positions:,}"),
    (">compared log-probabilities", "{num_logprobs:,}"),
    (">differences", "{num_different}"),
    (">relative speed, decoding 1 row", SPREAD.replace("%s", "rates[decoding 1 row]")),
    (">relative speed, decoding 8 rows", SPREAD.replace("%s", "rates[decoding 8 rows]")),
    (">relative speed, prefill", SPREAD.replace("%s", "rates[prefill of 448 tokens]")),
)
NOTE = (
    "Each output was compared with plain decoding of one request at a time, in several combinations of batch size and "
    "draft length. Every second request also compared the log-probabilities of its token and of the {parameters[top]} "
    "most probable tokens, bit by bit. Relative speed is the speed with bit-identical outputs divided by the speed "
    "with `--batch-invariant off`, measured alternately: median (minimum ... maximum). The command is "
    "`python -m benchmarks.exact`. Measured on {measured}."
)
RUN = "threads: {threads}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if an output differs, else 0."""
    under = ("benchmarks/exactness.py", "ssd/engine", "ssd/model")
    this = Run("exact", __doc__, argv, OPTIONS, COLUMNS, has_model=True, has_shapes=True, under=under)
    args = this.args
    this.parameters["top"] = NUM_TOP
    for dtype in args.dtype:
        codec, model = load(Namespace(**{**vars(args), "dtype": dtype}), speaks=True)
        prompts = [codec.encode_prompt(text)[-160:] for text in snippets(args.seed)[: args.prompts]]
        target = open_target(
            model,
            num_slots=max(args.batch),
            max_length=512,
            max_draft_tokens=max(args.draft),
            batch_invariant="off",
            keeps_top=bool(args.drafters),
        )
        tune_threads(target)
        verify_batch_invariance(target, "on")
        this.ran_on(target)
        report = _compared(target, prompts, args, args.drafters if dtype == "float32" else (), codec)
        this.row(
            {
                "model": this.facts["model"],
                "dtype": dtype,
                "way": target.backend,
                "passes": passes_of(target),
                "exact": str(target.batch_invariance),
                "num_distinct": report.num_distinct,
                "num_positions": report.num_tokens,
                "num_logprobs": report.num_logprobs,
                "ties": report.num_ties,
                "num_different": len(report.mismatches) + (0 if report.passed else report.num_ties),
                "first_mismatches": report.mismatches[:5],
                "rates": dict(_rates(target, args.rounds)),
            }
        )
    return this.end(is_wrong=any(row["num_different"] for row in this.rows))


def _compared(
    target: Target, prompts: Sequence[list[int]], args: Namespace, drafters: Sequence[str], codec: TextCodec
) -> Report:
    """Compare the outputs of several settings with plain decoding, greedy and sampled.

    With ``drafters``, the settings cover all pairs of drafter, draft limit and batch size, and greedy outputs are also
    compared with transformers' ``generate``. Without, only two settings are compared.
    """
    report, eos, max_tokens = Report(), codec.eos_token_ids, args.max_tokens
    settings = [Setting("ssd", args.draft[-1], args.batch[-1]), Setting("random", max(args.draft), max(args.batch))]
    if drafters:
        settings = covering_settings(drafters, args.draft, args.batch)
    greedy = [SamplingParams(max_tokens=max_tokens, temperature=0.0)] * len(prompts)
    seeds = range(len(prompts))
    sampled = [SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=seed) for seed in seeds]
    if drafters:
        theirs = reference_greedy(target, prompts, max_tokens, eos)
        compare(target, prompts, greedy, theirs, settings[0], eos_token_ids=eos, report=report)
    for sampling in (greedy, sampled):
        expected, _ = run(target, prompts, sampling, None, eos_token_ids=eos)
        report.num_distinct += sum(len(each.token_ids) for each in expected)
        for setting in settings:
            compare(target, prompts, sampling, expected, setting, eos_token_ids=eos, report=report)
    return report


def _rates(target: Target, rounds: int) -> Iterator[tuple[str, list[float]]]:
    held = _PREFILL // 2
    passes = _PASSES if target.device.type == "cpu" else _DEVICE_PASSES

    def prefill(slot: int, length: int) -> None:
        target.rollback(slot, 0)
        target.prefill([slot], np.ones((1, length), np.int64), [length])

    def begin() -> None:
        for slot in range(min(8, target.num_slots)):
            prefill(slot, held)

    def decode(size: int) -> None:
        slots = list(range(size))
        for _ in range(passes):
            target.forward(slots, np.ones((size, 1), np.int64), [1] * size)
        for slot in slots:
            target.rollback(slot, held)

    for size in (1, 8):
        if size <= target.num_slots:
            yield f"decoding {size} row{'s' * (size > 1)}", _ratios(target, begin, partial(decode, size), rounds)
    yield f"prefill of {_PREFILL} tokens", _ratios(target, begin, lambda: prefill(0, _PREFILL), rounds)


def _ratios(target: Target, begin: Callable[[], None], passes: Callable[[], None], rounds: int) -> list[float]:
    """Return median, minimum and maximum over rounds of the speed with bit-identical outputs over the speed without.

    ``begin`` fills the slots with tokens before each timing, because all slots are cleared when the setting changes.
    """
    found = []
    for number in range(rounds):
        seconds: dict[BatchInvariant, float] = {}
        for wanted in in_turn(_PLANS, number):
            for slot in range(target.num_slots):
                target.rollback(slot, 0)
            verify_batch_invariance(target, wanted)
            begin()
            passes()
            synchronize(target.device)
            began = time.perf_counter()
            passes()
            synchronize(target.device)
            seconds[wanted] = time.perf_counter() - began
        found.append(seconds["off"] / seconds["on"])
    return spread(found)


if __name__ == "__main__":
    sys.exit(main())
