"""Sessions of coding agents and spans of OpenTelemetry: small ones in the forms that these programs write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache_builder.inputs.record import FieldNames, InputError, InputRecord
from cache_builder.inputs.records import encode_record, read_sources
from cache_builder.inputs.sources import find_sources, split_source
from ssd.text.codec import TextCodec
from tests.reference.text import chat_examples
from tests.tokenizers_for_tests import write_model_directory

ASK = {"role": "user", "content": "Where is the key?"}
SAY = {"role": "assistant", "content": "Under the mat."}
AGAIN = {"role": "user", "content": "And the door?"}
OPEN = {"role": "assistant", "content": "It is open."}
CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def call(number: int, **arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def texts_in(tmp_path: Path, *lines: Any) -> list[list[tuple[str, str]]]:
    """Prompt and answer of every example of each record of a file of these lines."""
    codec = TextCodec.load(str(write_model_directory(tmp_path / "model")), chat_template=CALLS)
    path = tmp_path / "session.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (source,) = find_sources([str(path)])
    found = [encode_record(record, codec).examples for record in read_sources([source], lambda num_bytes: None)]
    return [
        [
            (
                codec.decode([*each.token_ids[: each.prompt_length]]),
                codec.decode([*each.token_ids[each.prompt_length :]]),
            )
            for each in examples
        ]
        for examples in found
    ]


def expected(tmp_path: Path, *messages: Any) -> list[list[tuple[str, str]]]:
    """The same of one record with these messages."""
    return texts_in(tmp_path, {"messages": [*messages]})


def claude(
    kind: str, uuid: str, parent: str | None, content: Any, id: str | None = None, **more: Any
) -> dict[str, Any]:
    message = {"role": kind, "content": content, **({"id": id, "type": "message", "model": "m"} if id else {})}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "cwd": "/w", "message": message, **more}


def use(number: int, where: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"c{number}", "name": "look", "input": {"where": where}}


def back(number: int, text: str) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": f"c{number}", "content": text}]


CLAUDE = [
    {"type": "file-history-snapshot", "messageId": "x", "snapshot": {}},
    claude("user", "a", None, "Where is the key?"),
    claude("assistant", "b", "a", [{"type": "text", "text": "I look."}], "m1"),
    claude("assistant", "c", "b", [use(1, "mat")], "m1"),
    claude("assistant", "d", "c", [use(2, "door")], "m1"),
    claude("user", "e", "c", back(1, "a key"), toolUseResult="a key"),
    {"type": "progress", "uuid": "p", "parentUuid": "d", "sessionId": "s"},
    claude("user", "f", "p", back(2, "open")),
    claude("assistant", "g", "f", [{"type": "text", "text": "Under the mat."}], "m2"),
    {"type": "system", "uuid": "h", "parentUuid": "g", "sessionId": "s", "subtype": "turn_duration"},
]
TOOL_TURNS = [
    ASK,
    {"role": "assistant", "content": "I look.", "tool_calls": [call(1, where="mat"), call(2, where="door")]},
    result(1, "a key"),
    result(2, "open"),
    SAY,
]


def test_a_session_of_claude_code_is_a_conversation(tmp_path: Path) -> None:
    assert texts_in(tmp_path, *CLAUDE) == expected(tmp_path, *TOOL_TURNS)
    more = [
        claude("user", "i", "h", "And the dor?"),
        claude("assistant", "j", "i", [{"type": "text", "text": "What is a dor?"}], "m3"),
        claude("user", "k", "h", "And the door?"),  # said again instead
        claude("assistant", "l", "k", "API Error: 529", isApiErrorMessage=True),
        claude("assistant", "m", "k", [{"type": "text", "text": "It is open."}], "m4"),
    ]
    assert texts_in(tmp_path, *CLAUDE, *more) == expected(tmp_path, *TOOL_TURNS, AGAIN, OPEN)


def test_agents_and_summaries_are_conversations_of_their_own(tmp_path: Path) -> None:
    agent = [
        claude("user", "1", None, "And the door?", isSidechain=True),
        claude("assistant", "2", "1", [{"type": "text", "text": "It is open."}], "n1", isSidechain=True),
    ]
    mixed = [*CLAUDE[:4], agent[0], *CLAUDE[4:7], agent[1], *CLAUDE[7:]]
    assert texts_in(tmp_path, *mixed) == expected(tmp_path, *TOOL_TURNS) + expected(tmp_path, AGAIN, OPEN)
    summary = [{"type": "summary", "summary": "Keys", "leafUuid": "a"}, *agent]
    assert texts_in(tmp_path, *summary) == expected(tmp_path, AGAIN, OPEN)


def codex(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00Z", "type": kind, "payload": payload}


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX = [
    codex("session_meta", id="s", cwd="/w", base_instructions={"text": "Answer briefly."}),
    codex("response_item", **said("user", "Where is the key?")),
    codex("event_msg", type="user_message", message="Where is the key?"),
    codex("response_item", type="reasoning", summary=[], encrypted_content="x"),
    codex("response_item", **said("assistant", "I look.")),
    codex("response_item", type="function_call", name="look", arguments='{"where": "mat"}', call_id="c1"),
    codex("response_item", type="custom_tool_call", name="look", input="door", call_id="c2"),
    codex("response_item", type="function_call_output", call_id="c1", output="a key"),
    codex("response_item", type="custom_tool_call_output", call_id="c2", output={"content": "open", "success": True}),
    codex("response_item", **said("assistant", "Under the mat.")),
]


def test_a_session_of_codex_is_a_conversation(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Answer briefly."}
    calls = {"role": "assistant", "content": "I look.", "tool_calls": [call(1, where="mat"), call(2, input="door")]}
    turns = [system, ASK, calls, *TOOL_TURNS[2:]]
    assert texts_in(tmp_path, *CODEX) == expected(tmp_path, *turns)
    after = [
        codex("compacted", message="", replacement_history=[said("user", "Where is the key?")]),
        codex("response_item", **said("user", "And the door?")),
        codex("response_item", **said("assistant", "It is open.")),
    ]
    second = expected(tmp_path, system, ASK, AGAIN, OPEN)
    assert texts_in(tmp_path, *CODEX, *after) == expected(tmp_path, *turns) + second


def test_a_session_is_read_whole_and_its_faults_are_told(tmp_path: Path, codec: TextCodec) -> None:
    path = tmp_path / "session.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in CLAUDE))
    (source,) = find_sources([str(path)])
    assert split_source(source, 10) == [(source, path.stat().st_size)]
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(InputError, match=r"session\.jsonl:11: the line is not JSON"):
        [encode_record(record, codec) for record in read_sources([source], lambda num_bytes: None)]
    path.write_text(json.dumps(CLAUDE[0]))
    with pytest.raises(InputError, match=r"session\.jsonl:1: .* has no message"):
        list(read_sources([source], lambda num_bytes: None))
    line = {"type": "user", "sessionId": "s", "prompt": "a", "completion": "b"}
    path.write_text(json.dumps(line))
    (record,) = read_sources([source], lambda num_bytes: None)
    assert encode_record(record, codec).examples == [codec.encode_completion_example("a", "b")]


SYSTEM = {"role": "system", "content": "Answer briefly."}
PARTS = [{"role": "user", "parts": [{"type": "text", "content": "Where is the key?"}]}]
PARTS_SAID = [{"role": "assistant", "parts": [{"type": "text", "content": "Under the mat."}], "finish_reason": "stop"}]
NEW = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.input.messages": json.dumps(PARTS),
    "gen_ai.output.messages": json.dumps(PARTS_SAID),
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Answer briefly."}]),
}
OLD = {
    "llm.request.type": "chat",
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Answer briefly.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "Where is the key?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "Under the mat.",
    "gen_ai.completion.0.finish_reason": "stop",
}
IDS = {"trace_id": "t", "span_id": "s", "name": "chat m"}


def otlp(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]


SPANS: dict[str, dict[str, Any]] = {
    "openllmetry": {**IDS, "attributes": OLD},
    "standard": {**IDS, "attributes": NEW},
    "standard, not as text": {
        **IDS,
        "attributes": {**NEW, "gen_ai.input.messages": PARTS, "gen_ai.output.messages": PARTS_SAID},
    },
    "nested": {"attributes": {"gen_ai": {"prompt": [SYSTEM, ASK], "completion": [SAY]}}},
    "events": {
        **IDS,
        "attributes": {"gen_ai.system": "openai"},
        "events": [
            {"name": "gen_ai.content.prompt", "attributes": {"gen_ai.prompt": json.dumps([SYSTEM, ASK])}},
            {"name": "gen_ai.content.completion", "attributes": {"gen_ai.completion": json.dumps([SAY])}},
        ],
    },
    "otlp": {
        "resourceSpans": [
            {
                "scopeSpans": [
                    {
                        "spans": [
                            {
                                "traceId": "t",
                                "spanId": "r",
                                "name": "GET /",
                                "attributes": otlp({"http.method": "GET"}),
                            },
                            {"traceId": "t", "spanId": "s", "name": "chat", "attributes": otlp(OLD)},
                        ]
                    }
                ]
            }
        ]
    },
}


@pytest.mark.parametrize("name", SPANS)
def test_a_span_of_a_call_has_its_prompt_and_its_answer(name: str, codec: TextCodec) -> None:
    found = encode_record(InputRecord("log:1", json.dumps(SPANS[name]), is_json=True), codec)
    assert found == (chat_examples(codec, [SYSTEM, ASK, SAY]), True, True)


def test_calls_of_tools_in_spans_are_calls(tmp_path: Path) -> None:
    named = {"id": "c1", "name": "look", "arguments": '{"where": "mat"}'}
    old = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "Where is the key?",
        "gen_ai.prompt.1.role": "assistant",
        **{f"gen_ai.prompt.1.tool_calls.0.{key}": each for key, each in named.items()},
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.content": "a key",
        "gen_ai.prompt.2.tool_call_id": "c1",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "Under the mat.",
    }
    parts = [
        *PARTS,
        {"role": "assistant", "parts": [{"type": "tool_call", **named, "arguments": {"where": "mat"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "a key"}]},
    ]
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [call(1, where="mat")]}, result(1, "a key")]
    for attributes in (old, {**NEW, "gen_ai.input.messages": parts, "gen_ai.system_instructions": []}):
        found = texts_in(tmp_path, {**IDS, "attributes": attributes})
        assert found == [expected(tmp_path, *turns, SAY)[0][1:]]


def test_spans_of_something_else_say_no_answer(codec: TextCodec) -> None:
    for attributes in ({"http.method": "GET"}, {**NEW, "gen_ai.operation.name": "invoke_agent"}):
        record = InputRecord("log:1", json.dumps({**IDS, "attributes": attributes}), is_json=True)
        assert encode_record(record, codec) == ([], True, False)


PAIR = {"prompt": [ASK], "chosen": [SAY], "rejected": [OPEN]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (PAIR, "a pair of answers"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a pair of answers"),
        ({"conversations": [{"from": "human", "value": "a"}], "chosen": {}, "rejected": {}}, "a pair of answers"),
        (
            {"input": {"messages": [ASK]}, "preferred_output": [SAY], "non_preferred_output": [OPEN]},
            "a pair of answers",
        ),
        ({"run_type": "llm", "inputs": {"messages": []}, "outputs": {}}, "a run of LangSmith"),
        ({"answer_id": "a", "choices": [{"index": 0, "turns": ["a", "b"]}]}, "an answer of MT-bench"),
        ({"parent_id": None, "role": "prompter", "text": "a"}, "a message of a tree"),
        ({**IDS, "attributes": {"llm": {"input_messages": []}}}, "a span of OpenInference"),
        ({**IDS, "attributes": {"llm.input_messages.0.message.role": "user"}}, "a span of OpenInference"),
    ],
)
def test_what_is_known_and_not_read_is_refused_by_name(line: Any, message: str, codec: TextCodec) -> None:
    with pytest.raises(InputError, match=f"^log:1: {message}.* is not supported: give "):
        encode_record(InputRecord("log:1", json.dumps(line), is_json=True), codec)


def test_the_preferred_answer_may_be_named(codec: TextCodec) -> None:
    fields = FieldNames.parse(["messages=prompt", "completion=chosen"])
    found = encode_record(InputRecord("log:1", json.dumps(PAIR), is_json=True), codec, fields)
    assert found.examples == chat_examples(codec, [ASK, SAY])


@pytest.mark.parametrize(
    "line",
    [
        {"traj": [ASK, SAY], "reward": 1.0},
        {"conversation": [{**ASK, "language": "English"}, SAY], "turn": 1},
        {"environment": "e", "trajectory": [{"action": "ls", "response": "x"}], "history": [ASK, SAY], "info": {}},
        {"id": 1, "input": "Where is the key?", "messages": [ASK, SAY], "output": {"choices": [{"message": SAY}]}},
    ],
)
def test_the_one_list_of_messages_is_a_conversation_whatever_it_is_called(line: Any, codec: TextCodec) -> None:
    found = encode_record(InputRecord("log:1", json.dumps(line), is_json=True), codec)
    assert found.examples == chat_examples(codec, [ASK, SAY])
    twice = {"a": [ASK, SAY], "b": [ASK, OPEN]}
    with pytest.raises(InputError, match="no usable fields"):
        encode_record(InputRecord("log:1", json.dumps(twice), is_json=True), codec)
