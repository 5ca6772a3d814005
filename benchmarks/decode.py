"""Measure how long a decoding step takes, how much of it is the forward pass, and how long its other parts take.

``python -m benchmarks.decode [MODEL] [--batch B...] [--draft K...] [--shape tiny|1b|8b] [--profiled N]``

For every combination of batch size, context length and number of draft tokens K, the engine runs decoding steps whose
drafts are always correct, so each row emits T = 1 + K tokens per step. K = 0 is decoding without drafts. Each step and
its parts are timed. Then forward passes alone are timed, launched without waiting for the previous one. The outputs for
every K must equal those for K = 0.

``--profiled`` runs further steps under the PyTorch profiler and prints the device's time by groups of kernels and its
waits for the host (on a CPU: the time of operators by groups). ``--traces`` also writes a trace file that a browser can
show. With ``--shape tiny``, nearly all time except the launches is host time.

As a baseline, ``model.generate`` of transformers is timed on other prompts. A memory copy is timed to show the memory
bandwidth of the device. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function
from transformers import PreTrainedModel

from benchmarks.models import load
from benchmarks.profile import profiled
from benchmarks.run import ENGINE, Option, Run
from benchmarks.steps import (
    DRAFTING,
    PARTS,
    Clock,
    KnownDrafter,
    Rows,
    Shape,
    Tokens,
    at_once,
    copy_bytes_per_second,
    pass_seconds,
    passes_of,
    prompts_of,
    synchronize,
    texts_of,
    weight_bytes,
)
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine
from ssd.model.loading.load_target import open_target
from ssd.model.loading.threads import tune_threads
from ssd.model.runners.batch_invariance import verify_batch_invariance
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager

_UNTIMED, _UNTIMED_PLAIN = 6, 24
"""The numbers of untimed first steps with and without drafts: they record CUDA graphs and fill caches."""


def time_generate(
    model: PreTrainedModel, target: Target, prompts: Sequence[Tokens], num_tokens: int
) -> dict[str, dict[str, Any]]:
    """Compare the engine with transformers' ``model.generate`` at batch size 1, including the prefill of the prompt.

    In each round, all variants complete one of ``prompts`` in turn; the first round warms up. Returns for each variant
    "tokens_per_s" (median over rounds), "engine_over_it" (the median ratio of the engine's throughput to its own;
    variants with drafts are compared with the engine with drafts), "equal_to_eager", and "error" if it cannot run with
    this model.
    """
    ways: dict[str, Callable[[Tokens], list[int]]] = {
        name: partial(_complete, target, num_tokens, drafter) for name, drafter in _ENGINES.items()
    }
    ways |= {name: partial(_generate, model, num_tokens, how) for name, how in _GENERATE.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, str] = {}
    texts: dict[str, list[list[int]]] = {name: [] for name in ways}
    for prompt in prompts:
        for name, way in ways.items():
            if name not in errors:
                synchronize(model.device)
                began = time.perf_counter()
                try:
                    texts[name].append(way(prompt))
                except Exception as error:  # a model may refuse the cache
                    errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                seconds[name].append(time.perf_counter() - began)
    found: dict[str, dict[str, Any]] = {name: {"tokens_per_s": None, "error": why} for name, why in errors.items()}
    for name in ways.keys() - errors.keys():
        ours = seconds[DRAFTED if name in (DRAFTED, "prompt lookup") else "engine"]
        ratios = [theirs / own for own, theirs in zip(ours[1:], seconds[name][1:], strict=True)]
        found[name] = {
            "tokens_per_s": round(num_tokens / median(seconds[name][1:]), 2),
            "engine_over_it": round(median(ratios), 3),
            "equal_to_eager": texts[name] == texts["eager"],
        }
    return found


DRAFTED = "engine with drafts"
_ENGINES = {"engine": "none", DRAFTED: "ssd"}


def _complete(target: Target, num_tokens: int, drafter: str, prompt: Tokens) -> list[int]:
    draft = DraftConfig(num_speculative_tokens=_LOOKED_UP)
    config = EngineConfig(max_num_seqs=1, enable_prefix_caching=False)
    engine = Engine(target, drafter=make_drafter(drafter, draft), config=config, draft=draft)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    said = [token for output in engine.generate([prompt.tolist()], sampling) for token in output.token_ids]
    synchronize(target.device)
    return said


_LOOKED_UP = 10
_GENERATE: dict[str, dict[str, Any]] = {
    "eager": {},
    "prompt lookup": {"prompt_lookup_num_tokens": _LOOKED_UP},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}


def _generate(model: PreTrainedModel, num_tokens: int, options: dict[str, Any], prompt: Tokens) -> list[int]:
    ids = torch.from_numpy(prompt.astype("int64"))[None].to(model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        eos_token_id=model.config.vocab_size,  # never comes; a least length would have every token's scores changed
        pad_token_id=0,
        do_sample=False,
        **options,
    )
    synchronize(model.device)
    said: list[int] = output[0, ids.shape[1] :].tolist()
    return said


OPTIONS: dict[str, Any] = {
    "batch": Option(default=[1, 8], metavar="B", help="batch sizes to measure"),
    "context": Option(default=[256], metavar="L", help="numbers of context tokens per row"),
    "draft": Option(
        default=[0, 1, 3, 7, 15], least=0, metavar="K", help="numbers of draft tokens per row; 0: no drafts"
    ),
    "rounds": Option(default=24, help="number of timed steps per combination"),
    "copy_mb": Option(default=256, help="size in MiB of the copy that measures the memory bandwidth"),
    "baseline_tokens": 128,
    "baseline_rounds": 7,
    "profiled": Option(default=0, least=0, help="number of further steps under the profiler"),
    "traces": Option(default=None, kind=Path, metavar="DIR", help="directory for a profiler trace of each combination"),
    "index_tokens": Option(default=0, least=0, help="number of unrelated tokens in the cache"),
    "enforce_eager": Option(default=False, help="run forward passes without CUDA graphs"),
    "no_baselines": Option(default=False, help="do not measure model.generate"),
}
COLUMNS = (
    ("model", "{model}"),
    (">batch", "{batch}"),
    (">tokens per row and pass", "{T}"),
    (">engine step, ms", "{step_ms_p50:.2f}"),
    (">forward pass alone, ms", "{pass_ms:.2f}"),
    (">share of drafting in the step", "{drafting_share:.1%}"),
    (">output tokens/s", "{tokens_per_s:,.0f}"),
)
EACH = (
    "{model}: relative to transformers' `model.generate`, the throughput of whole requests is "
    "{baselines[eager][engine_over_it]:.2f}x without drafts (eager), "
    "{baselines[static cache][engine_over_it]:.2f}x without drafts (uncompiled static cache) and "
    "{baselines[prompt lookup][engine_over_it]:.2f}x if both engines use prompt lookup."
)
NOTE = (
    "All draft tokens were correct, so each row of a pass emitted all its tokens. The times are medians. The command "
    "is `python -m benchmarks.decode`. Measured on {measured}."
)
RUN = "threads: {threads}"


def is_shown(row: Mapping[str, Any]) -> bool:
    """Return whether the documentation shows this row; it shows only the smallest and the largest T."""
    return row["T"] in (1, 16)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if drafts changed a token in float32 or despite batch-invariant passes, else 0."""
    under = (*ENGINE, "benchmarks/steps.py")
    unsaid = set(OPTIONS) - {"batch", "context", "draft", "rounds", "index_tokens"}
    run = Run(
        "decode", __doc__, argv, OPTIONS, COLUMNS, has_model=True, has_shapes=True, unsaid=tuple(unsaid), under=under
    )
    args = run.args
    gc.collect()  # the model of an earlier run may refer to itself
    codec, model = load(args, speaks=True)
    text, num_bytes = texts_of(codec), weight_bytes(model)
    most_said = max(_tokens_said(args, draft + 1) for draft in args.draft)
    # A target replaces layers of its model; what it is compared with stays as the library loads it.
    library = None if args.no_baselines else deepcopy(model)
    target = open_target(
        model,
        num_slots=max(args.batch),
        max_length=max(args.context) + max(args.baseline_tokens, most_said) + 12,
        max_draft_tokens=max(_LOOKED_UP, *args.draft),
        keeps_top=True,
        enforce_eager=args.enforce_eager,
        batch_invariant="off",
    )
    tune_threads(target)
    verify_batch_invariance(target, "auto")
    run.ran_on(target)
    copied = copy_bytes_per_second(target.device, args.copy_mb << 20)
    num_changed = 0
    for batch, context, draft in product(args.batch, args.context, args.draft):
        shape = Shape(batch, context, draft)
        row, outputs, plain = measure(target, text, shape, args)
        step = row["step_ms_p50"] / 1e3
        row["of_copy"] = round(num_bytes / copied / step, 4)
        num_changed += sum(said[: len(want)] != want[: len(said)] for said, want in zip(outputs, plain, strict=True))
        run.row(row)
    # Last: a profiler that once ran on a device makes every launch slower ever after.
    for row in run.rows if args.profiled else ():
        shape = Shape(row["batch"], row["context"], row["T"] - 1)
        row["profiled"] = measure(target, text, shape, args, is_profiled=True)[0]
        run.say(json.dumps(row["profiled"], indent=1))
    baselines: dict[str, dict[str, Any]] = {}
    if library is not None:
        prompts = prompts_of(text, args.baseline_rounds + 1, args.context[0])
        baselines = time_generate(library, target, prompts, args.baseline_tokens)
    for way, found in baselines.items():
        run.say(f"{way}: {found.get('error') or '{tokens_per_s} tokens/s, engine {engine_over_it}x'.format(**found)}")
    return run.end(
        way=target.backend,
        passes=passes_of(target),
        weight_bytes=num_bytes,
        copy_bytes_per_s=round(copied),
        changed_outputs=num_changed,
        baselines=baselines,
        is_exact=target.batch_invariance.is_invariant,
        is_wrong=(num_changed > 0 and (target.batch_invariance.is_invariant or target.dtype == torch.float32))
        or (target.dtype == torch.float32 and not all(each.get("equal_to_eager", True) for each in baselines.values())),
    )


def measure(
    target: Target, text: Sequence[int], shape: Shape, args: Namespace, *, is_profiled: bool = False
) -> tuple[dict[str, Any], list[list[int]], list[list[int]]]:
    """Time the engine's steps for one shape.

    Returns the row of the result, the outputs, and the outputs of plain decoding. The cache contains the plain outputs,
    so that the drafter finds them. With ``is_profiled``, the row is the profiler's summary and both lists are empty.
    """
    num_tokens = _tokens_said(args, shape.width)
    prompts = prompts_of(text, shape.batch, max(8, shape.context - num_tokens // 2))
    plain: list[list[int]] = [[] for _ in prompts]
    if shape.draft:
        plain = Rows(_engine(target, prompts, KnownDrafter(plain, 0), None, 0), prompts, num_tokens + 2).finish()
    random = np.random.default_rng(1)
    with CacheManager(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        for _ in range(-(-args.index_tokens // 2048)):
            other = random.integers(3, target.vocab_size, 2048).astype(np.int32)
            caches.get("default").append(other, prompt_length=0)
        for prompt, said in zip(prompts, plain, strict=True):
            caches.get("default").append(np.append(prompt, np.array(said, np.int32)), prompt_length=len(prompt))
        caches.flush()
        drafter = KnownDrafter(plain, shape.draft)
        engine = _engine(target, prompts, drafter, caches, shape.draft)
        clock, rows = Clock(engine, drafter, mark=record_function), Rows(engine, prompts, num_tokens + 2)
        rows.read_prompts()
        seconds, put_out = list[float](), 0
        untimed = _untimed(shape.width)
        for number in range(untimed + args.rounds):
            if number == untimed:
                clock.seconds.clear()
            began = time.perf_counter()
            new = rows.step()  # which waits for the pass before
            if number >= untimed:
                seconds.append(time.perf_counter() - began)
                put_out += new
        synchronize(target.device)
        parts = {part: clock.seconds[part] for part in (*PARTS, DRAFTING)}
        if is_profiled:
            trace = args.traces and args.traces / f"trace-b{shape.batch}-t{shape.width}.json.gz"
            return profiled(rows.step, args.profiled, target.device, trace), [], []
        outputs = rows.finish()
    step, alone = median(seconds), pass_seconds(target, shape, min(8, len(seconds)))
    row = {
        "batch": shape.batch,
        "context": shape.context,
        "T": shape.width,
        "step_ms_p50": round(step * 1e3, 4),
        "step_ms_p10_p90": [round(float(x) * 1e3, 4) for x in np.percentile(seconds, [10, 90])],
        "pass_ms": round(alone * 1e3, 4),
        "outside_pass_share": round(1 - alone / step, 4),
        "parts_ms": {part: round(1e3 * taken / len(seconds), 4) for part, taken in parts.items()},
        "drafting_share": round(parts[DRAFTING] / sum(seconds), 4),
        "tokens_per_s": round(put_out / len(seconds) / step, 2),
    }
    return row, outputs, plain if shape.draft else outputs


def _engine(
    target: Target, prompts: Sequence[Tokens], drafter: Drafter, caches: CacheManager | None, draft: int
) -> Engine:
    # A step that only decodes asks its drafter too, and gets nothing.
    most = DraftConfig(num_speculative_tokens=max(1, draft))
    return Engine(target, drafter=drafter, caches=caches, config=at_once(target, prompts), draft=most)


def _tokens_said(args: Namespace, width: int) -> int:
    """Return the maximum number of tokens that one row generates in all its steps."""
    return int((_untimed(width) + args.rounds + args.profiled) * width)


def _untimed(width: int) -> int:
    return _UNTIMED if width > 1 else _UNTIMED_PLAIN


if __name__ == "__main__":
    sys.exit(main())
