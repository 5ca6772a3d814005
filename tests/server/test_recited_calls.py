"""Recorded outputs through real clients: a model recites them, and every call arrives as canitoolcall says.

Chat completions, responses and messages, whole and streamed; loops of five turns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from canitoolcall import checks
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.results import ParsedToolCall, ParseResult

from tests.server.client import claude_client, official_client
from tests.server.failing_engine import RunningServer, serving
from tests.server.reciting_target import reciting
from tests.server.test_recorded_calls import FAMILIES, FORMATS, NAMED, formats_of, prompt_of

MODEL = "test-model"
FIXTURES = load_fixtures()
QUICK = [("hermes", "qwen3"), ("openai", "openai_gptoss"), ("kimi_k3", "kimi_k3"), ("deepseek_v41", "deepseek_v3")]
PAIRS = [
    pytest.param(pair, id="-".join(filter(None, pair)), marks=() if pair in QUICK else pytest.mark.slow)
    for pair in dict.fromkeys(FORMATS.values())
]
_OTHERWISE = {each.id for each in FIXTURES if each.truncated or not each.expected or each.id in NAMED}
MOST = 7000
"""Tokens of an answer; none of those that were recorded is longer."""
FEW = 3
"""Outputs of each pair of formats, unless all are asked for."""


def recorded(pair: tuple[str, str | None]) -> list[Fixture]:
    """Outputs that have an answer, but for those that are known to be read otherwise; those with much in them first."""

    def richness(fixture: Fixture) -> int:
        expected = fixture.expected
        assert expected is not None
        calls = expected.tool_calls
        return -(2 * (len(calls) > 1) + bool(expected.content and calls) + bool(expected.reasoning_content and calls))

    found = [each for each in FIXTURES if formats_of(each) == pair and each.id not in _OTHERWISE]
    return sorted(found, key=richness)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    found: tuple[str, str | None] = request.param
    return found


@pytest.fixture(scope="module")
def server(pair: tuple[str, str | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    fixtures = [each for each in FIXTURES if formats_of(each) == pair]
    markers = {marker for each in fixtures for marker in FAMILIES[each.family].markers if "=" not in marker}
    special = {marker for marker in markers if re.search(r"\||｜|^\[", marker)} - {"<|assistant|>", "<|user|>"}
    outputs = {each.id: (prompt_of(each), each.raw_output) for each in fixtures}
    load = reciting(tmp_path_factory.mktemp("model"), outputs, special, sorted(markers - special))
    with serving(load, tool_call_parser=pair[0], reasoning_parser=pair[1] or "none") as running:
        yield running


def arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def result(content: str, reasoning: str, calls: list[Any]) -> ParseResult:
    return ParseResult(content, reasoning, tuple(ParsedToolCall(name, arguments(given)) for name, given in calls))


Told = tuple[ParseResult, list[Any], list[str]]
"""What was found, what of it goes on in the conversation, and the ids of its calls."""


def chat_of(client: openai.OpenAI, messages: Any, tools: Any, stream: bool, most: int = MOST) -> Told:
    fields: Any = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": most}
    if not stream:
        said: Any = client.chat.completions.create(**fields).choices[0].message
        called = [(call.function.name, call.function.arguments) for call in said.tool_calls or ()]
        found = result(said.content or "", getattr(said, "reasoning", ""), called)
        return found, [said.model_dump(exclude_none=True)], [call.id for call in said.tool_calls or ()]
    content = reasoning = ""
    calls: dict[int, Any] = {}
    ended: Any = None
    delta: Any
    for chunk in client.chat.completions.create(**fields, stream=True):
        ended, delta = chunk.choices[0].finish_reason, chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or ():
            assert [call.type, call.function.name].count(None) == (2 if call.id is None else 0)
            if call.id is not None:
                assert call.function.arguments == ""
                begun = {"name": call.function.name, "arguments": ""}
                calls[call.index] = {"id": call.id, "type": "function", "function": begun}
            calls[call.index]["function"]["arguments"] += call.function.arguments
    assert ended == ("tool_calls" if calls else "stop")
    in_order = [calls[index] for index in sorted(calls)]
    whole = {"role": "assistant", "content": content, **({"tool_calls": in_order} if calls else {})}
    found = result(content, reasoning, [[*call["function"].values()] for call in in_order])
    return found, [whole], [call["id"] for call in in_order]


def response_of(client: openai.OpenAI, given: Any, tools: Any, stream: bool, most: int = MOST) -> Told:
    functions = [{"type": "function", **tool["function"]} for tool in tools]
    fields: Any = {"model": MODEL, "input": given, "tools": functions, "store": False, "max_output_tokens": most}
    if stream:
        with client.responses.stream(**fields) as events:
            for _ in events:
                pass
            output: Any = events.get_final_response().output
    else:
        output = client.responses.create(**fields).output
    texts = {
        kind: [part.text for item in output if item.type == kind for part in item.content]
        for kind in ("message", "reasoning")
    }
    calls = [item for item in output if item.type == "function_call"]
    called = [(call.name, call.arguments) for call in calls]
    found = result("".join(texts["message"]), "\n".join(texts["reasoning"]), called)
    return found, [item.model_dump(exclude_none=True) for item in output], [call.call_id for call in calls]


def anthropic_tools(tools: Any) -> list[Any]:
    functions = [tool["function"] for tool in tools]
    names = {"name": "name", "description": "description", "parameters": "input_schema"}
    empty = {"parameters": {"type": "object", "properties": {}}}
    return [{names[key]: value for key, value in {**empty, **each}.items() if key in names} for each in functions]


def message_of(client: anthropic.Anthropic, messages: Any, tools: Any, stream: bool, most: int = MOST) -> Told:
    fields: Any = {"model": MODEL, "messages": messages, "tools": anthropic_tools(tools), "max_tokens": most}
    if stream:
        with client.messages.stream(**fields) as events:
            blocks: Any = events.get_final_message().content
    else:
        blocks = client.messages.create(**fields).content
    content = "".join(block.text for block in blocks if block.type == "text")
    reasoning = "\n".join(block.thinking for block in blocks if block.type == "thinking")
    calls = [block for block in blocks if block.type == "tool_use"]
    said = {"role": "assistant", "content": [block.model_dump() for block in blocks]}
    return result(content, reasoning, [(call.name, call.input) for call in calls]), [said], [call.id for call in calls]


def message_results(given: list[tuple[str, str]]) -> list[Any]:
    """All in one turn, and a turn there must be."""
    content = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in given]
    return [{"role": "user", "content": content or "done"}]


KINDS: dict[str, tuple[Callable[[int], Any], Callable[..., Told], Callable[[list[tuple[str, str]]], list[Any]]]] = {
    "chat": (
        official_client,
        chat_of,
        lambda given: [{"role": "tool", "tool_call_id": call, "content": text} for call, text in given],
    ),
    "responses": (
        official_client,
        response_of,
        lambda given: [{"type": "function_call_output", "call_id": call, "output": text} for call, text in given],
    ),
    "messages": (claude_client, message_of, message_results),
}
"""Of each API the client, how a conversation is asked, and what functions returned as the client sends it."""


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_arrives_as_the_suite_says(
    server: RunningServer, pair: tuple[str, str | None], kind: str, many: bool
) -> None:
    open_client, ask, _ = KINDS[kind]
    with open_client(server.port) as client:
        for fixture in recorded(pair)[FEW if many else 0 : None if many else FEW]:
            said = [{"role": "user", "content": f"recite {fixture.id}"}]
            for stream in (False, True):
                assert_is(ask(client, said, fixture.tools, stream)[0], fixture)


def turns_of(pair: tuple[str, str | None]) -> list[Fixture]:
    """Five turns with one set of tools: four that call, and an answer."""
    with_calls = [each for each in recorded(pair) if each.expected and each.expected.tool_calls]
    tools = Counter(json.dumps(each.tools) for each in with_calls).most_common(1)[0][0]
    calling = [each for each in with_calls if json.dumps(each.tools) == tools]
    plain = [
        each for each in recorded(pair) if each.expected and not each.expected.tool_calls and each.expected.content
    ]
    return [*(calling * 4)[:4], *(plain or calling)[:1]]


def assert_is(found: ParseResult, fixture: Fixture) -> None:
    assert fixture.expected is not None
    wanted = checks.expected_as_result(fixture.expected)
    difference = checks.describe_difference(wanted, found)
    assert checks.compare(wanted, found).value in ("pass", "soft_pass"), (fixture.id, difference)


def results_for(num_calls: int, following: Fixture | None) -> list[str]:
    """What the functions return; the last one asks for the next turn."""
    return ["done"] * (num_calls - 1) + [f"recite {following.id}" if following else "done"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_five_turns(server: RunningServer, pair: tuple[str, str | None], kind: str, stream: bool) -> None:
    open_client, ask, results = KINDS[kind]
    turns = turns_of(pair)
    conversation: list[Any] = [{"role": "user", "content": f"recite {turns[0].id}"}]
    with open_client(server.port) as client:
        for fixture, following in zip(turns, [*turns[1:], None], strict=True):
            found, said, calls = ask(client, conversation, fixture.tools, stream)
            assert_is(found, fixture)
            returned = results_for(len(calls), following)
            conversation += [*said, *results([*zip(calls, returned, strict=bool(calls))])]
