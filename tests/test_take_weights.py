"""New weights for an engine that is open: from then on it is one that was opened with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.exactness import RandomDrafter
from ssd.bundled import MODEL_PATH
from ssd.engine import Engine
from ssd.errors import EngineError, ModelError
from ssd.model.cpu.packed_embedding import PackedEmbedding
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.memory import weight_bytes
from ssd.model.loading.replace_weights import replace_weights
from ssd.model.runners.adapted_linear import AdaptedLinear, AdapterRows
from ssd.model.target import Target
from tests.engines import ask, make_engine
from tests.models import VOCAB, tiny_model
from tests.static_targets import RECORDERS, pair_of_targets
from tests.whole_answers import Answer, answers_of

Weights = dict[str, torch.Tensor]

PROMPTS = ([5, 6, 7, 8, 5, 6, 7], list(range(20, 60)))
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"tie_word_embeddings": False}),
    ("Gemma 3", {}),  # normalises by 1 + weight, scales its embeddings
    ("Qwen2", {}),  # biases
    ("GPT-2", {}),
    ("Mixtral", {}),
    ("BLOOM (ALiBi)", {}),  # row by row
    ("Mamba-2", {}),
]


def moved(name: str, step: int, **changes: Any) -> PreTrainedModel:
    """The tiny model as training might leave it after a step."""
    model = tiny_model(name, **changes)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def engine_of(model: PreTrainedModel | Target) -> Engine:
    target = model if isinstance(model, Target) else open_target(model, num_slots=2, max_length=96, max_draft_tokens=4)
    return make_engine(RandomDrafter(VOCAB), target, eos=())


def said(engine: Engine, prompts: Sequence[list[int]] = PROMPTS) -> list[Answer]:
    """What it answers, greedy and with a seed, log-probabilities included."""
    more: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    return answers_of(
        engine,
        [
            ask(f"{temperature}-{index}", prompt, temperature=temperature, seed=index, **more)
            for temperature in (0.0, 0.9)
            for index, prompt in enumerate(prompts)
        ],
    )


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(("name", "changes"), ARCHITECTURES, ids=lambda value: str(value))
def test_after_new_weights_an_engine_says_what_one_opened_with_them_says(name: str, changes: dict[str, Any]) -> None:
    engine = engine_of(tiny_model(name, **changes))
    before, held = said(engine), weight_bytes(engine.target.model)
    for step in (1, 2):
        engine.load_weights(moved(name, step, **changes).state_dict())
        after = said(engine)
        assert after == said(engine_of(moved(name, step, **changes)))
        assert after != before
        assert weight_bytes(engine.target.model) == held
        assert engine.check() == []


def test_the_bundled_models_packed_and_tied_weights_are_replaced() -> None:
    engine = engine_of(load_model(MODEL_PATH, device="cpu"))
    if not isinstance(engine.target.model.get_input_embeddings(), PackedEmbedding):
        pytest.skip("this processor's packed weights lie in another way")
    other = load_model(MODEL_PATH, device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    before = said(engine)
    engine.load_weights(other.state_dict())
    after = said(engine)
    assert after == said(engine_of(other)) != before


def test_what_is_trained_on_afterwards_changes_nothing_here() -> None:
    trained = moved("Llama", 1)
    engine = engine_of(tiny_model("Llama"))
    engine.load_weights(trained.state_dict())
    before = said(engine)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(-3.0)
    assert said(engine) == before


@pytest.mark.parametrize("recorder", RECORDERS)
def test_passes_of_fixed_shape_compute_with_the_new_weights(recorder: str) -> None:
    plain, static = (engine_of(target) for target in pair_of_targets(moved("Llama", 0), recorder))
    first = tokens_of(said(static))  # recorded passes may round otherwise
    assert first == tokens_of(said(plain))
    weights = moved("Llama", 1).state_dict()
    static.load_weights(weights)
    again = tokens_of(said(static))
    plain.load_weights(weights)  # the two targets have one model; each has keys and values of its own
    assert first != again == tokens_of(said(plain)) == tokens_of(said(engine_of(moved("Llama", 1))))


def less(weights: Weights, name: str) -> Weights:
    return {key: tensor for key, tensor in weights.items() if key != name}


QUERY = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda weights: less(weights, QUERY), f"lack {QUERY}"),
        (lambda weights: {**weights, "base_model.x": torch.zeros(1)}, "has no weight base_model.x"),
        (lambda weights: {**weights, QUERY: weights[QUERY][:-1]}, rf"{QUERY} is float32\[63, 64\], but .*\[64, 64\]"),
        (lambda weights: {**weights, NORM: weights[NORM].double()}, rf"{NORM} is float64\[64\]"),
        (lambda weights: {**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, "lm_head.weight.* differ"),
    ],
    ids=["missing", "unknown", "shape", "type", "tied"],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(spoil: Any, says: str) -> None:
    engine = engine_of(tiny_model("Llama", tie_word_embeddings=True))
    before = said(engine)
    with pytest.raises(ModelError, match=says):
        engine.load_weights(spoil(moved("Llama", 1, tie_word_embeddings=True).state_dict()))
    assert said(engine) == before


def test_weights_are_not_changed_under_a_request() -> None:
    engine = engine_of(tiny_model("Llama"))
    engine.submit(ask("a", (5, 6, 7)))
    weights = moved("Llama", 1).state_dict()
    for _ in range(2):  # while it waits, and while it runs
        with pytest.raises(EngineError, match="wait for their end"):
            engine.load_weights(weights)
        engine.step()
    engine.cancel("a")
    while engine.has_work():
        engine.step()
    engine.load_weights(weights)


def test_a_model_with_adapters_keeps_its_weights() -> None:
    model = tiny_model("Llama")
    model.lm_head = AdaptedLinear(nn.Linear(64, VOCAB, bias=False), {}, AdapterRows())
    with pytest.raises(ModelError, match="adapters"):
        replace_weights(model, model.state_dict())


@pytest.mark.parametrize("num_drafted", [0, 4])
def test_log_probabilities_may_be_those_that_tokens_are_drawn_with(num_drafted: int) -> None:
    """Against transformers' own order: repetition penalty, temperature, top-k; truth from the plain model."""
    plain, engine = tiny_model("Llama"), engine_of(tiny_model("Llama"))
    prompt = [5, 6, 7, 8, 5, 6]
    engine.submit(
        ask(
            "a",
            prompt,
            temperature=0.7,
            top_k=5,
            repetition_penalty=1.3,
            seed=1,
            logprobs=2,
            drawn_logprobs=True,
            ignore_eos=True,
            num_speculative_tokens=num_drafted,
        )
    )
    context, num_compared = list(prompt), 0
    while engine.has_work():
        for output in engine.step():
            for token, entry in zip(output.token_ids, output.logprobs or (), strict=True):
                with torch.no_grad():
                    scores = plain(torch.tensor([context])).logits[0, -1]
                seen = sorted(set(context))
                scores[seen] = torch.where(scores[seen] > 0, scores[seen] / 1.3, scores[seen] * 1.3)
                best = torch.topk(scores / 0.7, 5)
                law = dict(zip(best.indices.tolist(), torch.log_softmax(best.values, -1).tolist(), strict=True))
                assert entry.logprob == pytest.approx(law[token], abs=1e-4)
                assert entry.top[0][1] == pytest.approx(max(law.values()), abs=1e-4)
                context.append(token)
                num_compared += 1
    assert num_compared == 12
