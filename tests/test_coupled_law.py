"""Coupled noise leaves every request the model's law, and what it says is of secret, stream and own text alone.

A model of three tokens is a table of logits for every text. Texts are drawn as the engine draws them, each with a
secret of its own, and Pearson's chi-square compares how often each of all possible texts came with its exact
probability: a right sampler fails with probability 1e-6 a case. Windows of one or two tokens make contexts come again
within a text, which is where a wrong key would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, DraftShape, IndexConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import Draft, DraftRequest, NoDrafter, SamplingContext
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.engine import Engine, Request
from ssd.engine.sequence import namespace_secret
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.sampling.sampler import PassOutput
from ssd.model.sampling.target_tokens import target_tokens
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests.engines import FINGERPRINT, ROOT, ask, make_engine, prompt_of, target_of
from tests.models import tiny_model
from tests.reference import scheduling as slow
from tests.reference.law import law_of_outputs, logits_of
from tests.reference.noise import coupled_key
from tests.statistics import assert_follows
from tests.whole_answers import answers_of

VOCAB = 3
DRAWS = 6_000
LIMIT = 6
Text = tuple[int, ...]

PLAIN = SamplingParams()
CUT = SamplingParams(temperature=0.7, top_p=0.8)
RULED = SamplingParams(temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias=((0, 0.7),))


@cache
def logits_after(text: Text) -> torch.Tensor:
    """What the model says after ``text``: any numbers, the same each time."""
    random = np.random.default_rng([len(text), *text])
    return torch.from_numpy(random.normal(0, 1.2, VOCAB).astype(np.float32))


def coupled(seed: int, window: int, number: int = DRAWS, stream: int = 0) -> list[SequenceNoise]:
    """Noise of fresh secrets; the same secrets for every stream."""
    secrets = np.random.default_rng(seed).integers(0, 2**64 - 1, number, np.uint64, endpoint=True).tolist()
    return [SequenceNoise.coupled(secret, stream, window) for secret in secrets]


def next_tokens(
    noises: Sequence[SequenceNoise], texts: Sequence[Text], num_prompt: int, params: SamplingParams
) -> list[int]:
    """The token after each text, as the engine draws it."""
    rows = []
    for noise, text in zip(noises, texts, strict=True):
        context = np.array(text, np.int32)
        noise.advance(context)
        rows.append(SamplingContext(params=params, noise=noise, context=context, prompt_length=num_prompt))
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


@pytest.mark.parametrize("window", [1, 2])
def test_the_turns_of_a_conversation_in_one_stream_have_the_models_law_together(window: int) -> None:
    """Two turns each, of one secret and one stream, though of two requests: the two answers."""
    first = answers(coupled(3, window), [(0, 1)] * DRAWS, 2)
    second = answers(coupled(3, window), [(0, 1, *answer, *told(answer)) for answer in first], 2)
    law = {
        one + two: chance * after
        for one, chance in law_of((0, 1), 2).items()
        for two, after in law_of((0, 1, *one, *told(one)), 2).items()
    }
    assert_follows(Counter(one + two for one, two in zip(first, second, strict=True)), law)


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


def test_answers_in_different_namespaces_are_independent() -> None:
    """Of one root, as it is where replicas share it."""
    random = np.random.default_rng(6)
    roots = [random.bytes(32) for _ in range(DRAWS)]
    found = [
        answers([SequenceNoise.coupled(namespace_secret(root, name), 0, 1) for root in roots], [(0,)] * DRAWS, 2)
        for name in ("default", "default2")
    ]
    assert_follows(Counter(zip(*found, strict=True)), product_of([law_of((0,), 2)] * 2))


# -- in the engine: of secret, stream and own text alone ---------------------------------------------------------------


def engine_of(drafter: Any = "none", target: Target | None = None, **more: Any) -> Engine:
    settings = {"coupled_streams": 4, "max_waiting": 1 << 16, **more}
    return make_engine(drafter, target or target_of(max_length=128), limit=LIMIT, eos=(), **settings)


def asked_of(name: str, prompt: Sequence[int], stream: int | None = 0, **more: Any) -> Request:
    return ask(name, prompt, noise_stream=stream, **{"temperature": 1.0, **more})


def said(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The output of each request, all asked at once."""
    found = answers_of(engine, requests)
    assert engine.metrics.drafter_failures == 0
    return [answer.token_ids for answer in found]


ALONE = tiny_model()  # never driven by an engine


@cache
def alone(namespace: str, stream: int, prompt: Text, length: int) -> list[int]:
    """The slow twin: one request, one token at a time, without any cache."""
    secret = namespace_secret(ROOT, namespace)
    return slow.plain_decode(
        ALONE, prompt, SamplingParams(max_tokens=length), key_after=lambda text: coupled_key(secret, stream, text, 2)
    )


asked = st.tuples(
    st.sampled_from(["default", "a", "b"]),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([1, 9]),
    st.booleans(),
)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@settings(max_examples=12)
@given(st.lists(asked, min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_nothing_of_one_request_is_seen_in_another(
    shape: DraftShape, script: list[tuple[str, int, int, int, bool]], slots: int, data: st.DataObject
) -> None:
    """Whatever was asked before and beside it, in whatever order, by a cache that is empty, full or overflowing."""
    index = IndexConfig(capacity_tokens=256, flush_tokens=16, merge_fanout=2)
    requests = []
    for number, (namespace, stream, prompt, length, _) in enumerate(script):
        requests.append(asked_of(str(number), prompt_of(prompt, length), stream, namespace=namespace))
    with CacheManager(CacheConfig(index=index), FINGERPRINT, inline=True) as caches:
        engine = engine_of("ssd", target_of(num_slots=slots, max_length=128), caches=caches, shape=shape)
        outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request, (*_, is_cancelled) in zip(requests, script, strict=True):
            engine.submit(request)
            for _ in range(data.draw(st.integers(0, 6))):
                for output in engine.step():
                    outputs[output.request_id] += output.token_ids
            if is_cancelled:
                engine.cancel(request.request_id)
        while engine.has_work():
            for output in engine.step():
                outputs[output.request_id] += output.token_ids
        assert engine.metrics.drafter_failures == 0
    for request, (namespace, stream, prompt, length, is_cancelled) in zip(requests, script, strict=True):
        found, expected = outputs[request.request_id], alone(namespace, stream, prompt_of(prompt, length), 12)
        assert found == expected[: len(found)] and (is_cancelled or len(found) == 12)


def test_who_shares_noise_is_who_asks_for_it() -> None:
    """A seed, greedy sampling, ``coupled`` false, no namespace and no streams: noise of one's own."""
    prompt, seeds = prompt_of(3, 9), iter(range(100))
    engine = engine_of(draw_seed=lambda: next(seeds))
    pairs = {
        "coupled": [asked_of(name, prompt, 1) for name in "ab"],
        "seed": [asked_of(name, prompt, 1, seed=5) for name in "ab"],
        "greedy": [asked_of(name, prompt, 1, temperature=0.0) for name in "ab"],
        "not coupled": [asked_of(name, prompt, 1, coupled=False) for name in "ab"],
        "no namespace": [asked_of(name, prompt, 1, namespace=None) for name in "ab"],
    }
    found = {kind: said(engine, pair) for kind, pair in pairs.items()}
    assert {kind for kind, (one, other) in found.items() if one == other} == {"coupled", "seed", "greedy"}
    assert found["seed"] == said(engine_of(coupled_streams=0), pairs["seed"]) != found["coupled"]
    off = engine_of(coupled_streams=0, draw_seed=lambda: next(seeds))
    one, other = said(off, pairs["coupled"])
    assert one != other
    drawn = said(engine, [asked_of(str(number), prompt, None) for number in range(24)])
    assert {tuple(each) for each in drawn} == {tuple(alone("default", stream, prompt, 12)) for stream in range(4)}


# -- long texts that say the same again and again ----------------------------------------------------------------------


class Repeating(NoDrafter):
    """Drafts the last token over and over, in a chain or in many branches."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            tokens = np.full(max(0, request.limit), request.context[-1], np.int32)
            parents = (
                np.arange(-1, len(tokens) - 1, dtype=np.int32) // 2 if request.allow_tree and len(tokens) else None
            )
            drafts.append(Draft(tokens, source="repeating", parents=parents))
        return drafts


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("allowed", [(7,), (7, 8)])
def test_loops_are_counted_alike_with_and_without_drafts(allowed: Text, window: int, shape: DraftShape) -> None:
    """One context comes more than a hundred times, and two tokens in any order; prompts of one token, too."""
    requests = [
        asked_of(str(stream), prompt, stream, max_tokens=118, allowed_token_ids=allowed, logprobs=0)
        for stream, prompt in enumerate([(7,), (8,), (7,) * 9])
    ]
    plain = answers_of(engine_of(coupled_window=window), requests)
    engine = engine_of(Repeating(), coupled_window=window, shape=shape)
    assert answers_of(engine, requests) == plain
    assert engine.metrics.num_accepted_tokens > 30
    if len(allowed) == 2:
        assert all(20 < answer.token_ids.count(7) < 98 for answer in plain)  # no loop that noise used twice would make


# -- the law, with speculation on --------------------------------------------------------------------------------------

FEW = 6
PROMPT = (1, 3, 4, 1)
RULES = {
    "plain": SamplingParams(max_tokens=3, ignore_eos=True),
    "ruled": SamplingParams(
        max_tokens=3, temperature=0.9, top_p=0.95, repetition_penalty=1.2, logit_bias=((5, 0.7),), ignore_eos=True
    ),
}


@cache
def tiny() -> tuple[Target, Any]:
    """A target of six tokens, and its model once more, driven by nobody."""
    model = [tiny_model("Llama", vocab_size=FEW, hidden_size=32, num_hidden_layers=1) for _ in range(2)]
    return open_target(model[0], num_slots=16, max_length=16, max_draft_tokens=4), model[1]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("fresh", ["secrets", "streams"])
def test_what_is_drafted_from_others_answers_has_the_models_law(rules: str, fresh: str) -> None:
    """1,500 answers of three tokens against the probabilities of all 216, drafted from those that came before."""
    target, model = tiny()
    params, random = RULES[rules], np.random.default_rng(1)

    with CacheManager(CacheConfig(), FINGERPRINT, inline=True) as caches:
        drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=4, draft_shape="tree"))
        root = (lambda: random.bytes(32)) if fresh == "secrets" else (lambda: ROOT)
        engine = engine_of(drafter, target, caches=caches, coupled_window=1, shape="tree", root=root)
        requests = [
            ask(str(number), PROMPT, params, noise_stream=number if fresh == "streams" else 0) for number in range(1500)
        ]
        found = Counter(map(tuple, said(engine, requests)))
        assert 0 < engine.metrics.num_accepted_tokens < engine.metrics.num_draft_tokens
    assert_follows(found, law_of_outputs(logits_of(model), PROMPT, params, 3))


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_each_stream_says_again_what_it_said_in_a_few_passes(shape: DraftShape) -> None:
    """On the bundled model, drafted from the table of keyed choices alone."""
    codec = TextCodec.load(str(MODEL_PATH))
    model = load_model(MODEL_PATH, dtype="float32", device="cpu")
    target = open_target(model, num_slots=4, max_length=256, max_draft_tokens=LIMIT)
    prompts = [codec.encode_prompt(text)[-64:] for text in snippets(3)[:2]]
    more: dict[str, Any] = {"max_tokens": 48, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
    with CacheManager(CacheConfig(), codec.fingerprint, inline=True) as caches:
        drafter = SuffixDrafter(retrieval=False, recycling=False)
        engine, outputs = engine_of(drafter, target, caches=caches, coupled_window=8, shape=shape), []
        for attempt in range(4):
            passes = engine.metrics.num_verify_steps
            asked = [asked_of(f"{attempt} {n}", prompts[n % 2], n // 2, **more) for n in range(8)]
            outputs.append(said(engine, asked))
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert len(set(map(tuple, outputs[0]))) == 8
    num_passes = engine.metrics.num_verify_steps - passes
    assert num_passes * 0.7 * (LIMIT + 1) < 8 * 48
