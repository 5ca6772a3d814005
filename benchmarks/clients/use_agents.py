"""OpenAI's agents: the loop of a model and its tools, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

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

from benchmarks.clients.checks import KEY, MODEL, Checks, arguments

QUESTION = "What is the weather in Paris?"
_cities: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    _cities.append(city)
    return f"Sunny in {city}."


async def run(checks: Checks) -> None:
    """Both models, whole and as streams. The first call is required, since the bundled model makes none by itself."""
    url, _ = arguments()
    set_tracing_disabled(True)
    settings = ModelSettings(tool_choice="required", temperature=0, parallel_tool_calls=False)
    async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model=MODEL, openai_client=client)
            agent = Agent(
                name="weather", instructions="Help.", model=model, tools=[get_weather], model_settings=settings
            )
            _cities.clear()
            whole = await Runner.run(agent, QUESTION, max_turns=3)
            items = [item.type for item in whole.new_items]
            loop = ["tool_call_item", "tool_call_output_item", "message_output_item"]
            checks.see(f"{kind.__name__}: calls, hears, answers", items == loop and bool(whole.final_output), items)
            checks.see(f"{kind.__name__}: the function ran once", len(_cities) == 1, _cities)
            streamed = Runner.run_streamed(agent, QUESTION, max_turns=3)
            events: list[Any] = [event async for event in streamed.stream_events()]
            checks.see(
                f"{kind.__name__}: the same as a stream", streamed.final_output == whole.final_output, len(events)
            )


def main() -> int:
    """Returns the exit status."""
    checks = Checks("openai-agents", "openai")
    asyncio.run(run(checks))
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
