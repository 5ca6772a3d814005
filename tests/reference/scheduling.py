"""Slow twins of the scheduler: one request at a time, one token at a time, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from ssd.config import SamplingParams
from tests.reference.noise import key_of
from tests.reference.target import token_at


@torch.inference_mode()
def plain_decode(
    model: torch.nn.Module,
    prompt: Sequence[int],
    sampling: SamplingParams,
    choice_index: int = 0,
    eos: int = -1,
    key_after: Callable[[Sequence[int]], int] | None = None,
) -> list[int]:
    """The output of one request alone, without any cache; ``sampling`` needs ``max_tokens`` and, if drawn, a seed.

    ``key_after`` : of the noise after a text; None for that of the seed.
    """
    context = list(prompt)
    for _ in range(sampling.max_tokens or 0):
        logits = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1].tolist()
        key = key_of(sampling.seed or 0, choice_index, len(context)) if key_after is None else key_after(context)
        context.append(token_at(logits, sampling, key))
        if context[-1] == eos:
            break
    return context[len(prompt) :]


class Ageing:
    """Who runs, found anew at every step: a request's priority less what it has gained by waiting, then its arrival.

    ``waiting`` and ``running`` hold (priority, step of arrival, number); what a running one gains, it keeps gaining.
    """

    def __init__(self, num_slots: int, ageing_steps: int) -> None:
        self.waiting: set[tuple[int, int, int]] = set()
        self.running: set[tuple[int, int, int]] = set()
        self.num_slots, self.ageing_steps, self.now = num_slots, ageing_steps, 0

    def step(self) -> None:
        """Fill slots and swap until nobody has a better claim than one who runs."""
        while self.waiting:
            first = min(self.waiting, key=self._aged)
            if len(self.running) == self.num_slots:
                later = [r for r in self.running if r[0] > first[0] and self._aged(r) > self._aged(first)]
                if not later:
                    break
                victim = max(later, key=self._aged)
                self.running.remove(victim)
                self.waiting.add(victim)
            self.waiting.remove(first)
            self.running.add(first)
        self.now += 1

    def _aged(self, request: tuple[int, int, int]) -> tuple[Fraction, int]:
        priority, arrived, number = request
        return priority - Fraction(self.now - arrived, self.ageing_steps), number


class TakingTurns:
    """Who runs among tenants, found anew each time: of those who wait and may run more, the one served longest ago.

    ``waiting`` holds (tenant, number) in order of arrival; ``served`` what ``clock`` said when a tenant began to wait,
    or was given a slot last.
    """

    def __init__(self, num_slots: int, most: dict[str, int]) -> None:
        self.waiting: list[tuple[str, int]] = []
        self.running: list[tuple[str, int]] = []
        self.served: dict[str, int] = {}
        self.num_slots, self.most, self.clock = num_slots, most, 0

    def arrive(self, tenant: str, number: int) -> None:
        """One more waits."""
        if all(waiting != tenant for waiting, _ in self.waiting):
            self.clock += 1
            self.served[tenant] = self.clock
        self.waiting.append((tenant, number))

    def step(self) -> None:
        """Fill the slots."""
        while len(self.running) < self.num_slots:
            free = [t for t, _ in self.waiting if sum(r == t for r, _ in self.running) < self.most[t]]
            if not free:
                return
            tenant = min(free, key=self.served.__getitem__)
            first = next(each for each in self.waiting if each[0] == tenant)
            self.waiting.remove(first)
            self.running.append(first)
            self.clock += 1
            self.served[tenant] = self.clock
