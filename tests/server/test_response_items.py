"""A response's items: from what a parser says of a text to events, and from items back to messages."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.answers.parts import Parts
from server.answers.responses import ResponseAnswer
from server.base.settings import ServerSettings
from server.schema.responses import ResponsesBody
from server.tools.formats import make_parser
from server.tools.message_parser import Messages
from tests.server.apis import RESPONSES

PIECES = [
    "<think>",
    "</think>",
    "hm",
    "Hello.",
    "\n",
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "b"]}}\n</tool_call>',
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "<tool_call>",
    '{"name"',
    "é",
    "<",
    '{"name": "f", "parameters": {"a": 1}}',
    '[f(a="x"), g()]',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "word word",
    "[",
    "]",
    " ",
]
"""Of what models write, well formed and not."""


FORMATS = [
    ("hermes", "qwen3"),
    ("qwen3_coder", None),
    ("llama3_json", None),
    ("pythonic", None),
    ("mistral", "mistral"),
    ("deepseek_v3", "deepseek_r1"),
    ("openai", "openai_gptoss"),
]


KIND = ResponseAnswer(ServerSettings(model_names=("m",), model="m"), ResponsesBody.parse({"input": "x"})).make_part


def items_of(texts: list[str], form: tuple[str, str | None]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The items of a text that comes in pieces, each character a token, and the events that told of them."""
    made = iter(range(1000))
    functions: Any = {"f": {"type": "object"}, "g": {"type": "object"}}
    messages = Messages(lambda: make_parser(*form, functions=functions), make_id=lambda: f"call_{next(made)}")
    items = Parts(messages, KIND)
    events, places = [], count()
    for number, text in enumerate(texts):
        tokens: Any = [
            (next(places), {"token": mark, "bytes": [*mark.encode()], "logprob": -1.0, "top_logprobs": []})
            for mark in text
        ]
        events += items.push(text, tokens, ended=number == len(texts) - 1)
    events += items.finish("completed")
    return items.done, events


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), st.sampled_from(FORMATS), st.data())
def test_the_events_alone_tell_the_items_and_these_are_the_same_however_the_text_is_cut(
    pieces: list[str], form: tuple[str, str | None], data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, _ = items_of([text], form)
    items, events = items_of(cut, form)
    assert items and without_ids(items) == without_ids(whole)
    told: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    spelled: dict[int, str] = {}
    for number, event in enumerate(events):
        RESPONSES.require_official({**event, "sequence_number": number})
        index, kind = event["output_index"], event["type"]
        if kind == "response.output_item.added":
            assert index == len(told) and event["item"]["status"] == "in_progress"
            told.append(event["item"])
            texts[index] = ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == told[index]["id"] and index == len(told) - 1
            texts[index] += event["delta"]
            spelled[index] = spelled.get(index, "") + "".join(entry["token"] for entry in event.get("logprobs", ()))
        elif kind == "response.output_item.done":
            assert event["item"] == items[index]
            item = event["item"]
            said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert texts[index] == said
            if item["type"] == "message":
                (part,) = item["content"]
                assert spelled.get(index, "") == "".join(entry["token"] for entry in part["logprobs"])
                assert spelled.get(index, "") == said or (form[0] == "openai" and "\n" in said)  # between two messages
    assert [item["id"] for item in told] == [item["id"] for item in items]


def test_nothing_said_is_an_empty_message() -> None:
    items = Parts(None, KIND)
    items.push("", ended=True)
    items.finish("completed")
    assert [item["content"][0]["text"] for item in items.done] == [""]
