"""Streams of requests as token ids: made of library code, or the prompts of recorded requests, one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from benchmarks.traces import find_trace, read_records
from benchmarks.workloads import Mix, checksum, shares, stream
from ssd.text.codec import TextCodec

PROMPT_TOKENS = 320
"""Of recorded prompts the last so many are asked: agents' are longer than a small model on a CPU can be asked."""

_CHARACTERS = 16 * PROMPT_TOKENS
"""Of a recorded text, from its end; what is before is cut off anyway."""


@dataclass(frozen=True, slots=True)
class Stream:
    """``prompts`` in the order they come. ``shares`` : what they are, for people. ``checksum`` : names the text."""

    name: str
    shares: str
    checksum: str
    prompts: list[list[int]]


def made_stream(mix: Mix, codec: TextCodec, num_requests: int, seed: int, most_tokens: int) -> Stream:
    """Pieces of code of the standard library, repeated as ``mix`` says."""
    requests = stream(mix, num_requests, seed)
    prompts = [cut(codec, request.text, most_tokens) for request in requests]
    return Stream(mix.name, shares(requests), checksum(requests), prompts)


def recorded_stream(trace: str, codec: TextCodec, num_requests: int, most_tokens: int = PROMPT_TOKENS) -> Stream:
    """The first prompts of a trace, which may go on from one another. Raises ConfigError where there is no trace."""
    texts = list(islice(_contexts(trace), num_requests))
    prompts = [cut(codec, text, most_tokens) for text in texts]
    named = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return Stream(trace, f"recorded: {trace}", named, prompts)


def cut(codec: TextCodec, text: str, most_tokens: int) -> list[int]:
    """The last tokens of a text, behind the mark of a beginning where its model writes one: some need it."""
    prompt = codec.encode_prompt(text)
    if len(prompt) <= most_tokens:
        return prompt
    if prompt[0] == codec.bos_token_id:
        return [prompt[0], *prompt[len(prompt) - most_tokens + 1 :]]
    return prompt[-most_tokens:]


def _contexts(trace: str) -> Iterator[str]:
    """What the model had been given at each record, from its end: earlier turns where a record only adds to them."""
    session, history = None, ""
    for record in read_records(find_trace(trace)):
        if record["session"] != session or not record["prompt_is_delta"]:
            session, history = record["session"], ""
        history = (history + record["prompt"])[-_CHARACTERS:]
        yield history
        history += record["output"]
