"""What a replay of a log cannot know, in sentences for its reader."""

from __future__ import annotations

from typing import Final

from cache_builder.evaluation.log import Log
from cache_builder.evaluation.plan import Plan
from cache_builder.replay.step_costs import StepCosts

_FEW_TOKENS: Final = 20_000


def unknown(log: Log, plan: Plan, costs: StepCosts, *, num_without_prompt: int) -> list[str]:
    """Those that hold for this evaluation, the weightiest first."""
    found = [
        "Traffic to come: the figures hold for requests like these, in this order. They are expected values, and no "
        "promise.",
        "Sampling: each output is taken to be what the model says. At a temperature above 0 it may say something else "
        "to the same prompt another time; a log that holds several samples of a prompt shows by how much.",
        "Time to the first token: the speed-up is that of output tokens. Computing prompts takes what it takes without "
        "drafts.",
    ]
    if costs.overhead is None:
        found.append(
            "The engine's own part: what it spends beside its passes and drafts from the model's second choices "
            "(which helps where text is new), were not measured, see --measure. Draft heads and draft models are left "
            "out."
        )
    else:
        found.append("Draft heads and draft models: they are left out, drafts are taken from what was said before.")
    if plan.batch > 1:
        found.append(
            f"A batch of {plan.batch}: all of its sequences are taken to draft alike, and to learn from one another "
            "only when they end. Where drafts differ in length, the shorter ones are padded, and pay less."
        )
    else:
        found.append(
            "Load: sequences are taken to be decoded one at a time. Beside others drafts gain less, see --batch; and "
            "requests that run at the same time cannot learn from each other's end."
        )
    if plan.cache == "growing":
        found.append(
            "The time of day: each request is taken to find all earlier ones learned. Replicas that share are taken to "
            "do so at once; those that do not get requests at random."
        )
    if num_without_prompt:
        found.append(
            f"Outputs without their prompts: {num_without_prompt:,} were learned from and not decoded, for a draft has "
            "to see what was asked. Give requests and responses together where you have both."
        )
    if log.output_lengths[log.with_prompt].sum() < _FEW_TOKENS:
        found.append(
            "The long run: the log is short, and its beginning, with an empty cache, weighs more than it will."
        )
    return found
