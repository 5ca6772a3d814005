"""Logs as other programs write them: small ones in the forms that these document, with made text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.__main__ import main
from cache_builder.inputs import chat_formats, record
from cache_builder.inputs.record import FieldNames, InputError, InputRecord
from cache_builder.inputs.records import EncodedRecord, encode_record, read_sources
from cache_builder.inputs.sources import find_sources
from ssd.text.codec import Example, TextCodec
from tests.reference.text import chat_examples
from tests.tokenizers_for_tests import write_model_directory

ASK = {"role": "user", "content": "Where is the key?"}
SAY = {"role": "assistant", "content": "Under the mat."}
SYSTEM = {"role": "system", "content": "Answer briefly."}
CHOICES = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "gpt-x",
    "created": 1_760_000_000,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {**SAY, "tool_calls": None}}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "mat"}'}}
CLAUDE = {"model": "claude-x", "max_tokens": 64, "system": "Answer briefly.", "messages": [ASK]}
CLAUDE_SAYS = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "stop_reason": "end_turn",
    "content": [{"type": "text", "text": "Under the mat."}],
    "usage": {"input_tokens": 9, "output_tokens": 4},
}
LITELLM = {
    "id": "x",
    "trace_id": "t",
    "call_type": "acompletion",
    "status": "success",
    "startTime": 1.5,
    "endTime": 2.5,
    "model": "gpt-x",
    "cache_hit": None,
    "stream": False,
    "messages": [SYSTEM, ASK],
    "response": CHOICES,
    "model_parameters": {"temperature": 0.2},
    "metadata": {"user_api_key_alias": "a"},
    "error_str": None,
}
LANGFUSE = {
    "id": "o",
    "traceId": "t",
    "type": "GENERATION",
    "name": "answer",
    "startTime": "2026-01-01T00:00:00.000Z",
    "model": "gpt-x",
    "modelParameters": {"temperature": 0.2},
    "input": [SYSTEM, ASK],
    "output": SAY,
}


def node(
    name: str, parent: str | None, children: list[str], role: str = "", *parts: Any, **more: Any
) -> dict[str, Any]:
    content = {"content_type": "text", "parts": list(parts)}
    message = {"id": name, "author": {"role": role}, "content": content, "metadata": more} if role else None
    return {"id": name, "parent": parent, "children": children, "message": message}


CHATGPT = {
    "title": "Key",
    "create_time": 1_760_000_000.0,
    "conversation_id": "x",
    "current_node": "d",
    "mapping": {
        "r": node("r", None, ["s"]),
        "s": node("s", "r", ["a", "b"], "system", "", is_visually_hidden_from_conversation=True),
        "a": node("a", "s", ["c"], "user", "An edited question"),
        "c": node("c", "a", [], "assistant", "An answer that nobody sees"),
        "b": node("b", "s", ["t"], "user", {"content_type": "image_asset_pointer"}, "Where is the key?"),
        "t": node("t", "b", ["d"], "tool", "what a tool said"),
        "d": node("d", "t", [], "assistant", "Under the mat."),
    },
}
EXPORTED = {
    "uuid": "x",
    "name": "Key",
    "created_at": "2026-01-01T00:00:00Z",
    "account": {"uuid": "y"},
    "chat_messages": [
        {"uuid": "1", "sender": "human", "text": "Where is the key?", "content": [], "attachments": []},
        {"uuid": "2", "sender": "assistant", "text": "", "content": [{"type": "text", "text": "Under the mat."}]},
    ],
}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "output": [
        {"type": "reasoning", "id": "rs", "summary": []},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Under the mat.", "annotations": []}],
        },
    ],
}

CHATS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "litellm": (LITELLM, [SYSTEM, ASK]),
    "litellm, spend logs": (
        {
            "request_id": "x",
            "call_type": "acompletion",
            "messages": {},
            "response": json.dumps(CHOICES),
            "proxy_server_request": json.dumps({"model": "m", "messages": [SYSTEM, ASK]}),
        },
        [SYSTEM, ASK],
    ),
    "litellm, a text": ({**LITELLM, "messages": ASK["content"]}, [ASK]),
    "langfuse": (LANGFUSE, [SYSTEM, ASK]),
    "langfuse, from a bucket": (
        {
            "id": "o",
            "trace_id": "t",
            "type": "GENERATION",
            "input": json.dumps({"messages": [SYSTEM, ASK]}),
            "output": json.dumps(SAY),
        },
        [SYSTEM, ASK],
    ),
    "langfuse, a trace": (
        {"id": "t", "input": None, "observations": [{"type": "SPAN", "output": "x"}, LANGFUSE]},
        [SYSTEM, ASK],
    ),
    "langfuse, whole answers": ({**LANGFUSE, "output": CHOICES}, [SYSTEM, ASK]),
    "openai": ({"request": {"model": "m", "messages": [SYSTEM, ASK]}, "response": CHOICES}, [SYSTEM, ASK]),
    "openai, responses": (
        {"request": {"instructions": "Answer briefly.", "input": "Where is the key?"}, "response": RESPONSE},
        [SYSTEM, ASK],
    ),
    "openai, response items": (
        {
            "request": {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_text", "text": "Where is the key?"}],
                    }
                ]
            },
            "response": RESPONSE,
        },
        [ASK],
    ),
    "anthropic": ({"request": CLAUDE, "response": CLAUDE_SAYS}, [SYSTEM, ASK]),
    "chatgpt": (CHATGPT, [ASK]),
    "claude": (EXPORTED, [ASK]),
    "sharegpt": (
        {
            "id": "x",
            "conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": SAY["content"]}],
        },
        [ASK],
    ),
    "messages beside an answer": ({"messages": [ASK], "completion": "Under the mat."}, [ASK]),
    "ollama": ({"request": {"messages": [ASK]}, "response": {"message": SAY, "done": True}}, [ASK]),
}
TEXTS: dict[str, dict[str, Any]] = {
    "openai, completions": {"request": {"prompt": "the key is"}, "response": {"choices": [{"text": " under the mat"}]}},
    "a pair": {"prompt": "the key is", "completion": " under the mat"},
    "langfuse, texts": {**LANGFUSE, "input": "the key is", "output": " under the mat"},
    "ids": {"prompt": [5, 6, 7], "completion": " under the mat"},
    "text and response": {"prompt": "the key is", "response": " under the mat"},
}
UNANSWERED: dict[str, dict[str, Any]] = {
    "litellm, failed": {**LITELLM, "status": "failure", "response": None, "error_str": "timeout"},
    "litellm, redacted": {
        **LITELLM,
        "messages": [{"role": "user", "content": "redacted-by-litellm"}],
        "response": {"choices": [{"message": {**SAY, "content": "redacted-by-litellm"}}]},
    },
    "langfuse, a span": {**LANGFUSE, "type": "SPAN"},
    "batch, failed": {"custom_id": "1", "response": None, "error": {"code": "expired"}},
    "claude's batch, failed": {"custom_id": "1", "result": {"type": "errored", "error": {"type": "invalid_request"}}},
    "a request": {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [ASK]}},
    "a question": {"messages": [ASK]},
    "a chat that was never used": {"chat_messages": []},
    "an empty answer": {"request": {"messages": [ASK]}, "response": {"choices": []}},
}


def found_in(line: Any, codec: TextCodec, fields: FieldNames = record.DEFAULT_FIELD_NAMES) -> EncodedRecord:
    return encode_record(InputRecord("log:1", json.dumps(line), is_json=True), codec, fields)


@pytest.mark.parametrize("name", CHATS)
def test_a_chats_prompt_and_answer_are_both_found(name: str, codec: TextCodec) -> None:
    line, asked = CHATS[name]
    assert found_in(line, codec) == (chat_examples(codec, [*asked, SAY]), True, True)


@pytest.mark.parametrize("name", TEXTS)
def test_a_texts_prompt_and_answer_are_both_found(name: str, codec: TextCodec) -> None:
    expected = codec.encode_completion_example("the key is", " under the mat")
    if name == "ids":
        expected = codec.encode_answer_example([5, 6, 7], " under the mat")
    assert found_in(TEXTS[name], codec) == ([expected], True, True)


@pytest.mark.parametrize("name", UNANSWERED)
def test_what_says_no_answer_is_counted(name: str, codec: TextCodec) -> None:
    assert found_in(UNANSWERED[name], codec) == ([], True, False)


def test_an_answer_alone_is_known_for_one(codec: TextCodec) -> None:
    alone = [codec.encode_text_example("Under the mat.")]
    for line in (
        {"response": CHOICES},
        CHOICES,
        RESPONSE,
        {"custom_id": "1", "response": {"status_code": 200, "body": CHOICES}, "error": None},
        {"custom_id": "1", "result": {"type": "succeeded", "message": CLAUDE_SAYS}},
        {**LITELLM, "messages": []},
        {**LITELLM, "messages": [{"role": "user", "content": "redacted-by-litellm"}]},
    ):
        assert found_in(line, codec) == (alone, False, True)


INSTRUCTIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "alpaca": (
        {"instruction": "Translate.", "input": "The key", "output": "Under the mat."},
        [{"role": "user", "content": "Translate.\n\nThe key"}],
    ),
    "alpaca, no input": ({"instruction": "Where is the key?", "input": "", "output": "Under the mat."}, [ASK]),
    "alpaca, history": (
        {
            "instruction": "Where is the key?",
            "input": "",
            "output": "Under the mat.",
            "system": "Answer briefly.",
            "history": [["Hello", "Hi"], ["And?", "Yes"]],
        },
        [
            SYSTEM,
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Yes"},
            ASK,
        ],
    ),
    "dolly": (
        {"instruction": "Where?", "context": "A mat.", "response": "Under the mat.", "category": "qa"},
        [{"role": "user", "content": "Where?\n\nA mat."}],
    ),
    "openorca": (
        {"system_prompt": "Answer briefly.", "question": "Where is the key?", "response": "Under the mat."},
        [SYSTEM, ASK],
    ),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_instructions_prompt_has_all_its_fields(name: str, tmp_path: Path, codec: TextCodec) -> None:
    line, asked = INSTRUCTIONS[name]
    expected = (codec.encode_answer_example(codec.encode_chat(asked), "Under the mat."),)
    assert found_in(line, codec) == ([*expected], True, True)
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.Table.from_pylist([{**line, "other": 1}]), tmp_path / "rows.parquet")
    (row,) = read_sources(find_sources([str(tmp_path / "rows.parquet")]), lambda num_bytes: None)
    assert encode_record(row, codec).examples == [*expected]
    named = FieldNames.parse(["prompt=other", "completion=named"])
    plain = codec.encode_completion_example("a", "b")
    assert found_in({**line, "other": "a", "named": "b"}, codec, named).examples == [plain]


def chunk(**delta: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}


CHUNKS = [
    chunk(role="assistant", content=""),
    chunk(content="Under "),
    chunk(content="the mat."),
    {"id": "c", "choices": [], "usage": {"completion_tokens": 4}},
]
EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Under "}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "the mat."}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
]
ITEMS: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"id": "r", "output": []}},
    {"type": "response.output_text.delta", "delta": "Under "},
    {"type": "response.output_text.delta", "delta": "the mat."},
]
OLLAMA = [
    {"model": "m", "message": {"role": "assistant", "content": "Under "}, "done": False},
    {"model": "m", "message": {"role": "assistant", "content": "the mat."}, "done": False},
    {"model": "m", "message": {"role": "assistant", "content": ""}, "done": True},
]


def sse(chunks: list[dict[str, Any]], *, named: bool = False, end: str = "\n\n") -> str:
    return "".join(f"event: {each.get('type')}\n" * named + f"data: {json.dumps(each)}{end}" for each in chunks)


STREAMS: dict[str, Any] = {
    "sse": sse(CHUNKS) + "data: [DONE]\n\n",
    "sse, cut, with comments": ": PROCESSING\n\n" + sse(CHUNKS, end="\r\n\r\n")[:-9],
    "chunks": CHUNKS,
    "chunks, as text": json.dumps(CHUNKS),
    "lines": [line for line in sse(CHUNKS).split("\n") if line],
    "texts": list(map(json.dumps, CHUNKS)),
    "completions": sse(
        [{"object": "text_completion", "choices": [{"index": 0, "text": text}]} for text in ("Under ", "the mat.")]
    ),
    "anthropic": sse(EVENTS, named=True),
    "anthropic, events": EVENTS,
    "responses": sse(ITEMS, named=True),
    "responses, completed": sse([*ITEMS[:2], {"type": "response.completed", "response": RESPONSE}], named=True),
    "ollama": OLLAMA,
    "ollama, lines": "\n".join(map(json.dumps, OLLAMA)),
    "http": {"status": 200, "headers": {}, "body": sse(CHUNKS)},
    "http, json": {"status": 200, "body": json.dumps(CHOICES)},
    "har": {"status": 200, "content": {"mimeType": "application/json", "text": json.dumps(CHOICES)}},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_response_as_it_came_over_the_wire_is_its_answer(name: str, codec: TextCodec) -> None:
    expected = (chat_examples(codec, [ASK, SAY]), True, True)
    body = {"model": "m", "messages": [ASK], "stream": True}
    in_http = {"method": "POST", "headers": {}, "body": json.dumps(body)}
    in_har = {"method": "POST", "postData": {"mimeType": "application/json", "text": json.dumps(body)}}
    for request in (body, in_http, in_har):
        assert found_in({"request": request, "response": STREAMS[name]}, codec) == expected
    assert found_in({"request_body": json.dumps(body), "response_body": STREAMS[name]}, codec) == expected


def test_calls_and_thoughts_of_streams_are_joined() -> None:
    call = CALL["function"]
    pieces = [
        chunk(reasoning_content="Mats "),
        chunk(reasoning_content="hide keys."),
        chunk(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"where": '}}]),
        chunk(
            tool_calls=[
                {"index": 0, "function": {"arguments": '"mat"}'}},
                {"index": 1, "id": "c2", "function": {"name": "go", "arguments": "{}"}},
            ]
        ),
    ]
    (message,) = chat_formats.find_answers(sse(pieces))
    assert isinstance(message, dict) and message["reasoning_content"] == "Mats hide keys."
    assert [each["function"] for each in message["tool_calls"]] == [call, {"name": "go", "arguments": "{}"}]
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    events = [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Mats hide keys."}},
        {"type": "content_block_start", "index": 1, "content_block": use},
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": '{"where": '},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '"mat"}'}},
    ]
    (message,) = chat_formats.find_answers(sse(events, named=True))
    assert isinstance(message, dict) and message["reasoning_content"] == "Mats hide keys."
    assert [each["function"] for each in message["tool_calls"]] == [call]
    two = [{"choices": [{"index": number, "delta": {"content": text}}]} for number, text in enumerate("abab")]
    for each in two:
        each["choices"][0]["index"] %= 2  # type: ignore[operator]
    assert [message["content"] for message in chat_formats.find_answers(two) if isinstance(message, dict)] == [
        "aa",
        "bb",
    ]


@pytest.mark.parametrize(
    "response",
    [
        "upstream connect error or disconnect/reset before headers. reset reason: connection timeout",
        "<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>...</body></html>",
        "Internal Server Error",
        "504 Gateway Timeout",
        "404 page not found",
        '{"error": {"message": "overloaded", "type": "server_error", "code": 503}}',
        '{"detail": "Not Found"}',
        {"error": "model 'm' not found"},
        {"object": "error", "message": "too long", "code": 400},
        {"status": 503, "body": "no healthy upstream"},
        {"status_code": 500, "body": CHOICES},
        {"status": 200, "headers": {}, "body": "OK"},
        {"status": 200, "body": '{"choices": []}'},
        '{"choices": []}',
        'data: {"error": {"message": "overloaded"}}\n\n',
        "data: [DONE]\n\n",
    ],
)
def test_an_error_of_a_gateway_is_no_answer(response: Any, codec: TextCodec) -> None:
    assert found_in({"request": {"messages": [ASK]}, "response": response}, codec) == ([], True, False)


def test_a_record_that_says_that_it_failed_has_no_answer(codec: TextCodec) -> None:
    line = {"request": {"messages": [ASK]}, "response": "Try again later.", "response_status": 429}
    assert found_in(line, codec) == ([], True, False)
    assert found_in({**line, "response_status": 200}, codec).has_answer


def test_calls_of_sharegpt_are_calls(codec: TextCodec) -> None:
    tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    call = {"name": "look", "arguments": {"where": "mat"}}
    for called in (json.dumps(call), json.dumps([call]), json.dumps({"name": "look", "arguments": '{"where": "mat"}'})):
        turns = [
            {"from": "human", "value": ASK["content"]},
            {"from": "function_call", "value": called},
            {"from": "observation", "value": "a key"},
            {"from": "gpt", "value": SAY["content"]},
        ]
        openai = [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "a key"},
            SAY,
        ]
        found = found_in({"conversations": turns, "tools": json.dumps([tool])}, codec)
        assert found == found_in({"messages": openai, "tools": [{"type": "function", "function": tool}]}, codec)
        assert "<tool_call>" in codec.decode([*found.examples[0].token_ids[found.examples[0].prompt_length :]])
    turns[1]["value"] = "I cannot call."
    assert "I cannot call." in codec.decode([*found_in({"conversations": turns}, codec).examples[0].token_ids])


def test_json_that_a_model_wrote_stays_its_text(codec: TextCodec) -> None:
    said = '{"name": "key", "place": ["mat"]}'
    expected = [codec.encode_completion_example("the key is", said)]
    assert found_in({"prompt": "the key is", "completion": said}, codec).examples == expected
    assert found_in({**LANGFUSE, "input": "the key is", "output": said}, codec).examples == expected


def test_calls_are_written_as_the_template_writes_them(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}CALL "
        "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    codec = TextCodec.load(str(write_model_directory(tmp_path)), chat_template=template)
    result = {"role": "tool", "tool_call_id": "c1", "content": "a key"}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result, SAY]
    openai = found_in({"messages": turns}, codec).examples
    assert [codec.decode([*each.token_ids[each.prompt_length :]]) for each in openai] == [
        'CALL look {"where": "mat"}<|end|>',
        "Under the mat.<|end|>",
    ]
    use = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"where": "mat"}},
    ]
    back = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a key"}]}]
    asked = {**CLAUDE, "system": None, "messages": [ASK]}
    one = found_in({"request": asked, "response": {**CLAUDE_SAYS, "content": use}}, codec).examples
    asked["messages"] = [ASK, {"role": "assistant", "content": use}, {"role": "user", "content": back}]
    two = found_in({"request": asked, "response": CLAUDE_SAYS}, codec).examples
    assert [*one, *two] == openai


def test_what_a_model_thought_is_written_as_the_template_writes_it(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    codec = TextCodec.load(str(write_model_directory(tmp_path)), chat_template=template)
    said = {"index": 0, "message": {**SAY, "reasoning_content": "Mats hide keys."}}
    thought = {"type": "thinking", "thinking": "Mats hide keys.", "signature": ""}
    blocks = [thought, {"type": "text", "text": "Under the mat."}]
    for line in (
        {"messages": [ASK], "response": {**CHOICES, "choices": [said]}},
        {"messages": [ASK, {**SAY, "reasoning": "Mats hide keys."}]},
        {"request": {**CLAUDE, "system": None}, "response": {**CLAUDE_SAYS, "content": blocks}},
    ):
        (example,) = found_in(line, codec).examples
        prompt, answer = example.token_ids[: example.prompt_length], example.token_ids[example.prompt_length :]
        assert codec.decode([*prompt]).endswith("<|assistant|>")
        assert codec.decode([*answer]) == "<think>Mats hide keys.</think>Under the mat.<|end|>"


def test_tools_are_told_and_called_in_words_where_the_template_knows_of_none(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    codec = TextCodec.load(str(write_model_directory(tmp_path)), chat_template=template)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "a key"}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result, SAY]
    one, two = found_in({"messages": turns, "tools": [tool]}, codec).examples
    told = codec.encode_chat([ASK], template_kwargs={"tools": [tool]}, tools_in_words=True)
    assert one.token_ids[: one.prompt_length] == told and "<tools>" in codec.decode(told)
    called = '<tool_call>\n{"name": "look", "arguments": {"where": "mat"}}\n</tool_call><|end|>'
    assert codec.decode([*one.token_ids[one.prompt_length :]]) == called
    assert "<tool_response>\na key\n</tool_response>" in codec.decode([*two.token_ids[: two.prompt_length]])


def test_claudes_batches_are_joined_and_their_tools_are_known(tmp_path: Path, codec: TextCodec) -> None:
    request = {"custom_id": "a", "params": CLAUDE}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    result = {"custom_id": "a", "result": {"type": "succeeded", "message": CLAUDE_SAYS}}
    (tmp_path / "results.jsonl").write_text(json.dumps(result) + "\n")
    (joined,) = read_sources(find_sources([str(tmp_path)]), lambda num_bytes: None)
    assert encode_record(joined, codec).examples == chat_examples(codec, [SYSTEM, ASK, SAY])
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    (exchange,) = chat_formats.parse_exchanges({"request": {**CLAUDE, "tools": [tool]}, "response": CLAUDE_SAYS}) or []
    assert exchange.tools == [
        {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
    ]


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ({"prompt": "the key is", "completion": " under the mat", "params": {"temperature": 0.7}}, []),
        ({"prompt": "the key is", "completion": " under the mat", "body": "Ticket 4"}, []),
        ({"prompt": "the key is", "completion": " under the mat", "response": None}, []),
        ({"q": "the key is", "a": " under the mat", "body": {"prompt": "no"}, "messages": [ASK]}, ["q", "a"]),
        ({"q": "the key is", "a": " under the mat", "mapping": {}, "response": "no", "text": "no"}, ["q", "a"]),
    ],
)
def test_what_means_something_else_takes_no_prompts_place(line: Any, fields: list[str], codec: TextCodec) -> None:
    names = FieldNames.parse([f"{ours}={its}" for ours, its in zip(("prompt", "completion"), fields, strict=False)])
    expected = codec.encode_completion_example("the key is", " under the mat")
    assert found_in(line, codec, names) == ([expected], True, True)


def test_a_text_that_is_named_is_all_that_is_read(codec: TextCodec) -> None:
    for more in ({"params": {"seed": 4}}, {"body": "Ticket 4"}):
        assert found_in({"text": "Once", **more}, codec).examples == [codec.encode_text_example("Once")]
    line = {"story": "Once", "messages": [ASK, SAY], "prompt": "a", "completion": "b"}
    assert found_in(line, codec, FieldNames.parse(["story"])).examples == [codec.encode_text_example("Once")]


def test_other_names_of_roles_and_texts_are_read(codec: TextCodec) -> None:
    parts = [{"type": "text", "value": ASK["content"]}]
    chain = [{"type": "system", "content": SYSTEM["content"]}, {"type": "human", "content": ASK["content"]}]
    for line, asked in (
        ({"messages": [{"role": "user", "content": parts}, SAY]}, [ASK]),
        ({**LANGFUSE, "input": chain, "output": {"type": "ai", "content": SAY["content"]}}, [SYSTEM, ASK]),
    ):
        assert found_in(line, codec).examples == chat_examples(codec, [*asked, SAY])
    call = {"name": "look", "args": {"where": "mat"}, "id": "c1", "type": "tool_call"}
    calls = [*chain, {"type": "ai", "content": "", "tool_calls": [call]}, {"type": "tool", "content": "a key"}]
    (exchange,) = chat_formats.parse_exchanges({**LANGFUSE, "input": calls}) or []
    assert isinstance(exchange.prompt, list) and [each["role"] for each in exchange.prompt[2:]] == ["assistant", "tool"]
    assert exchange.prompt[2]["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": {"raw": "q", "label": "l"}, "response": {"output": "a"}},
            '"prompt" must be .* with the keys "raw", "label"',
        ),
        ({"input": [{"message": ASK}, {"type": "x"}], "output": "a"}, '"input".0. has no "role" .its keys: "message"'),
        ({"messages": [{"message": ASK}]}, '"messages".0. has no "role" .its keys: "message"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "image": "x"}]}, SAY]},
            "messages.0..content.0. is",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_name_of_its_field(line: Any, message: str, codec: TextCodec) -> None:
    with pytest.raises(InputError, match=f"^log:1: {message}"):
        found_in(line, codec)


def test_a_build_says_what_records_lack_and_a_table_holds_what_lines_hold(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    lines = [{"custom_id": str(n), "response": {"body": CHOICES}} for n in range(5)] + [UNANSWERED["batch, failed"]]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--tokenizer", str(model), "--out", str(tmp_path / "warm")]
    assert main(["build", str(tmp_path / "out.jsonl"), *options]) == 0
    said = capsys.readouterr().out
    assert "5 of 6 records had no prompt" in said and "1 of 6 records had no answer" in said
    assert main(["build", str(tmp_path / "out.jsonl"), *options, "--force", "--quiet"]) == 0
    rows = [{"messages": json.dumps([ASK]), "response": json.dumps(CHOICES), "spend": 0.1}] * 3
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "spend.parquet")
    assert main(["build", str(tmp_path / "spend.parquet"), *options, "--force"]) == 0
    assert "3 records, namespace default\n" in capsys.readouterr().out


KEYS = sorted(
    {
        *record.COLUMNS,
        *chat_formats.PROMPT_KEYS,
        *chat_formats.ANSWER_KEYS,
        "role",
        "content",
        "choices",
        "message",
        "text",
        "tool_calls",
        "function_call",
        "name",
        "arguments",
        "author",
        "parts",
        "parent",
        "children",
        "sender",
        "from",
        "value",
        "custom_id",
        "log",
    }
)
LEAVES = st.sampled_from(
    [
        None,
        True,
        0,
        3,
        -1.5,
        "",
        "a",
        "user",
        "assistant",
        "{}",
        "[]",
        '{"role": "user"}',
        '[{"a":1}]',
        "tool_use",
        "tool_result",
        "message",
        "function_call",
        "vllm",
    ]
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_any_record_is_understood_or_refused(codec: TextCodec, line: dict[str, Any]) -> None:
    try:
        found = found_in(line, codec)
    except InputError as error:
        assert str(error).startswith("log:1")
        return
    assert found.has_answer == bool(found.examples) or isinstance(found.examples[0], Example)
    assert all(0 <= each.prompt_length <= len(each.token_ids) for each in found.examples)
