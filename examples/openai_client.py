"""Chat and streaming with OpenAI's client: ``python -m examples.openai_client [URL]``."""

from __future__ import annotations

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Send the same request twice, unstreamed and streamed, and print both answers."""
    with OpenAI(base_url=url, api_key="unused") as client:
        model = client.models.list().data[0].id
        messages: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": "Write a function that reads a file."}
        ]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0)
        print("whole:   ", repr(answer.choices[0].message.content))
        with client.chat.completions.create(
            model=model, messages=messages, max_tokens=32, temperature=0, stream=True
        ) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        print("streamed:", repr("".join(pieces)), "in", len(pieces), "events")


if __name__ == "__main__":
    main(*sys.argv[1:])
