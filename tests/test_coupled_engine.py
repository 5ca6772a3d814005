"""Coupled requests in the engine: what they say is of secret, stream and own text alone, and has the model's law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, DraftShape, EngineConfig, IndexConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest
from ssd.engine import Engine, Request
from ssd.engine.sequence import secret_of
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec
from tests.models import VOCAB, tiny_model
from tests.reference import scheduling as slow
from tests.reference.law import law_of_outputs, logits_of
from tests.reference.noise import coupled_key
from tests.statistics import assert_follows
from tests.whole_answers import answers_of

ROOT = b"of all"
LIMIT = 6
FINGERPRINT = "0" * 32
Text = tuple[int, ...]


@cache
def target_of(slots: int = 4, length: int = 128) -> Target:
    return open_target(tiny_model(), num_slots=slots, max_length=length, max_draft_tokens=LIMIT, exact="on")


def make_engine(
    drafter: Drafter | None = None,
    *,
    target: Target | None = None,
    caches: CacheSet | None = None,
    streams: int = 4,
    window: int = 2,
    shape: DraftShape = "auto",
    root: Callable[[], bytes] = lambda: ROOT,
    draw_seed: Callable[[], int] | None = None,
    codec: TextCodec | None = None,
) -> Engine:
    draft = DraftConfig(num_speculative_tokens=LIMIT if drafter else 0, draft_shape=shape)
    return Engine(
        target or target_of(),
        drafter=drafter or make_drafter("none", draft),
        codec=codec,
        caches=caches,
        config=EngineConfig(coupled_streams=streams, coupled_window=window, max_waiting=1 << 16),
        draft=draft,
        eos_token_ids=[],
        draw_seed=draw_seed,
        noise_root=root,
    )


def ask(name: str, prompt: Sequence[int], stream: int | None = 0, **sampling: Any) -> Request:
    namespace = sampling.pop("namespace", "default")
    params = SamplingParams(**{"max_tokens": 12, "temperature": 1.0, **sampling})
    return Request(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=params, noise_stream=stream, namespace=namespace
    )


def said(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The output of each request, all asked at once."""
    found = answers_of(engine, requests)
    assert engine.metrics.drafter_failures == 0
    return [answer.token_ids for answer in found]


def prompt_of(seed: int, length: int) -> Text:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())


# -- of secret, stream and own text alone ------------------------------------------------------------------------------

ALONE = tiny_model()  # never driven by an engine


@cache
def alone(namespace: str, stream: int, prompt: Text, length: int) -> list[int]:
    """The slow twin: one request, one token at a time, without any cache."""
    secret = secret_of(ROOT, namespace)
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
    index = IndexConfig(capacity_tokens=256, seal_tokens=16, merge_fanout=2)
    requests = []
    for number, (namespace, stream, prompt, length, _) in enumerate(script):
        requests.append(ask(str(number), prompt_of(prompt, length), stream, namespace=namespace))
    with CacheSet(CacheConfig(index=index), FINGERPRINT, inline=True) as caches:
        drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=LIMIT))
        engine = make_engine(drafter, target=target_of(slots), caches=caches, shape=shape)
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
    engine = make_engine(draw_seed=lambda: next(seeds))
    pairs = {
        "coupled": [ask(name, prompt, 1) for name in "ab"],
        "seed": [ask(name, prompt, 1, seed=5) for name in "ab"],
        "greedy": [ask(name, prompt, 1, temperature=0.0) for name in "ab"],
        "not coupled": [ask(name, prompt, 1, coupled=False) for name in "ab"],
        "no namespace": [ask(name, prompt, 1, namespace=None) for name in "ab"],
    }
    found = {kind: said(engine, pair) for kind, pair in pairs.items()}
    assert {kind for kind, (one, other) in found.items() if one == other} == {"coupled", "seed", "greedy"}
    assert found["seed"] == said(make_engine(streams=0), pairs["seed"]) != found["coupled"]
    off = make_engine(streams=0, draw_seed=lambda: next(seeds))
    one, other = said(off, pairs["coupled"])
    assert one != other
    drawn = said(engine, [ask(str(number), prompt, None) for number in range(24)])
    assert {tuple(each) for each in drawn} == {tuple(alone("default", stream, prompt, 12)) for stream in range(4)}


# -- long texts that say the same again and again ----------------------------------------------------------------------


class Repeating:
    """Drafts the last token over and over, in a chain or in many branches."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            tokens = np.full(max(0, request.limit), request.context[-1], np.int32)
            parents = np.arange(-1, len(tokens) - 1, dtype=np.int32) // 2 if request.tree and len(tokens) else None
            drafts.append(Draft(tokens, source="repeating", parents=parents))
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learns nothing."""

    def finish(self, request_id: str) -> None:
        """Keeps nothing."""


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("allowed", [(7,), (7, 8)])
def test_loops_are_counted_alike_with_and_without_drafts(allowed: Text, window: int, shape: DraftShape) -> None:
    """One context comes more than a hundred times, and two tokens in any order; prompts of one token, too."""
    requests = [
        ask(str(stream), prompt, stream, max_tokens=118, allowed_token_ids=allowed, logprobs=0)
        for stream, prompt in enumerate([(7,), (8,), (7,) * 9])
    ]
    plain = answers_of(make_engine(window=window), requests)
    engine = make_engine(Repeating(), window=window, shape=shape)
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

    with CacheSet(CacheConfig(), FINGERPRINT, inline=True) as caches:
        engine = make_engine(
            make_drafter("ssd", DraftConfig(num_speculative_tokens=4, draft_shape="tree")),
            target=target,
            caches=caches,
            window=1,
            shape="tree",
            root=(lambda: random.bytes(32)) if fresh == "secrets" else (lambda: ROOT),
        )
        requests = [
            Request(
                request_id=str(number),
                prompt_token_ids=PROMPT,
                sampling=params,
                noise_stream=number if fresh == "streams" else 0,
            )
            for number in range(1500)
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
    with CacheSet(CacheConfig(), codec.fingerprint, inline=True) as caches:
        drafter = SuffixDrafter(retrieval=False, recycling=False)
        engine, outputs = make_engine(drafter, target=target, caches=caches, window=8, shape=shape), []
        for attempt in range(4):
            passes = engine.metrics.num_verify_steps
            asked = [ask(f"{attempt} {n}", prompts[n % 2], n // 2, **more) for n in range(8)]
            outputs.append(said(engine, asked))
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert len(set(map(tuple, outputs[0]))) == 8
    num_passes = engine.metrics.num_verify_steps - passes
    assert num_passes * 0.7 * (LIMIT + 1) < 8 * 48
