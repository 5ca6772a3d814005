"""Checks of each client library, one function per library: ``python -m benchmarks.clients.others NAME URL MODEL``.

The interpreter of the clients' virtual environment runs this file, so each function imports its library itself. The
last line of stdout is one JSON object, see `Checks.finish`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

MODEL = "bundled"
"""The model name under which the server serves the bundled model."""
KEY = "a key"
"""The API key that the server requires."""
QUESTION = "What is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["city"],
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA},
    }
]


class Checks:
    """The passed and failed checks of one client. ``packages`` are the Python packages whose versions are reported."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self.failed: dict[str, str] = {}
        self.num_held = 0

    def see(self, claim: str, holds: bool, got: Any) -> None:
        """Record whether a check passed. ``got``, the observed value, is reported if it failed."""
        print(f"  {'yes' if holds else 'NO '}  {claim}", file=sys.stderr)
        self.num_held += holds
        if not holds:
            self.failed[claim] = f"{got!r:.300}"

    def finish(self) -> int:
        """Print the results as one JSON line; return 1 if a check failed, else 0."""
        versions = ", ".join(f"{package} {version(package)}" for package in self._packages)
        claims, failed = self.num_held + len(self.failed), "; ".join(self.failed)
        row = {"versions": versions, "held": self.num_held, "claims": claims, "failed": failed, "got": self.failed}
        print(json.dumps(row))
        return 1 if self.failed else 0


def agents(url: str, model: str) -> Checks:
    """Check the OpenAI Agents SDK: an agent that calls a tool, over chat completions and over the Responses API."""
    checks = Checks("openai-agents", "openai")
    asyncio.run(_agents(url, checks))
    return checks


async def _agents(url: str, checks: Checks) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    cities: list[str] = []

    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"Sunny in {city}."

    set_tracing_disabled(True)
    # The first call is forced, because the bundled model calls no tool on its own.
    settings = ModelSettings(tool_choice="required", temperature=0, parallel_tool_calls=False)
    async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model=MODEL, openai_client=client)
            agent = Agent(
                name="weather",
                instructions="Help.",
                model=model,
                tools=[function_tool(get_weather)],
                model_settings=settings,
            )
            cities.clear()
            whole = await Runner.run(agent, QUESTION, max_turns=3)
            items = [item.type for item in whole.new_items]
            loop = ["tool_call_item", "tool_call_output_item", "message_output_item"]
            checks.see(f"{kind.__name__}: calls, hears, answers", items == loop and bool(whole.final_output), items)
            checks.see(f"{kind.__name__}: the function ran once", len(cities) == 1, cities)
            streamed = Runner.run_streamed(agent, QUESTION, max_turns=3)
            events: list[Any] = [event async for event in streamed.stream_events()]
            is_same = streamed.final_output == whole.final_output
            checks.see(f"{kind.__name__}: the same as a stream", is_same, len(events))


def guidellm(url: str, model: str) -> Checks:
    """Check guidellm: its load test with synthetic prompts and two concurrent requests."""
    checks, num_requests, output_tokens = Checks("guidellm"), 10, 16
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        command = [
            str(Path(sys.executable).with_name("guidellm")),
            "run",
            "--disable-console",
            "--backend",
            f"kind=openai_http,target={url.removesuffix('/v1')},api_key={KEY}",
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            f"kind=max_requests,count={num_requests}",
            "--data",
            f"kind=synthetic_text,prompt_tokens=32,output_tokens={output_tokens}",
            "--tokenizer",
            f"kind=huggingface_auto,model={model}",
            "--output",
            f"kind=json,path={report}",
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    checks.see("all requests succeed", totals["successful"] == totals["total"] == num_requests, totals)
    tokens = metrics["output_token_count"]["successful"]
    checks.see("each has the tokens that were asked for", tokens["mean"] == output_tokens, tokens)
    return checks


def langchain(url: str, model: str) -> Checks:
    """Check LangChain: chat, streams, tools and structured output, over chat completions and over the Responses API."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import create_model

    answer_type = create_model("Answer", sunny=(bool, ...))

    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        return f"Sunny in {city}."

    checks, weather = Checks("langchain-openai", "langchain-core", "openai"), tool(get_weather)
    for kind, by_responses in (("chat completions", False), ("responses", True)):
        chat: Any = ChatOpenAI(
            base_url=url, api_key=KEY, model=MODEL, temperature=0, max_tokens=400, use_responses_api=by_responses
        )
        whole = chat.invoke(QUESTION)
        checks.see(f"invoke, {kind}", bool(whole.text), whole)
        streamed = "".join(chunk.text for chunk in chat.stream(QUESTION))
        checks.see(f"stream, {kind}", streamed == whole.text, streamed)
        bound = chat.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
        called = bound.invoke(QUESTION)
        given = [call["args"] for call in called.tool_calls]
        checks.see(f"bind_tools and invoke, {kind}", given[0]["city"] in ("Paris", "Oslo"), called)
        together, *chunks = list(bound.stream(QUESTION))
        for chunk in chunks:
            together += chunk
        is_same = [call["args"] for call in together.tool_calls] == given
        checks.see(f"bind_tools and stream, {kind}", is_same, together)
        results = [weather.invoke(call) for call in called.tool_calls]
        answer = chat.invoke([HumanMessage(QUESTION), called, *results])
        is_one = bool(answer.text) and answer.usage_metadata is not None
        checks.see(f"an answer after the tool's, {kind}", is_one, answer)
        parsed = chat.with_structured_output(answer_type, method="json_schema").invoke(QUESTION)
        checks.see(f"with_structured_output, {kind}", isinstance(parsed, answer_type), parsed)
    return checks


def litellm(url: str, model: str) -> Checks:
    """Check LiteLLM: completions, streams, tool calls and responses."""
    import litellm as library

    checks = Checks("litellm", "openai")
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "temperature": 0}
    few = {**asked, "messages": MESSAGES, "max_tokens": 24}
    whole = library.completion(**few).choices[0].message.content
    checks.see("completion", bool(whole), whole)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in library.completion(**few, stream=True))
    checks.see("completion as a stream", streamed == whole, streamed)
    later = asyncio.run(library.acompletion(**few)).choices[0].message.content
    checks.see("acompletion", later == whole, later)
    forced = {**asked, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    called = library.completion(**forced).choices[0]
    calls = called.message.tool_calls
    checks.see("a required tool call", len(calls) == 1 and called.finish_reason == "tool_calls", called)
    chunks = list(library.completion(**forced, stream=True))
    built = library.stream_chunk_builder(chunks).choices[0].message.tool_calls
    checks.see("a required tool call as a stream", built[0].function.arguments == calls[0].function.arguments, built)
    response = library.responses(**asked, input="Hello", max_output_tokens=16)
    checks.see("a response", response.output[0].type == "message", response)
    text = library.text_completion(**{**asked, "model": f"text-completion-openai/{MODEL}"}, prompt="def add(")
    checks.see("text_completion", bool(text.choices[0].text), text)
    return checks


SCORED = [
    ("def add(a, b):\n    return", " a + b"),
    ("import", " os"),
    ("for i in", " range(10):"),
    ("x =", " 1"),
    ("class Point:\n    def", " __init__(self, x, y):"),
    ("if __name__ ==", ' "__main__":'),
    ("try:\n    value = int(text)\nexcept", " ValueError:"),
    ("with open(path) as", " file:"),
]
GENERATED: list[tuple[str, dict[str, Any]]] = [
    ("def add(a, b):\n", {"until": ["\n\n"], "max_gen_toks": 32}),
    ("import os\n", {"until": ["def"], "max_gen_toks": 24}),
    ("class Point:\n", {"until": ["class"], "max_gen_toks": 40}),
]
MOST_APART = 1e-3
"""The tolerance for sums of float32 log-probabilities that were computed with different batch shapes."""


def lm_eval(url: str, model: str) -> Checks:
    """Check that lm-eval gets the same scores and texts from the server as from transformers with the same weights."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    os.environ["OPENAI_API_KEY"] = KEY
    checks = Checks("lm-eval", "transformers", "torch")
    ours = LocalCompletionsAPI(
        model=MODEL, base_url=f"{url}/completions", tokenizer=model, num_concurrent=4, max_length=2048
    )
    theirs = HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=1)

    def asked(kind: str, of: Any) -> list[Any]:
        return [Instance(kind, {}, given, number) for number, given in enumerate(of)]

    scores = [backend.loglikelihood(asked("loglikelihood", SCORED)) for backend in (ours, theirs)]
    pairs = list(zip(*scores, strict=True))
    checks.see("loglikelihood: the same scores", all(abs(a[0] - b[0]) < MOST_APART for a, b in pairs), pairs)
    checks.see("loglikelihood: the same is greedy", all(bool(a[1]) == bool(b[1]) for a, b in pairs), pairs)
    texts = [backend.generate_until(asked("generate_until", GENERATED)) for backend in (ours, theirs)]
    checks.see("generate_until: the same texts", texts[0] == texts[1], texts)
    return checks


CLIENTS: dict[str, Callable[[str, str], Checks]] = {
    each.__name__: each for each in (langchain, litellm, agents, lm_eval, guidellm)
}

if __name__ == "__main__":
    sys.exit(CLIENTS[sys.argv[1]](*sys.argv[2:]).finish())
