"""What a pass takes by its width, measured: the target verifies what it says itself, several tokens at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.model.target import Target


def decode(target: Target, prompt: Sequence[int], num_tokens: int) -> npt.NDArray[np.int64]:
    """int64[num_tokens], the last token of the prompt and what follows it greedily, end of text or not.

    Slot 0 then holds the prompt but for that token.
    """
    target.prefill([0], np.array([prompt[:-1]], np.int64), [len(prompt) - 1])
    tokens = [prompt[-1]]
    while len(tokens) < num_tokens:
        logits = target.forward([0], np.array([tokens[-1:]], np.int64), [1]).logits
        tokens.append(int(logits[0, 0].argmax()))
    target.rollback(0, len(prompt) - 1)
    return np.array(tokens, np.int64)


def time_rounds(
    target: Target, text: npt.NDArray[np.int64], widths: Sequence[int], rounds: int
) -> tuple[npt.NDArray[np.float64], list[tuple[int, float]]]:
    """float64[rounds, widths], seconds of passes over the first so many tokens of ``text``, which `decode` gave.

    A round times every width once, in random order, so that a machine that slows down slows all. A pass ends when the
    target's tokens are on the host.

    Also returns every choice that was not that of single steps: the width of its pass, and by how much its score led.
    """
    begin = target.length(0)
    random = np.random.default_rng(0)
    seconds = np.zeros((rounds + 1, len(widths)))
    others: list[tuple[int, float]] = []
    for number in range(rounds + 1):
        for column in random.permutation(len(widths)):
            width = widths[column]
            began = time.perf_counter()
            logits = target.forward([0], text[None, :width], [width]).logits
            chosen = logits[0].argmax(-1).cpu().numpy()
            seconds[number, column] = time.perf_counter() - began
            target.rollback(0, begin)
            for position in np.flatnonzero(chosen != text[1 : width + 1]):
                scores = logits[0, position].float()
                others.append((width, float(scores.max() - scores[int(text[position + 1])])))
    return seconds[1:], others  # the first round allocates
