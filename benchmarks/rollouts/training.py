"""One training run: the bundled model, GRPO of TRL, and a task whose answers can be checked."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
class Run:
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


def train(plan: Plan, contender: str, seed: int) -> Run:
    """Train a fresh copy of the model by ``contender``'s rollouts."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # that rollout_func may change
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    run = Run(seed)
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
