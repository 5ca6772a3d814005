"""What a client was made to do and got; OpenAI's own: sync, async, streams, tools, structured output, responses."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any, Literal

import openai
from pydantic import BaseModel

MODEL = "bundled"
"""What the server calls its model."""

KEY = "a key"
"""What the server wants of everybody."""


class Checks:
    """Claims about one client, in the order they were looked at."""

    def __init__(self, *packages: str) -> None:
        """``packages`` : what the client is made of, for the versions."""
        self._packages = packages
        self.failed: dict[str, str] = {}
        self.passed: list[str] = []

    def see(self, claim: str, holds: bool, got: Any) -> None:
        """Note whether a claim holds; ``got`` is shown where it does not."""
        print(f"  {'yes' if holds else 'NO '}  {claim}", file=sys.stderr)
        if holds:
            self.passed.append(claim)
        else:
            self.failed[claim] = f"{got!r:.300}"

    def finish(self) -> int:
        """Print one JSON line; returns the exit status."""
        versions = {package: version(package) for package in self._packages}
        print(json.dumps({"versions": versions, "passed": self.passed, "failed": self.failed}))
        return 1 if self.failed else 0


MESSAGES: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["city"],
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
}  # fmt: skip
FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": True, **FUNCTION}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FEW: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
WEATHER: dict[str, Any] = {"model": MODEL, "temperature": 0, "tools": TOOLS, "parallel_tool_calls": False}


class Answer(BaseModel):
    """What structured output is parsed into."""

    sunny: bool
    place: Literal["Paris", "Oslo"]


def check_openai(url: str, key: str, checks: Checks) -> None:
    """Everything this client does with a server like ours."""
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        _chat(client, checks)
        _tools(client, checks)
        _structured(client, checks)
        _responses(client, checks)
        _models_and_errors(client, checks)
    asyncio.run(_at_once(url, key, checks))


def _chat(client: openai.OpenAI, checks: Checks) -> None:
    whole = client.chat.completions.create(**FEW, messages=MESSAGES)
    text = whole.choices[0].message.content or ""
    checks.see("a chat completion", len(text) > 0, whole)
    with client.chat.completions.create(
        **FEW, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    checks.see("the same as a stream, with usage", streamed == text and chunks[-1].usage is not None, streamed)
    completion = client.completions.create(**FEW, prompt="def add(a, b):", logprobs=2, n=2)
    checks.see("completions with log-probabilities", len(completion.choices) == 2, completion)


def _tools(client: openai.OpenAI, checks: Checks) -> None:
    called = client.chat.completions.create(**WEATHER, messages=MESSAGES, tool_choice="required")
    calls: list[Any] = called.choices[0].message.tool_calls or []
    checks.see("a required tool call", len(calls) == 1 and called.choices[0].finish_reason == "tool_calls", called)
    city = json.loads(calls[0].function.arguments)["city"]
    checks.see("its arguments are of the schema", city in ("Paris", "Oslo"), city)
    with client.chat.completions.stream(**WEATHER, messages=MESSAGES, tool_choice=NAMED) as events:
        streamed: Any = events.get_final_completion().choices[0].message.tool_calls
    checks.see(
        "a named tool call, as a stream", streamed[0].function.arguments == calls[0].function.arguments, streamed
    )
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "Sunny."}
    told: list[Any] = [*MESSAGES, called.choices[0].message, result]
    answer = client.chat.completions.create(**WEATHER, messages=told, tool_choice="none", max_tokens=16)
    checks.see("an answer after the tool's", bool(answer.choices[0].message.content), answer)


def _structured(client: openai.OpenAI, checks: Checks) -> None:
    found = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Answer, temperature=0, max_tokens=400
    )
    checks.see("structured output, parsed", isinstance(found.choices[0].message.parsed, Answer), found)


def _responses(client: openai.OpenAI, checks: Checks) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "input": "Write a function that adds two numbers."}
    whole = client.responses.create(**asked, max_output_tokens=400)
    checks.see("a response", whole.status == "completed" and len(whole.output_text) > 0, whole)
    with client.responses.stream(**asked, max_output_tokens=400) as events:
        streamed = events.get_final_response()
    checks.see("the same as a stream", streamed.output_text == whole.output_text, streamed)
    parsed = client.responses.parse(**asked, text_format=Answer, max_output_tokens=400)
    checks.see("structured output of a response, parsed", isinstance(parsed.output_parsed, Answer), parsed)
    tools: dict[str, Any] = {"tools": RESPONSE_TOOLS, "parallel_tool_calls": False}
    called = client.responses.create(**asked, **tools, tool_choice="required")
    call: Any = called.output[0]
    checks.see("a required call as an item", call.type == "function_call", called)
    items: list[Any] = [{"role": "user", "content": asked["input"]}, *(item.model_dump() for item in called.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."})
    answer = client.responses.create(**{**asked, "input": items}, **tools, tool_choice="none", max_output_tokens=16)
    checks.see("an answer after the tool's, as an item", answer.output[0].type == "message", answer)


def _models_and_errors(client: openai.OpenAI, checks: Checks) -> None:
    names = [model.id for model in client.models.list()]
    checks.see("the models, and one by its name", client.models.retrieve(names[0]).id == MODEL, names)
    try:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        checks.see("a refusal is a BadRequestError with its field", False, "no error")
    except openai.BadRequestError as error:
        holds = error.param == "previous_response_id" and error.request_id is not None
        checks.see("a refusal is a BadRequestError with its field", holds, error)


async def _at_once(url: str, key: str, checks: Checks) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        found = await asyncio.gather(*(client.chat.completions.create(**FEW, messages=MESSAGES) for _ in range(8)))
        texts = {answer.choices[0].message.content for answer in found}
        checks.see("eight at once with the async client, all the same", len(texts) == 1, texts)
        pieces = [
            event.delta
            async for event in await client.responses.create(model=MODEL, input="Hello", temperature=0, stream=True)
            if event.type == "response.output_text.delta"
        ]
        checks.see("the events of a response with the async client", len(pieces) > 0, pieces)
