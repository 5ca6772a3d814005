"""Drafters of trees for tests: right, wrong and absurd ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from ssd.drafting.protocol import Draft, DraftOutcome, DraftRequest, NoDrafter, ScoredPass

NUM_TOKENS = 6
"""Small, so that equal siblings and accepted tokens are common."""


@st.composite
def trees(draw: st.DrawFn, max_size: int = 12, num_tokens: int = NUM_TOKENS) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree; siblings may be equal."""
    size = draw(st.integers(0, max_size))
    tokens = draw(st.lists(st.integers(0, num_tokens - 1), min_size=size, max_size=size))
    return tokens, [draw(st.integers(-1, token - 1)) for token in range(size)]


class BranchingDrafter(NoDrafter):
    """Knows each prompt's answer and hides it in a random tree: parts of it on some branches, noise on all others.

    ``shape`` : "random"; "wide", all behind the root; "deep", one chain; "same", one token everywhere.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, *, seed: int = 0, shape: str = "random"
    ) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._shape = shape
        self.paths: list[tuple[Draft, int]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A tree, or a chain where the request takes no trees."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        random, size = self._random, int(self._random.integers(0, max(0, request.limit) + 1))
        prompt = tuple(request.context[: request.prompt_length].tolist())
        rest = list(self._answers.get(prompt, ()))[len(request.context) - request.prompt_length :]
        tokens, parents, depth = np.zeros(size, np.int32), np.zeros(size, np.int32), [0]
        repeated = int(random.integers(self._vocab_size))
        for i in range(size):
            parent = {"wide": -1, "deep": i - 1}.get(self._shape, int(random.integers(-1, i)))
            if not request.allow_tree:
                parent = i - 1
            at = depth[parent + 1]
            token = int(random.integers(self._vocab_size))
            if at < len(rest) and random.random() < 0.7:
                token = rest[at]
            if self._shape == "same":
                token = repeated if random.random() < 0.5 or at >= len(rest) else rest[0]
            depth.append(at + 1)
            tokens[i], parents[i] = token, parent
        return Draft(tokens, source="branching", parents=parents if request.allow_tree else None)

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        """Keeps what was said of it."""
        self.paths += [(outcome.draft, outcome.num_accepted) for outcome in outcomes]
