"""Requests made from our own description of the service, right and wrong ones; SSD_FUZZ_CASES says how many."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from server.base.limits import Limits
from tests.server.bundled_engine import load_plain
from tests.server.client import get, post
from tests.server.failing_engine import FailingEngine, RunningServer, serving

NUM_POSTS = 7
CASES = int(os.environ.get("SSD_FUZZ_CASES", "300"))
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(
        partial(load_plain, max_num_seqs=4, max_model_len=48),  # the longest answers are short
        limits=Limits(max_choices=4),
    ) as running:
        yield running


@pytest.mark.timeout(0 if CASES > 1000 else 1200)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_no_described_request_is_an_error_of_the_server(server: RunningServer, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    sent: Counter[int] = Counter()

    def fuzz(operation: Any) -> None:
        @given(operation.as_strategy(generation_mode=mode))
        @settings(max_examples=-(-CASES // (2 * NUM_POSTS)), suppress_health_check=list(HealthCheck))
        def send(case: Any) -> None:
            response = case.call()
            sent[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        send()

    for found in schema.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]
        if mode is GenerationMode.POSITIVE or operation.method == "post":  # others take nothing that could be wrong
            fuzz(operation)
    print(f"\n{mode.value}: {sent.total()} requests, {dict(sorted(sent.items()))}")
    assert get(server.port, "/health").status == 200


def test_the_description_refers_to_nothing_that_is_not_there() -> None:
    with serving(lambda _: FailingEngine(), api_keys=("secret",)) as server:
        description = get(server.port, "/openapi.json").json
    assert sum("post" in path for path in description["paths"].values()) == NUM_POSTS
    references: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            references.extend(each for key, each in value.items() if key == "$ref" and isinstance(each, str))
            value = list(value.values())
        for each in value if isinstance(value, list) else ():
            walk(each)

    walk(description)
    assert references
    schemas = description["components"]["schemas"]
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= schemas.keys()
    assert description["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in description["paths"]["/live"]["get"]


def test_every_field_of_a_request_is_described_and_every_example_is_answered(server: RunningServer) -> None:
    description = get(server.port, "/openapi.json").json
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is None:
            continue
        content = body["content"]["application/json"]
        for one in content["schema"].get("anyOf", [content["schema"]]):
            fields = schemas[one["$ref"].rpartition("/")[2]]["properties"]
            assert [name for name, field in fields.items() if not field.get("description")] == [], path
        example = {**content["example"], **({"stream": False} if "stream" in content["example"] else {})}
        example |= {name: 4 for name in ("max_tokens", "max_output_tokens") if name in example}
        answer = post(server.port, path, example)
        # The messages API requires a model's name, which depends on the server.
        assert answer.status == 200 or ("model" in example and answer.status == 404), (path, answer.content)
