"""The exact law of an output: one token after the other, by the rules of sampling alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ssd.config import SamplingParams
from tests.reference.target import exact_law, penalised

LogitsAfter = Callable[[tuple[int, ...]], Sequence[float]]


def logits_of(model: torch.nn.Module) -> LogitsAfter:
    """What a model, driven by nobody else, says after a text."""

    @torch.inference_mode()
    def logits_after(text: tuple[int, ...]) -> list[float]:
        found: list[float] = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].tolist()
        return found

    return logits_after


def law_of_outputs(
    logits_after: LogitsAfter, prompt: Sequence[int], params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``length`` tokens after ``prompt``; nothing ends one sooner."""
    outputs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for output, reached in outputs.items():
            scores = penalised(logits_after((*prompt, *output)), params, prompt, output, ())
            for token, chance in enumerate(exact_law(np.array(scores), params)):
                if chance > 0:
                    longer[(*output, token)] = reached * float(chance)
        outputs = longer
    return outputs
