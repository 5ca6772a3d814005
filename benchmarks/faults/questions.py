"""Questions whose right answer was computed before, without speculation and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.processes import Server

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
    """A request's body and what it must be answered with."""

    body: dict[str, Any]
    text: str
    finish_reason: str

    def judge(self, text: str, finish_reason: str) -> str:
        """ "right" or "changed"."""
        return "right" if (text, finish_reason) == (self.text, self.finish_reason) else "changed"


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
            choice = server.post(body)["choices"][0]
            questions.append(Question(body, choice["text"], choice["finish_reason"]))
    return questions
