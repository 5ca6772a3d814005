"""Adapters of the command line: model names with caches of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.command.arguments import parse_arguments
from server.command.checks import check_before_loading
from server.command.options import read_adapters
from server.command.start import EngineLoader, make_settings
from server.running.engine_thread import WorkerState
from ssd.errors import ConfigError
from tests.server.client import get, metric, post
from tests.server.failing_engine import RunningServer, serving
from tests.test_adapters import SETTINGS, make_adapter, plain_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("adapters") / "one"
    make_adapter(plain_model(), path, 0, **SETTINGS["one"])
    options = parse_arguments(
        [
            "--device",
            "cpu",
            "--max-num-seqs",
            "4",
            "--max-model-len",
            "256",
            "--cache-tokens",
            "64K",
            "--lora-modules",
            f"one={path}",
            json.dumps({"name": "same", "path": str(path), "base_model_name": "x"}),
        ],
        {},
    )
    check_before_loading(options)
    settings = make_settings(options)
    with serving(EngineLoader(options), wait=False, model_names=("base",), adapters=settings.adapters) as running:
        running.wait_until(WorkerState.READY)
        yield running


def completion(server: RunningServer, model: str | None, **fields: Any) -> Any:
    body = {"model": model, "prompt": "class Queue:\n    def", "max_tokens": 30, "temperature": 0, **fields}
    answer = post(server.port, "/v1/completions", body)
    assert answer.status == 200, answer.content
    return answer.json


def test_each_adapter_is_a_model_with_its_parent(server: RunningServer) -> None:
    models = {each["id"]: each for each in get(server.port, "/v1/models").json["data"]}
    assert list(models) == ["base", "one", "same"]
    assert [models[name]["parent"] for name in models] == [None, "base", "base"]
    assert models["one"]["root"].endswith("one")
    assert get(server.port, "/v1/models/one").json == models["one"]
    assert get(server.port, "/v1/models/other").status == 404


def test_the_model_that_a_request_names_answers(server: RunningServer) -> None:
    texts = {name: completion(server, name)["choices"][0]["text"] for name in ("base", "one", "same", None)}
    assert texts["base"] == texts[None] != texts["one"] == texts["same"]
    assert completion(server, "one")["model"] == "one" and completion(server, None)["model"] == "base"
    asked = {"model": "one", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
    assert {event["model"] for event in post(server.port, "/v1/chat/completions", asked).events} == {"one"}
    assert post(server.port, "/v1/completions", {"model": "other", "prompt": "x"}).status == 404
    assert post(server.port, "/tokenize", {"model": "one", "prompt": "x"}).status == 200


def test_what_one_learns_no_other_drafts_from(server: RunningServer) -> None:
    prompt = "def learned_by_one(values):\n    total = 0\n"
    for _ in range(2):
        completion(server, "one", prompt=prompt)
    learned = metric(server.port, "ssd:cache_tokens", namespace="default.one")
    assert learned > 0
    assert completion(server, "same", prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert metric(server.port, "ssd:cache_tokens", namespace="default.one") == learned


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["one"], "NAME=PATH"),
        (["one="], "NAME=PATH"),
        (["a.b=x"], "is not a valid name"),
        (["=x"], "is not a valid name"),
        (["one=x", "one=y"], "given twice"),
        (["base=x"], "given twice"),
        (['{"name": "one"}'], "JSON"),
        (['{"name"'], "JSON"),
    ],
)
def test_wrong_names_are_explained(words: list[str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        read_adapters(words, model_names=("base",))


def test_names_come_as_vllm_has_them(tmp_path: Path) -> None:
    wanted = {"one": "a/b", "two": "c=d"}
    assert read_adapters(["one=a/b", "two=c=d"], model_names=()) == wanted
    assert read_adapters([json.dumps([{"name": n, "path": p} for n, p in wanted.items()])], model_names=()) == wanted
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        check_before_loading(parse_arguments(["--lora-modules", f"one={tmp_path}"], {}))
