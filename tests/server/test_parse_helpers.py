"""Pydantic models through the helpers of the official clients: what comes back is a model, or a 400 says why not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, create_model

from ssd.bundled import MODEL_PATH
from tests.server.bundled_engine import load_bundled
from tests.server.client import claude_client, official_client
from tests.server.failing_engine import RunningServer, serving

pytest.importorskip("llguidance")

CASES = max(8, int(os.environ.get("SSD_FUZZ_CASES", "200")) // 25)
MODEL = "test-model"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    kind: Literal["inner"] = "inner"
    size: Annotated[float, Field(gt=0, lt=0.05)]


class Other(BaseModel):
    kind: Literal["other"] = "other"


KINDS: list[Any] = [
    int,
    bool,
    date,
    time,
    datetime,
    timedelta,
    UUID,
    Colour,
    Inner,
    None,
    Literal[1234567890123456789, 5],
    Literal["<|user|>"],
    Annotated[float, Field(gt=0, lt=0.05)],
    Annotated[float, Field(ge=-1.5, lt=-1)],
    Annotated[int, Field(gt=0, lt=3)],
    Annotated[str, Field(max_length=4)],
    Annotated[str, Field(pattern="^[a-z]{2}$")],
    Annotated[bytes, Field(max_length=4)],
    Annotated[list[int], Field(max_length=2)],
    Annotated[set[Colour], Field(max_length=1)],
    set[int],
    dict[Literal["a", "b"], bool],
    Annotated[dict[str, bool], Field(max_length=1)],
    int | None,
    Inner | Other,
    Annotated[Inner | Other, Field(discriminator="kind")],
]
UNBOUNDED: list[Any] = [Path, SecretStr]


def model_of(kinds: list[Any]) -> type[BaseModel]:
    fields: dict[str, Any] = {f"field_{number}": (kind, ...) for number, kind in enumerate(kinds)}
    made: type[BaseModel] = create_model("Drawn", **fields)
    return made


MODELS = st.lists(st.sampled_from([*KINDS, *UNBOUNDED]), min_size=1, max_size=3).map(model_of)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(partial(load_bundled, max_model_len=1024), model=str(MODEL_PATH)) as running:
        yield running


def parsed(server: RunningServer, model: type[BaseModel], seed: int) -> Iterator[BaseModel | None]:
    """What each helper makes of an answer; None where the answer was cut."""
    asked: list[Any] = [{"role": "user", "content": "Give the record as JSON."}]
    with official_client(server.port) as client:
        tool = openai.pydantic_function_tool(model, name="record")
        chat = client.chat.completions
        options: dict[str, Any] = {"model": MODEL, "messages": asked, "max_tokens": 160, "seed": seed}
        try:
            yield chat.parse(response_format=model, **options).choices[0].message.parsed
        except openai.LengthFinishReasonError:
            yield None
        try:
            calls = chat.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **options)
            for call in calls.choices[0].message.tool_calls or []:
                arguments = call.function.parsed_arguments
                assert arguments is None or isinstance(arguments, BaseModel)
                yield arguments
        except openai.LengthFinishReasonError:
            yield None
        found = client.responses.create(
            model=MODEL,
            input="A record.",
            max_output_tokens=160,
            text={"format": {"type": "json_schema", "name": "record", "schema": model.model_json_schema()}},
        )
        if found.status == "completed":
            yield model.model_validate_json(found.output_text)
    with claude_client(server.port) as other:
        schema = {"type": "json_schema", "schema": anthropic.transform_schema(model)}
        message = other.messages.create(
            model=MODEL, max_tokens=160, messages=asked, extra_body={"output_config": {"format": schema}}
        )
        assert message.stop_reason in ("end_turn", "max_tokens")
        if message.stop_reason == "end_turn":  # its constraints are in descriptions: only the structure holds
            assert message.content[0].type == "text"
            assert isinstance(json.loads(message.content[0].text), dict)


@settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
@given(model=MODELS, seed=st.integers(0, 1000))
def test_a_helper_returns_a_model_or_a_refusal_names_the_keyword(
    server: RunningServer, model: type[BaseModel], seed: int
) -> None:
    try:
        for made in parsed(server, model, seed):
            assert made is None or isinstance(made, model)
    except (openai.BadRequestError, anthropic.BadRequestError) as error:
        assert " at /" in str(error)
        assert "uniqueItems" in str(error) or "look-around is not supported" in str(error) or "oneOf" in str(error)
