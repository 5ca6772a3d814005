"""Many samples of one prompt at once: what does it bring that they are drafted from each other while they run?

``python -m benchmarks.siblings [--model DIR] [--samples 4,16,64] [--prompts N] [--rounds N] [--json]``

Best-of-n and self-consistency: every prompt is answered n times, a slot for each sample. All begin together, or each
some passes after the one before, as where something is asked again while it is still being answered. Speculation off,
drafts without and with what the other samples have said so far answer the same prompts in turn; no prompt comes twice,
and a round begins with empty caches. Drafted tokens cost what was measured, which on a CPU is much where many samples
run; beside that, for the tokens a pass, both draft at a low price, as where a GPU has room to spare. Noise is that of a
seed and the sample's number; or coupled, with a stream for each sample, or one for all of them, which then say the
same. It is the same for all contenders, so every output is compared with speculation off.
Ratios are of tokens/s within a round,
prompts included; medians over rounds, with the least and the most, and beside them by CPU time. Prints tables; the last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import head, model_facts, model_name
from benchmarks.models import add_model
from benchmarks.run import spread, spread_text
from benchmarks.siblings.contenders import (
    ALONE,
    ALONE_CHEAP,
    APART,
    LIVE,
    LIVE_CHEAP,
    NAMES,
    OFF,
    TOGETHER,
    Answered,
    Comparison,
    Siblings,
)
from benchmarks.streams import made_stream
from benchmarks.workloads import NO_REPEATS
from ssd.model.loading.load_target import load_model
from ssd.text.codec import TextCodec


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs."""
    args = _parse(argv)
    codec = TextCodec.load(str(args.model))
    stream = made_stream(NO_REPEATS, codec, args.prompts * args.rounds, args.seed, args.prompt_tokens)
    parameters = {
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "prompt_tokens": args.prompt_tokens,
        "rounds": args.rounds,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "num_speculative_tokens": args.num_speculative_tokens,
        "price": args.price,
        "seed": args.seed,
        "stream": stream.checksum,
    }
    print(f"siblings: {model_name(args.model)}, {json.dumps(parameters)}")
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    facts = {**head("siblings"), **model_facts(model_name(args.model), model)}
    result: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    for num_samples in args.samples:
        siblings = Siblings(model, codec, num_samples, args)
        for noise, apart in [(noise, 0) for noise in TOGETHER] + [(noise, args.apart) for noise in APART]:
            siblings.comparison = Comparison()
            rounds = [
                siblings.round(stream.prompts[number :: args.rounds], noise, apart, number)
                for number in range(args.rounds)
            ]
            runs.append(_summary(num_samples, noise, apart, rounds, siblings.comparison))
            _print(runs[-1])
            result = {**facts, "parameters": parameters, "runs": runs}
            if args.out is not None:  # so far: a run takes long
                args.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return int(any(run["mismatches"] for run in runs))


def _summary(
    num_samples: int, noise: str, apart: int, rounds: Sequence[Mapping[str, Answered]], comparison: Comparison
) -> dict[str, Any]:
    def ratios(name: str, other: str) -> list[float]:
        return spread([each[name].tokens_per_s / each[other].tokens_per_s for each in rounds], 3)

    def by_cpu_time(name: str, other: str) -> list[float]:
        return spread([each[name].tokens_per_cpu_s / each[other].tokens_per_cpu_s for each in rounds], 3)

    return {
        "samples": num_samples,
        "noise": noise,
        "apart": apart,
        "compared_tokens": comparison.num_tokens,
        "mismatches": comparison.num_mismatches,
        "rows": [
            {
                "drafts": name,
                "tokens_per_pass": spread([each[name].tokens_per_pass for each in rounds], 3),
                "steps": spread([each[name].steps for each in rounds], 0),
                "tokens_per_s": spread([each[name].tokens_per_s for each in rounds], 1),
                "over_off": ratios(name, OFF),
                "over_off_by_cpu_time": by_cpu_time(name, OFF),
                "drafted_per_pass": spread([each[name].drafted / each[name].passes for each in rounds], 3),
                "live_per_accepted": spread(
                    [each[name].accepted_live / max(1, each[name].accepted) for each in rounds], 3
                ),
            }
            for name in NAMES
        ],
        "live_over_alone": ratios(LIVE, ALONE),
        "live_over_alone_by_cpu_time": by_cpu_time(LIVE, ALONE),
        "live_over_alone_per_pass": spread(
            [each[LIVE_CHEAP].tokens_per_pass / each[ALONE_CHEAP].tokens_per_pass for each in rounds], 3
        ),
    }


def _print(run: dict[str, Any]) -> None:
    print(f"\n{run['samples']} samples, {run['apart']} passes apart, noise {run['noise']}: "
          f"{run['compared_tokens']} tokens compared, {run['mismatches']} mismatches; "
          "medians (least ... most) over rounds")  # fmt: skip
    titles = ("drafts", "tokens a pass", "steps", "over off", "by CPU time", "tokens/s", "drafted", "accepted: live")
    print(" ".join(f"{title:>22}" for title in titles))
    for row in run["rows"]:
        cells = (
            row["drafts"],
            spread_text(row["tokens_per_pass"]),
            spread_text(row["steps"], 0),
            spread_text(row["over_off"]),
            spread_text(row["over_off_by_cpu_time"]),
            spread_text(row["tokens_per_s"], 1),
            f"{row['drafted_per_pass'][0]:.2f}",
            f"{row['live_per_accepted'][0]:.2f}",
        )
        print(" ".join(f"{cell:>22}" for cell in cells))
    print(f"{LIVE} over {ALONE}: {spread_text(run['live_over_alone'], 3)}; by CPU time "
          f"{spread_text(run['live_over_alone_by_cpu_time'], 3)}; tokens a pass, cheap: "
          f"{spread_text(run['live_over_alone_per_pass'], 3)}", flush=True)  # fmt: skip


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siblings", description=(__doc__ or "").split("\n")[0])
    add_model(parser)
    add = parser.add_argument
    add("--samples", type=_numbers, default=[4, 16, 64], help="of each prompt, together (default: 4,16,64)")
    add("--apart", type=int, default=8, help="passes between two samples (default: %(default)s)")
    add("--prompts", type=int, default=2, help="of a round (default: %(default)s)")
    add("--max-tokens", type=int, default=128, help="of each sample (default: %(default)s)")
    add("--prompt-tokens", type=int, default=320, help="prompts are cut to (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.7, help="(default: %(default)s)")
    add("--top-p", type=float, default=0.9, help="(default: %(default)s)")
    add("--num-speculative-tokens", type=int, default=16)
    add("--price", type=float, default=0.05, help="of a drafted token where it is low (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--out", type=Path, help="also write the JSON line to this file")
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    args = parser.parse_args(argv)
    if min(args.prompts, args.max_tokens, args.prompt_tokens, args.rounds, *args.samples) < 1:
        parser.error("--samples, --prompts, --max-tokens, --prompt-tokens and --rounds take numbers from 1")
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
