"""What do coupled rollouts save in training by reinforcement, and does the reward stay what it was?

``python -m benchmarks.rollouts [--seeds N] [--epochs N] [--json] [--out FILE]``

GRPO of TRL trains the bundled model on pieces of the standard library to be continued; the reward is 1 where the
answer returns something. For each seed once with speculation off, each sample drawn with noise of its own, as anybody
would; once with coupled rollouts (`ssd.integrations.trl`). With the first seed also: speculation off with the noise of
the coupled run, which must give its answers token for token, and drafts without coupled noise. By epoch: passes, time
of generating (prompts included, taking weights over and training not) and CPU time of it, and the reward; then that of
the trained model with noise it was not trained with. The last line of stdout is one JSON object.
Exit status 1 where the coupled run's answers are not those of its noise without speculation.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.environment import head, model_name
from benchmarks.models import add_model
from benchmarks.rollouts.training import COUPLED, FRESH, OFF, SAME_NOISE_OFF, Plan, Run, train


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = _parse(argv)
    warnings.simplefilter("ignore")  # TRL's and transformers' of each other
    plan = Plan(
        model=str(args.model),
        prompts=args.prompts,
        epochs=args.epochs,
        num_generations=args.num_generations,
        prompts_per_step=args.prompts_per_step,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        slots=args.slots,
    )
    print(f"rollouts: {json.dumps({**asdict(plan), 'model': model_name(args.model)})}", flush=True)
    runs: dict[str, list[Run]] = {OFF: [], COUPLED: [], SAME_NOISE_OFF: [], FRESH: []}
    for seed in range(args.seeds):
        for contender in (OFF, COUPLED) if seed else runs:
            runs[contender].append(train(plan, contender, seed))
            _print(contender, runs[contender][-1], args.epochs)
        result = _result(plan, model_name(args.model), runs)
        if args.out is not None:  # after each seed: a run that is stopped leaves what it has
            args.out.write_text(json.dumps(result) + "\n")
    is_same = result["same_answers_without_speculation"]
    print(f"\ncoupled over {OFF}, by epoch and in all: {json.dumps(result['over_off'])}; answers without speculation "
          f"{'are the same' if is_same else 'DIFFER'}")  # fmt: skip
    print(json.dumps(result))
    return int(not is_same)


def _result(plan: Plan, model: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """What is kept of all runs so far."""
    off, coupled = runs[OFF], runs[COUPLED]
    epochs = [*range(plan.epochs), None]
    return {
        **head("rollouts"),
        "model": model,
        "threads": torch.get_num_threads(),
        "parameters": {**asdict(plan), "model": model, "seeds": len(off)},
        "contenders": {contender: summarised(found, plan.epochs) for contender, found in runs.items()},
        "over_off": {
            key: [_ratio(off, coupled, key, epoch) for epoch in epochs]
            for key in ("passes", "row_passes", "seconds", "cpu_s")
        },
        "same_answers_without_speculation": coupled[0].completions == runs[SAME_NOISE_OFF][0].completions,
    }


def summarised(runs: Sequence[Run], epochs: int) -> dict[str, Any]:
    """Of one contender: rewards by epoch, a list a run, and what generating took, medians over runs of each epoch."""
    return {
        "rewards": [[round(run.reward(epoch), 3) for epoch in range(epochs)] for run in runs],
        "rewards_after": [round(run.reward_after, 3) for run in runs],
        "training_s": [round(run.training_s, 1) for run in runs],
        "loading_s": round(median(step.loading_s for run in runs for step in run.steps), 4),
        **{
            key: [round(median(_of(run, key, epoch) for run in runs), 3) for epoch in range(epochs)]
            for key in ("passes", "row_passes", "tokens", "seconds", "cpu_s")
        },
    }


def _of(run: Run, key: str, epoch: int | None) -> float:
    """The sum over an epoch, or over all."""
    return float(sum(getattr(step, key) for step in run.steps if epoch in (None, step.epoch)))


def _ratio(off: Sequence[Run], coupled: Sequence[Run], key: str, epoch: int | None) -> list[float]:
    """How many times less per token: median, least and most over seeds."""
    ratios = [
        (_of(one, key, epoch) / _of(one, "tokens", epoch)) / (_of(other, key, epoch) / _of(other, "tokens", epoch))
        for one, other in zip(off, coupled, strict=True)
    ]
    return [round(value, 3) for value in (median(ratios), min(ratios), max(ratios))]


def _print(contender: str, run: Run, epochs: int) -> None:
    parts = [
        f"{_of(run, 'passes', epoch):.0f} passes, {_of(run, 'row_passes', epoch):.0f} by row, "
        f"{_of(run, 'seconds', epoch):.1f} s, reward {run.reward(epoch):.3f}"
        for epoch in range(epochs)
    ]
    rest = run.training_s - sum(step.seconds for step in run.steps)
    print(f"seed {run.seed}, {contender}: {'; '.join(parts)}; after {run.reward_after:.3f}; the rest of training "
          f"{rest:.1f} s", flush=True)  # fmt: skip


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=(__doc__ or "").split("\n")[0])
    add_model(parser)
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="runs of each contender (default: %(default)s)")
    add("--epochs", type=int, default=3, help="(default: %(default)s)")
    add("--prompts", type=int, default=8, help="of an epoch (default: %(default)s)")
    add("--num-generations", type=int, default=8, help="samples of a prompt (default: %(default)s)")
    add("--prompts-per-step", type=int, default=2, help="(default: %(default)s)")
    add("--max-tokens", type=int, default=32, help="of a sample (default: %(default)s)")
    add("--temperature", type=float, default=0.7, help="(default: %(default)s)")
    add("--learning-rate", type=float, default=1e-5, help="(default: %(default)s)")
    add("--slots", type=int, default=8, help="samples generated at once (default: %(default)s)")
    add("--out", type=Path, help="also write the JSON line to this file")
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    args = parser.parse_args(argv)
    if min(args.seeds, args.epochs, args.prompts, args.num_generations, args.prompts_per_step, args.max_tokens) < 1:
        parser.error("numbers of seeds, epochs, prompts, samples and tokens are from 1")
    if any(find_spec(name) is None for name in ("trl", "datasets")):
        parser.error("TRL is not installed: pip install 'ssd-serving[trl]'")
    return args
