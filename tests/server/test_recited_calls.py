"""Recorded outputs through real clients: a model recites them, and every call arrives as canitoolcall says.

Chat completions, responses and messages, whole and streamed; loops of five turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from canitoolcall import checks
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.results import ParsedToolCall, ParseResult

from tests.server.client import official_client
from tests.server.failing_engine import RunningServer, serving
from tests.server.reciting_target import reciting
from tests.server.test_recorded_calls import FAMILIES, FORMATS, formats_of, prompt_of
from tests.waiting import PATIENCE_S

MODEL = "test-model"
PAIRS = [*dict.fromkeys(FORMATS.values())]
FEW = 4
"""Outputs of each pair of formats, unless all are asked for."""


def recorded(pair: tuple[str, str | None]) -> list[Fixture]:
    """Outputs that have an answer; those with much in them first."""

    def richness(fixture: Fixture) -> int:
        expected = fixture.expected
        assert expected is not None
        calls = expected.tool_calls
        return -(2 * (len(calls) > 1) + bool(expected.content and calls) + bool(expected.reasoning_content and calls))

    found = [each for each in load_fixtures() if formats_of(each) == pair and each.expected and not each.truncated]
    return sorted(found, key=richness)


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    found: tuple[str, str | None] = request.param
    return found


@pytest.fixture(scope="module")
def server(pair: tuple[str, str | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    fixtures = [each for each in load_fixtures() if formats_of(each) == pair]
    markers = {marker for each in fixtures for marker in FAMILIES[each.family].markers if "=" not in marker}
    special = {marker for marker in markers if re.search(r"\||｜|^\[", marker)} - {"<|assistant|>", "<|user|>"}
    outputs = {each.id: (prompt_of(each), each.raw_output) for each in fixtures}
    load = reciting(tmp_path_factory.mktemp("model"), outputs, special, sorted(markers - special))
    names = {"tool_call_parser": pair[0], "reasoning_parser": pair[1] or "none"}
    with serving(load, **names) as running:
        yield running


def arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def result(content: str, reasoning: str, calls: list[Any]) -> ParseResult:
    return ParseResult(content, reasoning, tuple(ParsedToolCall(name, arguments(given)) for name, given in calls))


def chat(port: int, said: str, tools: Any, stream: bool) -> ParseResult:
    with official_client(port) as client:
        fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": said}], "tools": tools}
        if not stream:
            message: Any = client.chat.completions.create(**fields).choices[0].message
            called = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            return result(message.content or "", getattr(message, "reasoning", None) or "", called)
        content = reasoning = ""
        calls: dict[int, list[str]] = {}
        for chunk in client.chat.completions.create(**fields, stream=True):
            delta: Any = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or ():
                if call.id is not None:
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments
        return result(content, reasoning, [calls[index] for index in sorted(calls)])


def response(port: int, said: str, tools: Any, stream: bool) -> ParseResult:
    with official_client(port) as client:
        given = [{"type": "function", **tool["function"]} for tool in tools]
        fields: Any = {"model": MODEL, "input": said, "tools": given, "store": False}
        if stream:
            with client.responses.stream(**fields) as events:
                for _ in events:
                    pass
                output: Any = events.get_final_response().output
        else:
            output = client.responses.create(**fields).output
    texts = {kind: [part.text for item in output if item.type == kind for part in item.content] for kind in
             ("message", "reasoning")}  # fmt: skip
    calls = [(item.name, item.arguments) for item in output if item.type == "function_call"]
    return result("".join(texts["message"]), "\n".join(texts["reasoning"]), calls)


def claude(port: int) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0, timeout=PATIENCE_S)


def message(port: int, said: str, tools: Any, stream: bool) -> ParseResult:
    given: Any = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        given.append({"name": function["name"], "description": function.get("description", ""), "input_schema": schema})
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": said}], "tools": given, "max_tokens": 2048}
    with claude(port) as client:
        if stream:
            with client.messages.stream(**fields) as events:
                blocks: Any = events.get_final_message().content
        else:
            blocks = client.messages.create(**fields).content
    content = "".join(block.text for block in blocks if block.type == "text")
    reasoning = "\n".join(block.thinking for block in blocks if block.type == "thinking")
    return result(content, reasoning, [(block.name, block.input) for block in blocks if block.type == "tool_use"])


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("ask", [chat, response, message])
def test_every_call_arrives_as_the_suite_says(
    server: RunningServer,
    pair: tuple[str, str | None],
    ask: Callable[[int, str, Any, bool], ParseResult],
    many: bool,
) -> None:
    for fixture in recorded(pair)[FEW if many else 0 : None if many else FEW]:
        assert fixture.expected is not None
        wanted = checks.expected_as_result(fixture.expected)
        for stream in (False, True):
            found = ask(server.port, f"recite {fixture.id}", fixture.tools, stream)
            difference = checks.describe_difference(wanted, found)
            assert checks.compare(wanted, found).value in ("pass", "soft_pass"), (fixture.id, stream, difference)
