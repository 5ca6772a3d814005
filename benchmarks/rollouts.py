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

import copy
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.environment import model_name
from benchmarks.run import Option, Run, spread
from benchmarks.workloads import snippets
from ssd.config import DraftConfig, EngineConfig
from ssd.integrations.trl import Rollouts

OFF = "speculation off"
SAME_NOISE_OFF = "speculation off, coupled noise"
COUPLED = "coupled"
FRESH = "drafts, fresh noise"

_RETURN = re.compile(r"^\s+return\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all runs share."""

    model: str
    prompts: int
    epochs: int
    num_generations: int
    prompts_per_step: int
    max_tokens: int
    temperature: float
    learning_rate: float
    slots: int


@dataclass(slots=True)
class Step:
    """Generating for one step of training."""

    epoch: int
    passes: int
    row_passes: int
    tokens: int
    seconds: float
    cpu_s: float
    loading_s: float
    reward: float


@dataclass(slots=True)
class Training:
    """One training. ``reward_after`` : of the trained model, on the same prompts with noise it was not trained with."""

    seed: int
    steps: list[Step] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    reward_after: float = 0.0
    training_s: float = 0.0

    def reward(self, epoch: int) -> float:
        """Mean of an epoch."""
        return fmean(step.reward for step in self.steps if step.epoch == epoch)


def returns(completions: list[str], **_: Any) -> list[float]:
    """The task: 1 for code in which something is returned, 0 for other code."""
    return [float(_RETURN.search(completion) is not None) for completion in completions]


def train(plan: Plan, contender: str, seed: int) -> Training:
    """Train a fresh copy of the model by ``contender``'s rollouts."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # that rollout_func may change
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    run = Training(seed)
    rows = Dataset.from_list([{"prompt": text} for text in snippets(0, min_lines=6, max_lines=8)[: plan.prompts]])
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    batch = plan.prompts_per_step * plan.num_generations
    is_off = contender in (OFF, SAME_NOISE_OFF)
    with (
        tempfile.TemporaryDirectory() as directory,
        Rollouts(
            config=EngineConfig(max_num_seqs=plan.slots, max_model_len=512),
            draft=DraftConfig(num_speculative_tokens=0) if is_off else DraftConfig(),
            coupled=contender in (COUPLED, SAME_NOISE_OFF),
        ) as rollouts,
    ):

        def measured(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
            before, cpu = copy.copy(rollouts.totals), time.process_time()
            output = rollouts(prompts, trainer)
            after = rollouts.totals
            if trainer.model.training:
                run.completions += output["completion_ids"]
                run.steps.append(
                    Step(
                        epoch=int((trainer.state.epoch or 0.0) + 1e-6),
                        passes=after.passes - before.passes,
                        row_passes=after.row_passes - before.row_passes,
                        tokens=after.tokens - before.tokens,
                        seconds=after.generating_s - before.generating_s,
                        cpu_s=time.process_time() - cpu,
                        loading_s=after.loading_s - before.loading_s,
                        reward=0.0,
                    )
                )
            return output

        trainer = GRPOTrainer(
            model,
            reward_funcs=returns,
            args=GRPOConfig(
                output_dir=directory,
                seed=seed,
                num_train_epochs=plan.epochs,
                per_device_train_batch_size=batch,
                per_device_eval_batch_size=plan.prompts * plan.num_generations,
                num_generations=plan.num_generations,
                max_completion_length=plan.max_tokens,
                temperature=plan.temperature,
                learning_rate=plan.learning_rate,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(plan.model),
            rollout_func=measured,
        )
        rollouts.open(trainer)  # no part of generating
        began = time.perf_counter()
        trainer.train()
        run.training_s = time.perf_counter() - began
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        for step, reward in zip(run.steps, rewards, strict=True):
            step.reward = reward
        run.reward_after = trainer.evaluate()["eval_reward"]
    return run


OPTIONS = {
    "seeds": Option(default=5, help="runs of each contender"),
    "epochs": 3,
    "prompts": Option(default=8, help="of an epoch"),
    "num_generations": Option(default=8, help="samples of a prompt"),
    "prompts_per_step": 2,
    "max_tokens": Option(default=32, help="of a sample"),
    "temperature": 0.7,
    "learning_rate": 1e-5,
    "slots": Option(default=8, help="samples generated at once"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    run = Run("rollouts", __doc__, argv, OPTIONS, has_model=True)
    args = run.args
    if any(find_spec(name) is None for name in ("trl", "datasets")):
        run.parser.error("TRL is not installed: pip install 'ssd-serving[trl]'")
    warnings.simplefilter("ignore")  # TRL's and transformers' of each other
    plan = Plan(model=str(args.model), **{name: getattr(args, name) for name in OPTIONS if name != "seeds"})
    run.parameters |= {"model": model_name(args.model)}
    runs: dict[str, list[Training]] = {OFF: [], COUPLED: [], SAME_NOISE_OFF: [], FRESH: []}
    for seed in range(args.seeds):
        for contender in (OFF, COUPLED) if seed else runs:
            runs[contender].append(train(plan, contender, seed))
            run.say(_line(contender, runs[contender][-1], args.epochs))
    found = _result(plan, runs)
    facts: dict[str, Any] = {"model": model_name(args.model), "threads": torch.get_num_threads()}
    return run.end(**facts, **found, is_wrong=not found["same_answers_without_speculation"])


def _result(plan: Plan, runs: Mapping[str, Sequence[Training]]) -> dict[str, Any]:
    """What is kept of all runs."""
    off, coupled = runs[OFF], runs[COUPLED]
    epochs = [*range(plan.epochs), None]
    return {
        "contenders": {contender: summarised(found, plan.epochs) for contender, found in runs.items()},
        "over_off": {
            key: [_ratio(off, coupled, key, epoch) for epoch in epochs]
            for key in ("passes", "row_passes", "seconds", "cpu_s")
        },
        "same_answers_without_speculation": coupled[0].completions == runs[SAME_NOISE_OFF][0].completions,
    }


def summarised(runs: Sequence[Training], epochs: int) -> dict[str, Any]:
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


def _of(run: Training, key: str, epoch: int | None) -> float:
    """The sum over an epoch, or over all."""
    return float(sum(getattr(step, key) for step in run.steps if epoch in (None, step.epoch)))


def _ratio(off: Sequence[Training], coupled: Sequence[Training], key: str, epoch: int | None) -> list[float]:
    """How many times less per token: median, least and most over seeds."""
    ratios = [
        (_of(one, key, epoch) / _of(one, "tokens", epoch)) / (_of(other, key, epoch) / _of(other, "tokens", epoch))
        for one, other in zip(off, coupled, strict=True)
    ]
    return spread(ratios)


def _line(contender: str, run: Training, epochs: int) -> str:
    parts = [
        f"{_of(run, 'passes', epoch):.0f} passes, {_of(run, 'row_passes', epoch):.0f} by row, "
        f"{_of(run, 'seconds', epoch):.1f} s, reward {run.reward(epoch):.3f}"
        for epoch in range(epochs)
    ]
    rest = run.training_s - sum(step.seconds for step in run.steps)
    return (
        f"seed {run.seed}, {contender}: {'; '.join(parts)}; after {run.reward_after:.3f}; "
        f"the rest of training {rest:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
