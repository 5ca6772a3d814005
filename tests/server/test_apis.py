"""What holds whichever way one asks: ids, the same answer whole and streamed, failures, refusals by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.apis import APIS, CHAT, INPUT, MESSAGES, RESPONSES, Api
from tests.server.client import ask, get, official_client
from tests.server.failing_engine import FailingEngine, RefusingEngine, RunningServer, serving

MODELS = ("maker/a-model", "short", "a/b/c")


@pytest.fixture(scope="module")
def quick() -> Iterator[RunningServer]:
    with serving(lambda _: FailingEngine(step_s=0.01), model_names=MODELS) as running:
        yield running


# -- answers -----------------------------------------------------------------------------------------------------------


def test_every_way_to_ask_for_an_answer_gets_the_same_whole_and_streamed(server: RunningServer) -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": INPUT}]
    usages, texts = set(), set()
    for api, fields in (
        (CHAT, {"messages": turns}),
        (RESPONSES, {"instructions": "Be short."}),
        (MESSAGES, {"system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]}),
    ):
        whole, events = api.say(server.port, **fields), api.stream(server.port, **fields)
        texts |= {api.said(whole), "".join(api.piece(event) or "" for event in events)}
        usage = whole["usage"]
        asked = usage.get("prompt_tokens", usage.get("input_tokens")) + usage.get("cache_read_input_tokens", 0)
        made = usage.get("completion_tokens", usage.get("output_tokens"))
        assert usage.get("total_tokens", asked + made) == asked + made
        usages.add((asked, made))
        assert whole["model"] == "test-model"
    assert len(texts) == len(usages) == 1


FAILURES = {
    "completions": lambda last: last["error"]["code"] == "engine_failed",
    "chat": lambda last: last["error"]["code"] == "engine_failed",
    "responses": lambda last: (
        last["type"] == "response.failed"
        and (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
        and RESPONSES.said(last["response"]) == "fe"
    ),
    "messages": lambda last: (last["type"], last["error"]["type"]) == ("error", "api_error"),
}


@pytest.mark.parametrize("name", APIS)
def test_a_failure_in_a_stream_is_its_last_event(name: str) -> None:
    with serving(lambda _: FailingEngine(fail_at_step=3)) as running:
        *events, last = APIS[name].stream(running.port, "abcdef")
    assert "".join(APIS[name].piece(event) or "" for event in events) == "fe"
    assert FAILURES[name](last)


@pytest.mark.parametrize("name", APIS)
def test_a_refusal_behind_the_first_token_names_the_field_that_was_sent(name: str) -> None:
    """Streamed and not, obfuscated or not."""
    api, field = APIS[name], {"responses": "text", "messages": "output_config"}.get(name, "response_format")
    with serving(lambda _: RefusingEngine({0}), obfuscation_interval_s=0) as running:
        whole = api.post(running.port, "abc")
        assert whole.status == 400
        errors = [whole.json["error"]]
        for wants in (False, True):
            last = api.stream(running.port, "abc", stream_options={"include_obfuscation": wants})[-1]
            errors.append(last["response"]["error"] if name == "responses" else last["error"])
    for error in errors:
        assert error["message"].startswith(f"{field} came to a dead end")
        assert error.get("param", field) == field


@pytest.mark.parametrize("name", ["completions", "chat"])
def test_choices_that_can_be_followed_are_answered(name: str) -> None:
    api = APIS[name]
    with serving(lambda _: RefusingEngine({1}), obfuscation_interval_s=0) as running:
        choices = api.post(running.port, "abc", n=3, max_tokens=3).json["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length", "error", "length"]
        assert [api.said({"choices": [choice]}) for choice in choices] == ["cba", "c", "cba"]
        assert [choice.get("error", {}).get("param") for choice in choices] == [None, "response_format", None]
        for wants in (False, True):
            options = {"include_obfuscation": wants}
            fields: dict[str, Any] = {"n": 3, "max_tokens": 3, "stream": True, "stream_options": options}
            events = api.post(running.port, "abc", **fields).events
            ended = {each["index"]: each for event in events for each in event["choices"] if each["finish_reason"]}
            assert [ended[index]["finish_reason"] for index in range(3)] == ["length", "error", "length"]
            assert ended[1]["error"] == choices[1]["error"]
    with serving(lambda _: RefusingEngine({0, 1})) as running:
        refused = api.post(running.port, "abc", n=2)
        assert (refused.status, refused.error["param"]) == (400, "response_format")


@pytest.mark.parametrize("name", APIS)
def test_a_silent_stream_is_kept_alive(name: str) -> None:
    with serving(lambda _: FailingEngine(step_s=0.3), keep_alive_s=0.1) as running:
        answer = APIS[name].post(running.port, "ab", stream=True, **{APIS[name].limit: 2})
    assert "".join(APIS[name].piece(event) or "" for event in APIS[name].read(answer)) == "ba"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n' if name == "messages" else b": keep-alive\n\n"
    assert ping in answer.content
    assert not answer.content.startswith(ping) or name in ("completions", "chat"), "it begins at once"


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_an_answer_is_named_after_its_request(quick: RunningServer, api: Api) -> None:
    headers = {"x-request-id": "trace-1/2:3"}
    whole, stream = (api.post(quick.port, "abc", headers=headers, stream=stream) for stream in (False, True))
    assert (whole.status, whole.json["id"]) == (200, f"{api.prefix}trace-1/2:3")
    assert whole.headers["x-request-id"] == stream.headers["x-request-id"] == "trace-1/2:3"
    assert f'"id":"{api.prefix}trace-1/2:3"'.encode() in stream.content
    made = api.post(quick.port, "abc")
    assert made.json["id"] == api.prefix + made.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 400),
        ("POST", "/v1/responses", 400),
        ("POST", "/v1/messages", 400),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/responses/resp_1", 404),
        ("GET", "/health", 200),
        ("GET", "/v1/models/nobody", 404),
    ],
)
def test_whatever_is_answered_has_the_id(quick: RunningServer, method: str, path: str, status: int) -> None:
    answer = ask(quick.port, method, path, {} if method == "POST" else None, headers={"x-request-id": "mine"})
    assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")


@pytest.mark.parametrize("given", ["", "two words", "é".encode().decode("latin-1"), "x" * 129])
def test_what_is_no_id_is_replaced_by_one(quick: RunningServer, given: str) -> None:
    answer = get(quick.port, "/live", headers={"x-request-id": given})
    assert answer.headers["x-request-id"].startswith("req_")


def test_models_are_found_by_names_with_slashes(quick: RunningServer) -> None:
    with official_client(quick.port) as client:
        for name in MODELS:
            assert client.models.retrieve(name).id == name
    assert get(quick.port, "/v1/models/maker%2Fa-model").json["id"] == "maker/a-model"
    assert get(quick.port, "/v1/models/maker").status == 404


# -- refusals ----------------------------------------------------------------------------------------------------------

Refusal = tuple[str, str, Any]
"""Ways to ask, a field, what it is given."""
TIME = {"type": "custom", "name": "get_time", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USER = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
BOTH = "completions chat"
NO_PROMPTS: list[Any] = [[], [[]], [1, "a"], [[1], 2], [True], 7, None, "", [1 << 40], [-1]]
NO_FLAGS: list[Any] = ["no", 1, [], {}]
OF_A_FIELD: list[Refusal] = [
    *(
        (BOTH, name, value)
        for name, value in (
            ("logprobs", 21),
            ("top_logprobs", 30),
            ("prompt_logprobs", 21),
            ("prompt_logprobs", -1),
            ("suffix", "end"),
            ("best_of", 2),
            ("tools", [{"type": "function"}]),
            ("chat_template", "{{ 1 }}"),
            ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
            ("functions", [{"name": "f"}]),
            ("tool_choice", "required"),
            ("response_format", {"type": "grammar"}),
            ("response_format", {"type": "json_schema"}),
            ("structured_outputs", {}),
            ("modalities", ["audio"]),
            ("audio", {"voice": "x"}),
            ("prediction", {"type": "content"}),
            ("guided_json", {}),
            ("bad_words", [""]),
            ("truncate_prompt_tokens", 5),
            ("use_beam_search", True),
            ("no_such_field", 1),
            ("max_tokens", -1),
            ("max_tokens", 0),
            ("max_tokens", "5"),
            ("temperature", -0.1),
            ("temperature", 2.5),
            ("temperature", True),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("top_k", -2),
            ("min_p", 2.0),
            ("repetition_penalty", 0.0),
            ("presence_penalty", 3.0),
            ("frequency_penalty", -3.0),
            ("n", 0),
            ("n", 1000),
            ("seed", 1 << 64),
            ("stop", ""),
            ("stop", ["x"] * 200),
            ("min_tokens", -1),
            ("logit_bias", {"x": 1.0}),
            ("logit_bias", {"1": 1000.0}),
            ("stream", "yes"),
            ("stream_options", {"include_usage": True}),
            ("cache_salt", ""),
            ("model", 5),
            ("allowed_token_ids", [99999999]),
            ("logit_bias", {"99999999": 1}),
            ("stop_token_ids", [99999999]),
            ("num_speculative_tokens", -1),
            ("num_speculative_tokens", 129),
            ("allowed_token_ids", [1] * ((1 << 17) + 1)),
            ("bad_words", ["x"] * 1001),
            ("bad_words", ["x" * 16_385]),
            ("logit_bias", {str(token): 1 for token in range(1025)}),
            ("stop", ["x" * 4000, "y" * 97]),
            ("structured_outputs", {"regex": "x" * 8193}),
            ("structured_outputs", {"choice": ["x" * (1 << 16)]}),
        )
    ),
    *(("completions", "logit_bias", {key: 1.0}) for key in ("007", "", "+1", "1.0", "\u0661", "9" * 5000, "-1", " 1")),
    ("completions", "prompt", ["x"] * 1025),
    ("chat", "tools", [{**FUNCTION, "function": {"name": f"f{number}"}} for number in range(513)]),
    ("chat", "tools", [{**FUNCTION, "function": {"name": "f", "description": "x" * (1 << 18)}}]),
    *(("completions", "prompt", value) for value in NO_PROMPTS),
    *((" ".join(APIS), "coupled", value) for value in NO_FLAGS),
    ("completions", "messages", [USER]),
    ("completions", "logprobs", True),
    *(
        ("chat", "messages", value)
        for value in (
            None,
            ["x"],
            [{"role": "nobody", "content": "x"}],
            [{"content": "x"}],
            [{**USER, "content": 5}],
        )
    ),
    ("chat", "prompt", "hello"),
    ("chat", "max_completion_tokens", 0),
    ("chat", "add_special_tokens", True),
    ("chat", "top_logprobs", 2),
    ("chat", "echo", True),
    ("chat", "min_tokens", 17),
    *(
        ("responses", "input", value)
        for value in (
            [],
            ["x"] * 5000,
            [{"type": "computer_call", "id": "x"}],
            [{"role": "nobody", "content": "x"}],
            [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}],
        )
    ),
    *(
        ("responses", name, value)
        for name, value in (
            ("previous_response_id", "resp_1"),
            ("conversation", "conv_1"),
            ("background", True),
            ("prompt", {"id": "pmpt_1"}),
            ("truncation", "auto"),
            ("tools", [{"type": "file_search"}]),
            ("tool_choice", {"type": "file_search"}),
            ("tool_choice", "required"),
            ("include", ["everything"]),
            ("top_logprobs", 30),
            ("text", {"format": {"type": "json_schema", "name": "x"}}),
            ("temperature", 5),
            ("n", 2),
            ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}),
            ("stream_options", {"include_obfuscation": True}),
        )
    ),
    *(
        ("messages", name, value)
        for name, value in (
            ("messages", [{**USER, "content": []}]),
            ("messages", 5000 * [USER]),
            ("max_tokens", None),
            ("max_tokens", 0),
            ("tool_choice", {"type": "any"}),
            ("stop_sequences", ["x" * 5000]),
            ("thinking", {"type": "sometimes"}),
            ("output_config", {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}),
            ("mcp_servers", [{"name": "x"}]),
            ("container", "x"),
            ("thread", {"type": "create"}),
            ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
            ("stream_options", {"include_obfuscation": True}),
        )
    ),
]


@pytest.mark.parametrize(("ways", "field", "value"), OF_A_FIELD)
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(
    server: RunningServer, ways: str, field: str, value: Any
) -> None:
    for way in ways.split():
        assert_refused(server, way, {field: value}, field, field)


WITHIN: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
    ("chat", {"stream": True, "stream_options": {"every": 2}}, "stream_options.every", ""),
    ("chat", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", ""),
    (
        "chat",
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "",
    ),
    ("chat", {"tools": [{"type": "function", "name": "f"}]}, "tools", "tools[0]: function.name is missing"),
    ("chat", {"tools": [FUNCTION], "tool_choice": {**FUNCTION, "x": 1}}, "tool_choice.x", "'tool_choice.x'"),
    (
        "chat",
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": 5}}},
        "tool_choice",
        "tool_choice.function.name must be a string",
    ),
    ("chat", {"tools": [FUNCTION], "tool_choice": {"type": "custom"}}, "tool_choice", "types 'function'"),
    ("chat", {"tools": [FUNCTION], "tool_choice": 5}, "tool_choice", "'none', 'auto' or 'required' or an object"),
    ("chat", {"tools": [FUNCTION, FUNCTION]}, "tools", "tools: two functions have the name 'f'"),
    ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools", "'tools[0].function.name' is required"),
    ("chat", {"stop": [5]}, "stop", "stop[0] must be a string"),
    ("chat", {"stop": [""]}, "stop", "stop must be non-empty strings, got ''"),
    ("chat", {"allowed_token_ids": []}, "allowed_token_ids", "got an empty list"),
    ("chat", {"messages": []}, "messages", "messages must have at least 1 item"),
    ("chat", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got 2 of them"),
    (
        "responses",
        {"input": [{"type": "item_reference", "id": "m"}]},
        "input",
        "input[0] must have one of the types 'message'",
    ),
    (
        "responses",
        {"input": [{"type": "function_call_output", "output": None}]},
        "input",
        "input[0].output must be a string or a list",
    ),
    ("responses", {"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools", "'tools[1].name' is required"),
    (
        "responses",
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "got text and structured_outputs",
    ),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
    ("messages", {"tools": [{**TIME, "name": "a b"}]}, None, "tools[0].name must match"),
    ("messages", {"stop_sequences": [""]}, None, "stop_sequences must be non-empty strings"),
    ("messages", {"messages": [{**USER, "content": 5}]}, None, "messages[0].content must be a string or a list"),
    ("chat", {"maxtokens": 1}, "maxtokens", "unknown field 'maxtokens': did you mean max_tokens?"),
    ("chat", {"grammar": ""}, "grammar", "unknown field 'grammar': remove it, or check its spelling"),
    (
        "chat",
        {"stream": True, "stream_options": {"include_usages": True}},
        "stream_options.include_usages",
        "include_usages': did you mean include_usage?",
    ),
    ("responses", {"input": "x " * 5000}, "input", "shorten the prompt"),
    ("responses", {"max_output_tokens": 1000}, "max_output_tokens", "shorten the prompt"),
    ("messages", {"messages": [{**USER, "content": [IMAGE]}]}, None, "messages[0].content[0]"),
    ("messages", {"messages": [{**USER, "content": [{"type": "document"}]}]}, None, "messages[0].content[0]"),
    ("messages", {"messages": [{**USER, "role": "nobody"}]}, None, "messages[0] must"),
    ("messages", {"messages": [{**USER, "name": "me"}]}, None, "messages[0].name"),
    ("messages", {"messages": [{**USER, "content": [{"type": "text", "text": "x", "y": 1}]}]}, None, "content[0].y"),
    ("messages", {"messages": [{**USER, "content": "x " * 5000}]}, None, "shorten the prompt"),
    ("messages", {"system": [IMAGE]}, None, "system[0]"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, None, "tools[0]"),
    ("messages", {"tools": [{**TIME, "input_examples": [{}]}]}, None, "input_examples"),
    ("messages", {"tools": [{"name": "f"}]}, None, "tools[0].input_schema"),
    ("messages", {"tools": [TIME], "tool_choice": {"type": "tool"}}, None, "tool_choice"),
    ("messages", {"tools": [TIME], "tool_choice": "any"}, None, "tool_choice"),
]


@pytest.mark.parametrize(("way", "fields", "param", "says"), WITHIN)
def test_what_cannot_be_honoured_in_a_field_or_beside_another_is_named(
    server: RunningServer, way: str, fields: dict[str, Any], param: str | None, says: str
) -> None:
    assert_refused(server, way, fields, param, says)


INSIDE = re.compile(r"\[\w+,|\(\)|tuple|Input should|Value error|instance of|after validation|discriminator|literal")
"""What only this program's libraries speak of."""


def assert_refused(server: RunningServer, way: str, fields: dict[str, Any], param: str | None, says: str) -> None:
    answer = APIS[way].post(server.port, "x", **fields)
    assert answer.status == 400, answer.content
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error" and says in error["message"], error
    assert not INSIDE.search(f"{error['message']} {error.get('param')}"), error
    if way != "messages":  # whose errors have no such field
        assert error["param"] == param, error
