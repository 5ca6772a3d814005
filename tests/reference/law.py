"""The exact law of an output: one token after the other."""

from __future__ import annotations

from collections.abc import Callable

Law = dict[int, float]
"""Probability of each token; those left out have none."""
LawAfter = Callable[[tuple[int, ...]], Law]
"""The law of the next token after some output."""


def plain_law(target: LawAfter, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``length`` tokens, one token after the other."""
    outputs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        outputs = {
            (*output, token): reached * chance
            for output, reached in outputs.items()
            for token, chance in target(output).items()
        }
    return outputs
