"""Questions whose right answer was computed before, without speculation and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.exactness import TIE_MARGIN
from benchmarks.faults.processes import Server

_LONGEST_TOKEN = 16  # characters

PROMPTS = (
    "import os\n",
    "def read_lines(path):\n",
    "class Connection:\n    def close(self):\n",
    "for name, value in options.items():\n    ",
    "# A queue for several threads\nclass Queue:\n",
    "def test_an_empty_list():\n    assert ",
    "try:\n    import json\nexcept ImportError:\n",
    "SELECT name FROM users WHERE ",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A request's body and what it must be answered with.

    ``ties`` : where the two best tokens of a greedy answer score almost the same, as offsets into its text; passes of
    different width may part there (``benchmarks/exactness.py``), and their texts there or a token's length later.
    """

    body: dict[str, Any]
    text: str
    finish_reason: str
    ties: frozenset[int]

    def judge(self, text: str, finish_reason: str) -> str:
        """ "right", "tie" or "changed"."""
        if (text, finish_reason) == (self.text, self.finish_reason):
            return "right"
        first = next((i for i, (a, b) in enumerate(zip(text, self.text, strict=False)) if a != b), len(self.text))
        return "tie" if any(offset <= first < offset + _LONGEST_TOKEN for offset in self.ties) else "changed"


def ask_all(server: Server, num_tokens: int, seeds: Sequence[int]) -> list[Question]:
    """Every prompt greedily and with each seed, answered by a server that does not speculate."""
    questions = []
    for prompt in PROMPTS:
        bodies: list[dict[str, Any]] = [
            {"temperature": 0},
            *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in seeds),
        ]
        for fields in bodies:
            body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **fields}
            choice = server.post({**body, "logprobs": 2})["choices"][0]
            ties = _ties(choice["logprobs"]) if fields["temperature"] == 0 else frozenset()
            questions.append(Question(body, choice["text"], choice["finish_reason"], ties))
    return questions


def _ties(logprobs: dict[str, Any]) -> frozenset[int]:
    best = [sorted(at.values(), reverse=True) for at in logprobs["top_logprobs"]]
    close = [len(scores) > 1 and scores[0] - scores[1] < TIE_MARGIN for scores in best]
    first = logprobs["text_offset"][0]
    return frozenset(offset - first for offset, is_tie in zip(logprobs["text_offset"], close, strict=True) if is_tie)
