"""Everything that a client sends is in the prompt, whatever the chat template reads; what cannot be is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from benchmarks import templates
from ssd.errors import RequestError
from ssd.text.codec import TextCodec
from tests.tokenizers_for_tests import byte_level_tokenizer

_EACH = "{% for m in messages %}[{{ m.role }} BODY]{% endfor %}{% if add_generation_prompt %}[assistant {% endif %}"
_CALLS = (
    "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{{ m.content }}"
)
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_ONE_CALL = "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
TEMPLATES = {
    "all": _EACH.replace("BODY", _CALLS),
    # The word alone: no place for the role.
    "no developer": _EACH.replace("BODY", "{% if m.role not in ['developer'] %}" + _CALLS + "{% endif %}"),
    "parts alone": _EACH.replace(
        "BODY", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    ),
    "parts of the user alone": _EACH.replace(
        "BODY",
        "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}",
    ),
    "one call": _EACH.replace("BODY", _ONE_CALL + _CALLS),
    "first call": _EACH.replace("BODY", _CALLS.replace("m.tool_calls %}", "(m.tool_calls or [])[:1] %}")),
    "calls or text": _EACH.replace(
        "BODY", "{% if m.tool_calls %}" + _CALLS.replace("{{ m.content }}", "") + "{% else %}{{ m.content }}{% endif %}"
    ),
    "no calls": _EACH.replace("BODY", "{{ m.content }}"),
    "no calls, no results": _EACH.replace("BODY", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"),
    "items": _EACH.replace(
        "BODY",
        "{% for c in m.tool_calls %}({{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}="
        "{{ v }}{% endfor %}){% endfor %}{{ m.content }}",
    ),
    "a first system with others": _EACH.replace(
        "BODY", "{% if m.role != 'system' or (loop.first and messages | length > 1) %}{{ m.content }}{% endif %}"
    ),
}


@cache
def codec(source: str) -> TextCodec:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    tokenizer.chat_template = source
    return TextCodec(tokenizer, ())


def prompt(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    made = codec(TEMPLATES.get(name, name))
    return made.decode(made.encode_chat(messages, **options))


def call(number: int, arguments: str = "") -> dict[str, Any]:
    arguments = arguments or json.dumps({"x": f"ARG{number}"})
    return {"id": f"id{number}", "type": "function", "function": {"name": f"f{number}", "arguments": arguments}}


def turn(role: str, content: str | list[dict[str, str]] | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def result(number: int) -> dict[str, Any]:
    return turn("tool", f"RES{number}", tool_call_id=f"id{number}")


USER = turn("user", "USR")
TWO_CALLS = turn("assistant", None, tool_calls=[call(1), call(2)])


@pytest.mark.parametrize("name", ["parts alone", "parts of the user alone"])
def test_content_is_a_list_of_parts_where_a_string_would_be_lost(name: str) -> None:
    messages = [turn("system", "SYS"), USER, turn("assistant", "ANS"), turn("user", [{"type": "text", "text": "MORE"}])]
    assert prompt(name, messages) == "[system SYS][user USR][assistant ANS][user MORE][assistant "


@pytest.mark.parametrize("name", ["one call", "first call"])
def test_calls_of_one_message_are_told_one_by_one_each_with_its_result(name: str) -> None:
    written = prompt(name, [USER, TWO_CALLS, result(2), result(1), USER])
    assert written == (
        '[user USR][assistant (f1 {"x": "ARG1"})][tool RES1][assistant (f2 {"x": "ARG2"})][tool RES2][user USR]'
        "[assistant "
    )
    assert not codec(TEMPLATES[name]).template().takes_several_calls  # type: ignore[union-attr]
    assert codec(TEMPLATES["all"]).template().takes_several_calls  # type: ignore[union-attr]


def test_text_beside_calls_is_a_message_before_them_where_it_would_be_lost() -> None:
    written = prompt("calls or text", [USER, turn("assistant", "TXT", tool_calls=[call(1)]), result(1)])
    assert written == '[user USR][assistant TXT][assistant (f1 {"x": "ARG1"})][tool RES1][assistant '


def test_calls_that_a_template_leaves_out_are_content_in_the_models_format() -> None:
    messages = [USER, turn("assistant", "TXT", tool_calls=[call(1)]), result(1)]
    hermes = '<tool_call>\n{"name": "f1", "arguments": {"x": "ARG1"}}\n</tool_call>'
    assert prompt("no calls", messages) == f"[user USR][assistant TXT\n{hermes}][tool RES1][assistant "
    own = prompt("no calls", messages, write_calls=lambda functions: f"<{functions[0]['name']}>ARG1" + str(functions))
    assert "[assistant TXT\n<f1>ARG1" in own
    written = prompt("no calls, no results", messages)
    assert written == (f"[user USR][assistant TXT\n{hermes}][user <tool_response>\nRES1\n</tool_response>][assistant ")


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1, 2]"])
def test_arguments_that_are_no_object_are_one_with_the_key_arguments(arguments: str) -> None:
    written = prompt("items", [USER, turn("assistant", None, tool_calls=[call(1, arguments)]), result(1)])
    assert written == f"[user USR][assistant (f1 arguments={arguments})][tool RES1][assistant "
    refusing = "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"
    with pytest.raises(
        RequestError, match=r"\(messages\[1\]\.tool_calls\[0\] has arguments that are not a JSON object\)"
    ):
        prompt(refusing, [USER, turn("assistant", None, tool_calls=[call(1, arguments)])])


def test_functions_get_what_the_template_reads_of_each() -> None:
    fields = ("name", "description | length", "parameters | tojson")
    tools = "{% for t in tools %}" + "|".join("{{ t.function." + field + " }}" for field in fields)
    written = prompt(
        tools + "{% endfor %}" + TEMPLATES["all"], [USER], template_kwargs={"tools": [{"function": {"name": "f"}}]}
    )
    assert written == 'f|0|{"type": "object", "properties": {}}[user USR][assistant '
    bare = [{"type": "function", "function": {"name": "f"}}]
    assert '{"name": "f"}' in prompt(_TOOLS + TEMPLATES["all"], [USER], template_kwargs={"tools": bare})  # unchanged
    assert prompt("{{ tools | length }}" + TEMPLATES["all"], [USER])[0] == "0"  # None has no length
    with pytest.raises(RequestError, match="refuses these tools: no parameters") as caught:
        prompt(
            "{% if tools %}{{ raise_exception('no parameters') }}{% endif %}" + TEMPLATES["all"],
            [USER],
            template_kwargs={"tools": bare},
        )
    assert caught.value.param == "tools"


def test_a_lone_system_message_is_the_users_where_it_would_be_lost() -> None:
    assert prompt("a first system with others", [turn("system", "SYS")]) == "[user SYS][assistant "
    assert prompt("a first system with others", [turn("system", "SYS"), USER]) == "[system SYS][user USR][assistant "


def test_what_no_message_can_say_is_refused_by_name() -> None:
    last = "{{ messages[-1].content }}"
    with pytest.raises(RequestError, match=r"no place for messages\[0\], messages\[1\]: ") as caught:
        prompt(last, [USER, turn("assistant", "ANS"), USER])
    assert caught.value.param == "messages"
    assert prompt(last, [USER]) == "USR"
    nowhere = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(RequestError, match=r"no place for messages\[1\]\.tool_calls\[0\]: "):
        prompt(nowhere, [USER, turn("assistant", None, tool_calls=[call(1)]), result(1)])
    with pytest.raises(RequestError, match=r"no place for messages\[1\]: "):
        words = {"tools_in_words": True, "template_kwargs": {"tools": [{"function": {"name": "f"}}]}}
        prompt(nowhere, [USER, turn("assistant", "ANS")], **words)


def test_a_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = codec(TEMPLATES["one call"] + "{# once #}")
    template = made.template()
    assert template is not None
    turns = [USER, TWO_CALLS, result(1), result(2)]
    made.encode_chat(turns * 3)
    count = 0
    render = template.render

    def counted(*arguments: Any, **options: Any) -> str:
        nonlocal count
        count += 1
        return render(*arguments, **options)

    monkeypatch.setattr(template, "render", counted)
    assert made.decode(made.encode_chat(turns * 7)).count("ARG2") == 7
    assert count == 1


def test_a_directory_of_templates_is_compared_with_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("all", "one call", "no calls", "parts alone"):
        (tmp_path / f"{name}.jinja").write_text(_TOOLS * (name != "parts alone") + TEMPLATES[name])
    assert templates.main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["template"].removesuffix(".jinja"): row for row in found["rows"]}
    assert (found["templates"], found["shapes"], found["lost"], found["wrong"]) == (4, len(templates.SHAPES), 0, [])
    assert rows["all"]["lost_by_transformers"] == 0 and rows["all"]["calls"] == "unknown"
    assert rows["no calls"]["lost_by_transformers"] > 0 and rows["parts alone"]["calls"] == "in words"
    assert rows["one call"]["shapes"]["two calls"] == "rewritten" and rows["one call"]["shapes"]["call"] == "equal"
    (tmp_path / "all.jinja").write_text("{{ messages[0].content }}")
    assert templates.main([str(tmp_path), "--json"]) == 0  # refused, as transformers would lose the others
    capsys.readouterr()
    with pytest.raises(SystemExit):
        templates.main([])


CONVERSATIONS = st.from_regex(r"(s|d|sd)?u{1,2}(c(t|tu)|T(t|ts)|C(tt|ttu)|B(tt)|x(t)|a(u|uu|su)){0,4}", fullmatch=True)


@given(st.sampled_from(sorted(TEMPLATES)), CONVERSATIONS)
def test_all_parts_of_a_conversation_are_in_the_prompt(name: str, conversation: str) -> None:
    roles = {"s": "system", "d": "developer", "u": "user", "t": "tool"}
    messages = []
    parts = []
    for number, letter in enumerate(conversation):
        message = turn(roles.get(letter, "assistant"), None if letter in "cCx" else f"part{number:03}")
        parts += [] if letter in "cCx" else [f"part{number:03}"]
        if letter in "cCTBx":
            marks = [f"mark{number:03}{place}" for place in range(2 if letter in "CB" else 1)]
            parts += marks
            written = ['{"x": "' + mark + ("" if letter == "x" else '"}') for mark in marks]
            message["tool_calls"] = [call(number, each) for each in written]
        messages.append(message)
    if name.startswith("parts"):
        messages = [message for message in messages if message["role"] in ("system", "developer", "user")]
        parts = [message["content"] for message in messages]
    text = prompt(name, messages)
    assert [part for part in parts if part not in text] == []
