"""Slow twin of the speculator for vLLM's V2 runner: lists, one row at a time, no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ssd.drafting.protocol import DraftRequest
from ssd.retrieval.snapshot import Snapshot
from tests.reference.rows import SlowRowDrafter


class Said(NamedTuple):
    """What a step gave one request."""

    name: str
    new: list[int]


class SlowSpeculator:
    """Texts as they are known, which is ``lag`` steps late."""

    def __init__(self, *, width: int, max_length: int, vocab_size: int, ends: Sequence[int], lag: int) -> None:
        self.rows = SlowRowDrafter(limit=0, max_length=max_length, vocab_size=vocab_size, end_of_text_ids=ends)
        self.width, self.lag = width, lag
        self.known: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.coming: deque[list[Said]] = deque()

    def begin(self, name: str, tokens: Sequence[int], prompt_length: int) -> None:
        """A request of this name, which no other ever had."""
        self.known[name], self.prompts[name] = list(tokens), prompt_length

    def step(
        self, said: list[Said], speaking: Sequence[bool], texts: Mapping[str, list[int]], snapshot: Snapshot, width: int
    ) -> list[tuple[list[int], list[float]]]:
        """A step's new tokens, then of each of its rows a draft and its chances, where there is something to say.

        ``speaking`` : rows whose prompt is computed. ``texts`` : as the device has them. ``width`` : tokens of a draft.
        """
        self.coming.append(said)
        while len(self.coming) > self.lag:
            for name, new in self.coming.popleft():
                if name in self.known:
                    self.known[name] += new
        limit = min(3 * width + 2, 3 * self.width + 2, 128) if self.coming else width
        return [
            self.choose(width, name, texts[name], *self.chain(name, limit, snapshot)) if speaks and width else ([], [])
            for (name, _), speaks in zip(said, speaking, strict=True)
        ]

    def end(self, name: str) -> None:
        """Nothing is drafted for it any more."""
        self.known.pop(name)
        self.rows.drafter.finish(name)

    def chain(self, name: str, limit: int, snapshot: Snapshot) -> tuple[list[int], list[float]]:
        """What is expected after the text that is known."""
        known = self.known[name]
        most = max(0, min(limit, self.rows.max_length - len(known) - 1))
        request = DraftRequest(name, np.array(known, np.int32), self.prompts[name], snapshot, most, np.array([0.02]))
        draft = self.rows.usable(self.rows.drafter.propose([request])[0])
        return draft.token_ids.tolist(), [] if draft.probabilities is None else draft.probabilities.tolist()

    def choose(
        self, width: int, name: str, text: list[int], chain: list[int], chances: list[float]
    ) -> tuple[list[int], list[float]]:
        """The part of the chain that comes after the text."""
        ahead = len(text) - len(self.known[name])
        if chain[:ahead] == text[len(self.known[name]) :]:
            return chain[ahead : ahead + width], chances[ahead : ahead + width]
        places = [at for at in range(2, len(chain) + 1) if chain[at - 2 : at] == text[-2:]]
        if not places:
            return [], []
        at = min(places, key=lambda place: (abs(place - ahead), place))
        found = chances[at : at + width]
        return chain[at : at + width], [0.5 * chance for chance in found[:1]] + found[1:]
