"""Slow twins of speculative sampling: one number at a time, and the exact law of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Law = dict[int, float]
"""Probability of each token; those left out have none."""
LawAfter = Callable[[tuple[int, ...]], Law]
"""The law of the next token after some output."""


def acceptance_chance(target: Law, draft: Law, token: int) -> float:
    """min(1, target / draft)."""
    return min(1.0, target.get(token, 0.0) / draft[token])


def residual(target: Law, draft: Law) -> Law:
    """norm(max(0, target - draft))."""
    left = {token: max(0.0, chance - draft.get(token, 0.0)) for token, chance in target.items()}
    total = sum(left.values())
    return {token: chance / total for token, chance in left.items() if chance > 0} if total else {}


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


def speculative_law(
    target: LawAfter,
    draft: LawAfter,
    length: int,
    limits: Sequence[int],
    accept: Callable[[Law, Law, int], float],
    recover: Callable[[Law, Law], Law],
) -> dict[tuple[int, ...], float]:
    """The same where tokens come in rounds of draft, test and recovery, each round followed to every end it can have.

    limits : draft tokens of the round that begins after 0, 1, ... tokens. What a round puts out beyond ``length`` is
    cut off.
    """
    outputs: dict[tuple[int, ...], float] = {}

    def follow(output: tuple[int, ...], reached: float, left: int) -> None:
        """One more token of the round, of which ``left`` draft tokens are still to come."""
        if reached == 0.0:
            return
        if len(output) >= length:
            outputs[output[:length]] = outputs.get(output[:length], 0.0) + reached
        elif left == 0:
            for token, chance in target(output).items():
                begin((*output, token), reached * chance)
        else:
            for token, drawn in draft(output).items():
                accepted = accept(target(output), draft(output), token)
                follow((*output, token), reached * drawn * accepted, left - 1)
                if accepted < 1.0:
                    for other, chance in recover(target(output), draft(output)).items():
                        begin((*output, other), reached * drawn * (1.0 - accepted) * chance)

    def begin(output: tuple[int, ...], reached: float) -> None:
        follow(output, reached, limits[len(output)] if len(output) < length else 0)

    begin((), 1.0)
    return outputs
