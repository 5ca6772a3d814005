"""lm-eval's local-completions, against its own backend with the same weights: scores and texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from benchmarks.clients.checks import KEY, MODEL, Checks, arguments

SCORED = [
    ("def add(a, b):\n    return", " a + b"), ("import", " os"), ("for i in", " range(10):"), ("x =", " 1"),
    ("class Point:\n    def", " __init__(self, x, y):"), ("if __name__ ==", ' "__main__":'),
    ("try:\n    value = int(text)\nexcept", " ValueError:"), ("with open(path) as", " file:"),
]  # fmt: skip
GENERATED: list[tuple[str, dict[str, Any]]] = [
    ("def add(a, b):\n", {"until": ["\n\n"], "max_gen_toks": 32}),
    ("import os\n", {"until": ["def"], "max_gen_toks": 24}),
    ("class Point:\n", {"until": ["class"], "max_gen_toks": 40}),
]
MOST_APART = 1e-3
"""Sums of log-probabilities in float32, computed in passes of another shape."""


def main() -> int:
    """Returns the exit status."""
    url, path = arguments()
    os.environ["OPENAI_API_KEY"] = KEY
    checks = Checks("lm-eval", "transformers", "torch")
    ours = LocalCompletionsAPI(
        model=MODEL, base_url=f"{url}/completions", tokenizer=path, num_concurrent=4, max_length=2048
    )
    theirs = HFLM(pretrained=path, device="cpu", dtype="float32", batch_size=1)
    scores = [backend.loglikelihood(_instances("loglikelihood", SCORED)) for backend in (ours, theirs)]
    pairs = list(zip(*scores, strict=True))
    checks.see("loglikelihood: the same scores", all(abs(a[0] - b[0]) < MOST_APART for a, b in pairs), pairs)
    checks.see("loglikelihood: the same is greedy", all(bool(a[1]) == bool(b[1]) for a, b in pairs), pairs)
    texts = [backend.generate_until(_instances("generate_until", GENERATED)) for backend in (ours, theirs)]
    checks.see("generate_until: the same texts", texts[0] == texts[1], texts)
    return checks.finish()


def _instances(kind: str, arguments_of: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments_of)]


if __name__ == "__main__":
    sys.exit(main())
