"""Coupled noise leaves every request the model's law: whole texts, counted against the probabilities of all of them.

A model of three tokens is a table of logits for every text. Texts are drawn as the engine draws them, each with a
secret of its own, and Pearson's chi-square compares how often each of all possible texts came with its exact
probability: a right sampler fails with probability 1e-6 a case. Windows of one or two tokens make contexts come again
within a text, which is where a wrong key would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import SamplingRow
from ssd.engine.sequence import secret_of
from ssd.model.sampling.sampler import PassOutput
from ssd.model.sampling.target_tokens import target_tokens
from tests.reference.law import law_of_outputs
from tests.statistics import assert_follows

VOCAB = 3
DRAWS = 6_000
Text = tuple[int, ...]

PLAIN = SamplingParams()
CUT = SamplingParams(temperature=0.7, top_p=0.8)
RULED = SamplingParams(temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias=((0, 0.7),))


@cache
def logits_after(text: Text) -> torch.Tensor:
    """What the model says after ``text``: any numbers, the same each time."""
    random = np.random.default_rng([len(text), *text])
    return torch.from_numpy(random.normal(0, 1.2, VOCAB).astype(np.float32))


def secrets(seed: int, number: int = DRAWS) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 2**64 - 1, number, np.uint64, endpoint=True).tolist()
    return drawn


def coupled(seed: int, window: int, number: int = DRAWS, stream: int = 0) -> list[SequenceNoise]:
    """Noise of fresh secrets; the same secrets for every stream."""
    return [SequenceNoise.coupled(secret, stream, window) for secret in secrets(seed, number)]


def next_tokens(
    noises: Sequence[SequenceNoise], texts: Sequence[Text], num_prompt: int, params: SamplingParams
) -> list[int]:
    """The token after each text, as the engine draws it."""
    rows = []
    for noise, text in zip(noises, texts, strict=True):
        context = np.array(text, np.int32)
        noise.advance(context)
        rows.append(SamplingRow(params=params, noise=noise, context=context, prompt_length=num_prompt))
    logits = torch.stack([logits_after(text) for text in texts])[:, None]
    chosen: list[int] = target_tokens(PassOutput(logits), rows)[:, 0].tolist()
    return chosen


def answers(
    noises: Sequence[SequenceNoise], prompts: Sequence[Text], length: int, params: SamplingParams = PLAIN
) -> list[Text]:
    """``length`` tokens after each prompt; all prompts have as many tokens."""
    texts, num_prompt = list(prompts), len(prompts[0])
    for _ in range(length):
        chosen = next_tokens(noises, texts, num_prompt, params)
        texts = [(*text, token) for text, token in zip(texts, chosen, strict=True)]
    return [text[num_prompt:] for text in texts]


@cache
def law_of(prompt: Text, length: int, params: SamplingParams = PLAIN) -> dict[Text, float]:
    """The exact probability of every answer, by the rules of sampling alone."""
    return law_of_outputs(lambda text: logits_after(text).tolist(), prompt, params, length)


CASES = [
    ((0,), 1, PLAIN),
    ((0, 1, 0, 0, 1), 1, PLAIN),
    ((2, 2, 2, 2), 2, PLAIN),
    ((1, 0, 1, 0, 1, 0), 2, RULED),
    ((0,), 1, CUT),
    ((0,), 64, PLAIN),
]


@pytest.mark.parametrize(("prompt", "window", "params"), CASES, ids=range(len(CASES)))
def test_whole_answers_have_the_models_law(prompt: Text, window: int, params: SamplingParams) -> None:
    number = DRAWS // 3 if params is RULED else DRAWS  # rules are applied row by row
    found = answers(coupled(1, window, number), [prompt] * number, 4, params)
    assert_follows(Counter(found), law_of(prompt, 4, params))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
def test_a_million_tokens_of_a_quarter_million_answers_have_the_models_law(window: int) -> None:
    draws = 250_000
    assert_follows(Counter(answers(coupled(2, window, draws), [(0, 1)] * draws, 4)), law_of((0, 1), 4))


def told(answer: Text) -> Text:
    """What is said to the model after an answer, which depends on it."""
    return (answer[-1], answer[0], (answer[0] + 1) % VOCAB)


def conversations(make: Callable[[int], list[SequenceNoise]]) -> list[Text]:
    """Two turns each, of one secret and one stream, though of two requests: the two answers."""
    first = answers(make(3), [(0, 1)] * DRAWS, 2)
    second = answers(make(3), [(0, 1, *answer, *told(answer)) for answer in first], 2)
    return [one + two for one, two in zip(first, second, strict=True)]


def law_of_conversations() -> dict[Text, float]:
    return {
        one + two: chance * after
        for one, chance in law_of((0, 1), 2).items()
        for two, after in law_of((0, 1, *one, *told(one)), 2).items()
    }


@pytest.mark.parametrize("window", [1, 2])
def test_the_turns_of_a_conversation_in_one_stream_have_the_models_law_together(window: int) -> None:
    assert_follows(Counter(conversations(lambda seed: coupled(seed, window))), law_of_conversations())


class Forgetful(SequenceNoise):
    """Does not count: its keys depend on the last token alone."""

    def advance(self, context: np.ndarray) -> None:
        """Count nothing."""

    def keys(self, context: np.ndarray, *rest: object) -> np.ndarray:
        """As if no token had come before the last."""
        return super().keys(context[-1:])


class BlindToPrompts(SequenceNoise):
    """Counts what was drawn, and not the prompt."""

    def advance(self, context: np.ndarray) -> None:
        """Count what the first call did not tell."""
        if self.num_counted == 0:
            self._record.counted = len(context)
        super().advance(context)


def test_these_tests_tell_noise_that_is_used_twice() -> None:
    """Without the count a context draws the same noise each time it comes; without the prompt's, in each turn."""
    forgetful = [Forgetful.coupled(secret, 0, 1) for secret in secrets(1)]
    found = Counter(answers(forgetful, [(0,)] * DRAWS, 4))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(found, law_of((0,), 4))
    blind = Counter(conversations(lambda seed: [BlindToPrompts.coupled(secret, 0, 1) for secret in secrets(seed)]))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(blind, law_of_conversations())


# -- several streams, several namespaces -------------------------------------------------------------------------------


def product_of(laws: Sequence[dict[Text, float]]) -> dict[tuple[Text, ...], float]:
    """The law of independent texts together."""
    together: dict[tuple[Text, ...], float] = {(): 1.0}
    for law in laws:
        together = {(*texts, text): c * chance for texts, c in together.items() for text, chance in law.items()}
    return together


def test_answers_of_different_streams_are_independent() -> None:
    """Of one secret and one prompt: four streams' first tokens, and two streams' first three."""
    first = [answers(coupled(4, 1, stream=stream), [(0,)] * DRAWS, 1) for stream in (0, 1, 2, (1 << 20) - 1)]
    assert_follows(Counter(zip(*first, strict=True)), product_of([law_of((0,), 1)] * 4))
    longer = [answers(coupled(5, 1, stream=stream), [(0,)] * DRAWS, 3) for stream in (0, 1)]
    assert_follows(Counter(zip(*longer, strict=True)), product_of([law_of((0,), 3)] * 2))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(Counter(zip(longer[0], longer[0], strict=True)), product_of([law_of((0,), 3)] * 2))


def test_answers_in_different_namespaces_are_independent() -> None:
    """Of one root, as it is where replicas share it."""
    random = np.random.default_rng(6)
    roots = [random.bytes(32) for _ in range(DRAWS)]
    found = [
        answers([SequenceNoise.coupled(secret_of(root, name), 0, 1) for root in roots], [(0,)] * DRAWS, 2)
        for name in ("default", "default2")
    ]
    assert_follows(Counter(zip(*found, strict=True)), product_of([law_of((0,), 2)] * 2))
