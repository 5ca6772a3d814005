"""LoRA adapters: rows of several in one pass, each token as peft says, and nothing crosses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.exactness import TIE_MARGIN
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, EngineConfig
from ssd.engine import Engine, Request
from ssd.errors import ModelError, RequestError
from ssd.model.loading.adapters import load_adapters
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests.engines import ask
from tests.models import tiny_model
from tests.whole_answers import answers_of

TEXTS = ["import os\n", "class Queue:\n    def __init__(self):\n", "def add(a, b):\n    return", "x = [1, 2, 3]\nfor"]
MAX_TOKENS = 24
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "two": {"r": 8, "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"], "use_rslora": True},
}


def make_adapter(model: Any, path: Path, seed: int, **settings: Any) -> None:
    """An adapter that changes what the model says."""
    made = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_alpha=16, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(made.named_parameters()):
            if "lora_" in name:
                weight.normal_(std=0.08, generator=generator)
    made.save_pretrained(path, save_embedding_layers=False)
    made.unload()


def plain_model() -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # texts end at their length
    return model


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        make_adapter(plain_model(), directory / name, seed, **settings)
    return {name: str(directory / name) for name in SETTINGS}


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


@pytest.fixture(scope="module")
def engine(paths: dict[str, str], codec: TextCodec) -> Iterator[Engine]:
    with CacheManager(CacheConfig(), codec.fingerprint, inline=True) as caches:
        made = Engine.from_pretrained(
            MODEL_PATH,
            dtype="float32",
            device="cpu",
            caches=caches,
            codec=codec,
            config=EngineConfig(max_num_seqs=8, max_model_len=128, batch_invariant="on"),
            adapters=paths,
        )
        made.warm_up()
        yield made


def requests_of(codec: TextCodec, names: tuple[str | None, ...], prefix: str) -> list[Request]:
    """Every text with every adapter, neighbours with different ones."""
    return [
        ask(
            f"{prefix}/{number}/{name}",
            codec.encode_prompt(text),
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            namespace=f"default.{name}",
            adapter=name,
        )
        for number, text in enumerate(TEXTS)
        for name in names
    ]


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    answers = answers_of(engine, requests)
    return {request.request_id: answer.token_ids for request, answer in zip(requests, answers, strict=True)}


def require_same(model: Any, prompt: tuple[int, ...], found: list[int], expected: list[int]) -> int:
    """Returns how many tokens agree: all, or those before a near-tie of the model's own scores."""
    same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(expected))
    if same < len(expected):
        with torch.inference_mode():
            scores = model(input_ids=torch.tensor([[*prompt, *expected[:same]]])).logits[0, -1]
        assert abs(float(scores[found[same]] - scores[expected[same]])) < TIE_MARGIN, same
    return same


def test_mixed_batches_say_what_peft_says_of_each_adapter_alone(
    engine: Engine, codec: TextCodec, paths: dict[str, str]
) -> None:
    names = (None, *paths)
    found: dict[str, list[int]] = {}
    for turn in ("new", "again"):  # the second time with drafts of what was said, and from kept prefixes
        requests = requests_of(codec, names, turn)
        said = {
            request.request_id: tuple(found.get(request.request_id.replace(turn, "new"), ())) for request in requests
        }
        requests = [replace(request, prediction_token_ids=said[request.request_id]) for request in requests]
        accepted = engine.metrics.num_accepted_tokens
        found |= run(engine, requests)
        for name in names:
            model = plain_model()
            if name is not None:
                model = PeftModel.from_pretrained(model, paths[name]).eval()
            compared = 0
            for request in (request for request in requests if request.adapter == name):
                prompt = torch.tensor([request.prompt_token_ids])
                whole = model.generate(
                    input_ids=prompt,
                    max_new_tokens=MAX_TOKENS,
                    do_sample=False,
                    attention_mask=torch.ones_like(prompt),
                )
                expected = whole[0, prompt.shape[1] :].tolist()
                compared += require_same(model, request.prompt_token_ids, found[request.request_id], expected)
            assert compared > 0.7 * MAX_TOKENS * len(TEXTS)
        if turn == "again":
            assert engine.metrics.num_accepted_tokens > accepted + MAX_TOKENS
    texts = {name: [found[f"again/{number}/{name}"] for number in range(len(TEXTS))] for name in names}
    assert (
        texts[None] != texts["one"] != texts["two"] != texts[None]
    )  # else the adapters changed nothing, and nothing was tried


def test_neighbours_with_other_adapters_change_no_bit_of_an_answer(
    engine: Engine, codec: TextCodec, paths: dict[str, str]
) -> None:
    """Each alone, without drafts and reuse, against all at once; greedy and with a seed."""
    requests = [
        replace(request, sampling=replace(request.sampling, temperature=0.7 * (index % 2), seed=index, logprobs=2))
        for index, request in enumerate(requests_of(codec, (None, *paths), "beside"))
    ]
    alone = [
        answers_of(engine, [replace(each, request_id=f"alone {i}", num_speculative_tokens=0, namespace=None)])[0]
        for i, each in enumerate(requests)
    ]
    for turn in "ab":  # the second time with drafts of what was said
        named = [replace(request, request_id=f"{turn} {request.request_id}") for request in requests]
        assert answers_of(engine, named) == alone


def test_keys_and_values_of_an_adapter_are_not_used_for_another(engine: Engine, codec: TextCodec) -> None:
    prompt = tuple(codec.encode_prompt("def first(items):\n    for item in items:\n        return item\n" * 2))
    outputs: dict[tuple[str | None, int], list[int]] = {}
    for name in (None, "one", "two", "one"):
        request = ask(f"kept-{name}-{len(outputs)}", prompt, adapter=name, max_tokens=8, ignore_eos=True)
        hits = engine.metrics.prefix_cache_hits
        outputs[name, len(outputs)] = run(engine, [request])[request.request_id]
        assert (engine.metrics.prefix_cache_hits > hits) == (len(outputs) == 4)
    assert outputs["one", 1] == outputs["one", 3]


def test_an_adapter_that_is_not_there_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="three") as error:
        engine.submit(ask("x", (1,), adapter="three"))
    assert error.value.param == "model"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
    ],
)
def test_what_is_more_than_linear_additions_is_refused(settings: dict[str, Any], hint: str, tmp_path: Path) -> None:
    make_adapter(tiny_model(), tmp_path / "adapter", 0, **settings)
    with pytest.raises(ModelError, match=hint):
        load_adapters(tiny_model(), {"odd": str(tmp_path / "adapter")})


def test_an_adapter_of_another_model_or_damaged_is_refused(paths: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter 'one' of .* cannot be used"):
        load_adapters(tiny_model(), paths)
    make_adapter(tiny_model(num_hidden_layers=3), tmp_path / "deep", 0, target_modules=["q_proj"])
    with pytest.raises(ModelError, match="made for another model"):
        load_adapters(tiny_model(num_hidden_layers=2), {"deep": str(tmp_path / "deep")})
    make_adapter(tiny_model(), tmp_path / "cut", 0, target_modules=["q_proj"])
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ModelError, match="cut"):
        load_adapters(tiny_model(), {"cut": str(tmp_path / "cut")})
    config = tmp_path / "cut" / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LOHA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}))
    with pytest.raises(ModelError, match="LOHA"):
        load_adapters(tiny_model(), {"cut": str(tmp_path / "cut")})


def test_an_adapter_of_the_output_layer_is_heard(tmp_path: Path) -> None:
    make_adapter(tiny_model(), tmp_path / "adapter", 0, target_modules=["lm_head"])
    model, ids = tiny_model(), np.arange(3, 11)[None]
    peft = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter").eval()
    adapters = load_adapters(model, {"one": str(tmp_path / "adapter")})
    target = open_target(model, num_slots=2, max_length=32, adapters=adapters)
    target.adapters[0] = "one"
    found = target.forward([0], ids, [8]).logits[0]
    with torch.inference_mode():
        expected, plain = (
            peft(input_ids=torch.from_numpy(ids)).logits[0],
            peft.unload()(torch.from_numpy(ids)).logits[0],
        )
    assert torch.allclose(found, expected, atol=1e-4) and not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.parametrize("name", ["Mamba", "BLOOM (ALiBi)"])
def test_where_rows_cannot_be_mixed_adapters_are_refused(name: str, tmp_path: Path) -> None:
    modules = {"Mamba": ["x_proj"], "BLOOM (ALiBi)": ["dense"]}
    make_adapter(tiny_model(name), tmp_path / "adapter", 0, target_modules=modules[name])
    model = tiny_model(name)
    adapters = load_adapters(model, {"odd": str(tmp_path / "adapter")})
    with pytest.raises(ModelError, match="does not support LoRA adapters"):
        open_target(model, num_slots=2, max_length=32, adapters=adapters)
