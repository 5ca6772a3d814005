"""How many tokens the noise should depend on: how far the answers to near-variants agree, and what that saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from benchmarks.coupled.contenders import COUPLED, OFF, Contenders, Question, Sampling
from benchmarks.coupled.variants import near_variant
from benchmarks.coupled.workloads import Plan, fitting
from benchmarks.sources.rounds import Tally

Answers = Sequence[list[int]]

NOT_COUPLED = 0
"""Stands for a window where every answer is drawn with noise of its own."""


def same_place(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of places at which two answers have the same token."""
    longest = max(len(first), len(second))
    return sum(a == b for a, b in zip(first, second, strict=False)) / longest if longest else 1.0


def common_prefix(first: Sequence[int], second: Sequence[int]) -> float:
    """Tokens before two answers part."""
    pairs = enumerate(zip(first, second, strict=False))
    return float(next((place for place, (a, b) in pairs if a != b), min(len(first), len(second))))


def aligned(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of the tokens of two answers in blocks of at least four that both have in the same order (Ratcliff and
    Obershelp's longest matching blocks): what a drafter that finds its place again can propose.
    """
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    total = len(first) + len(second)
    return 2 * sum(block.size for block in blocks if block.size >= 4) / total if total else 1.0


MEASURES: Mapping[str, Callable[[Sequence[int], Sequence[int]], float]] = {
    "same_place": same_place,
    "common_prefix": common_prefix,
    "aligned": aligned,
}


class Pairs:
    """Prompts and their near-variants, asked of several streams, stream by stream; the same for every window."""

    def __init__(self, contenders: Contenders, plan: Plan, num_streams: int) -> None:
        random = np.random.default_rng([plan.seed, 3])
        texts = fitting(contenders, plan)
        self.num_texts = len(texts)
        variants = [near_variant(text, random) for text in texts]
        encode, size = contenders.codec.encode_prompt, len(texts) * num_streams
        self.prompts, self.variants = (
            [
                Question(encode(text), stream, first + stream * len(texts) + place)
                for stream in range(num_streams)
                for place, text in enumerate(each)
            ]
            for first, each in ((0, texts), (size, variants))
        )


def measure(contenders: Contenders, pairs: Pairs, sampling: Sampling, *, is_coupled: bool) -> dict[str, Any]:
    """A row of the result: agreement without any drafting, and tokens a pass where the prompts were answered before,
    which is of the first stream alone: it takes most of the time.
    """
    with contenders.scene(f"windows-{sampling.temperature}"):
        first, second = (
            contenders.ask_all(OFF, each, sampling, is_coupled=is_coupled) for each in (pairs.prompts, pairs.variants)
        )
        contenders.ask_all(COUPLED, pairs.prompts[: pairs.num_texts], sampling, is_coupled=is_coupled)
        tally = Tally()
        for question, want in zip(pairs.variants[: pairs.num_texts], second, strict=False):
            got = contenders.ask(COUPLED, question, sampling, tally, is_coupled=is_coupled)
            contenders.compare(question, sampling, got, want, is_coupled=is_coupled)
    return {**agreement(first, second), "tokens_per_pass": round(tally.tokens_per_pass, 3)}


def agreement(first: Answers, second: Answers) -> dict[str, list[float]]:
    """Of pairs of answers: each measure's mean and its standard error."""
    found = {}
    for name, measured in MEASURES.items():
        values = np.array([measured(a, b) for a, b in zip(first, second, strict=True)])
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
        found[name] = [round(float(values.mean()), 4), round(float(error), 4)]
    return found
