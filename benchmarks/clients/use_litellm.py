"""LiteLLM: completions, streams and tools through its one interface."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm

from benchmarks.clients.checks import KEY, MODEL, Checks, arguments
from benchmarks.clients.use_openai import MESSAGES, TOOLS


def main() -> int:
    """Returns the exit status."""
    url, _ = arguments()
    checks = Checks("litellm", "openai")
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "temperature": 0}
    few = {**asked, "messages": MESSAGES, "max_tokens": 24}
    whole = litellm.completion(**few).choices[0].message.content
    checks.see("completion", bool(whole), whole)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**few, stream=True))
    checks.see("completion as a stream", streamed == whole, streamed)
    later = asyncio.run(litellm.acompletion(**few)).choices[0].message.content
    checks.see("acompletion", later == whole, later)
    forced = {**asked, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(**forced).choices[0]
    calls = called.message.tool_calls
    checks.see("a required tool call", len(calls) == 1 and called.finish_reason == "tool_calls", called)
    chunks = list(litellm.completion(**forced, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    checks.see("a required tool call as a stream", built[0].function.arguments == calls[0].function.arguments, built)
    response = litellm.responses(**asked, input="Hello", max_output_tokens=16)
    checks.see("a response", response.output[0].type == "message", response)
    text = litellm.text_completion(**{**asked, "model": f"text-completion-openai/{MODEL}"}, prompt="def add(")
    checks.see("text_completion", bool(text.choices[0].text), text)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
