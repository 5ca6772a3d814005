"""LangChain: messages, streams, bound tools and structured output, over chat completions and over responses."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from benchmarks.clients.checks import KEY, MODEL, Checks, arguments

QUESTION = "What is the weather in Paris?"


class Answer(BaseModel):
    """What structured output is parsed into."""

    sunny: bool


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


def main() -> int:
    """Returns the exit status."""
    url, _ = arguments()
    checks = Checks("langchain-openai", "langchain-core", "openai")
    for kind, by_responses in (("chat completions", False), ("responses", True)):
        model = ChatOpenAI(
            base_url=url, api_key=KEY, model=MODEL, temperature=0, max_tokens=400, use_responses_api=by_responses
        )
        _use(model, kind, checks)
    return checks.finish()


def _use(model: Any, kind: str, checks: Checks) -> None:
    whole = model.invoke(QUESTION)
    checks.see(f"invoke, {kind}", bool(whole.text), whole)
    streamed = "".join(chunk.text for chunk in model.stream(QUESTION))
    checks.see(f"stream, {kind}", streamed == whole.text, streamed)
    bound = model.bind_tools([get_weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    called = bound.invoke(QUESTION)
    arguments_of = [call["args"] for call in called.tool_calls]
    checks.see(f"bind_tools and invoke, {kind}", arguments_of[0]["city"] in ("Paris", "Oslo"), called)
    chunks = list(bound.stream(QUESTION))
    together = chunks[0]
    for chunk in chunks[1:]:
        together += chunk
    checks.see(
        f"bind_tools and stream, {kind}", [call["args"] for call in together.tool_calls] == arguments_of, together
    )
    results = [get_weather.invoke(call) for call in called.tool_calls]
    answer = model.invoke([HumanMessage(QUESTION), called, *results])
    checks.see(f"an answer after the tool's, {kind}", bool(answer.text) and answer.usage_metadata is not None, answer)
    parsed = model.with_structured_output(Answer, method="json_schema").invoke(QUESTION)
    checks.see(f"with_structured_output, {kind}", isinstance(parsed, Answer), parsed)


if __name__ == "__main__":
    sys.exit(main())
