"""Slow twins of what is done with text: decode everything, then look at one character after another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ssd.text.codec import Example, TextCodec
from ssd.text.messages import normalize_messages


def decoded_text(codec: TextCodec, token_ids: list[int]) -> str:
    """The whole text, special tokens left out."""
    return codec.decode([token_id for token_id in token_ids if token_id not in codec.special_ids])


def stopped_text(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """``text`` up to the first stop string to be complete, the longest of those complete at once; and which it was."""
    for end in range(1, len(text) + 1):
        hits = [string for string in stop if text[:end].endswith(string)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include_stop else end - len(hit)], hit
    return text, None


def common_subsequence(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common subsequence, by the textbook's table."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def json_values(content: bytes) -> int:
    """Commas, colons and opening brackets outside strings of a JSON text, strings taken out first."""
    without_strings = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", content, flags=re.DOTALL)
    return sum(without_strings.count(mark) for mark in (b",", b":", b"[", b"{"))


def chat_examples(codec: TextCodec, messages: Sequence[Mapping[str, Any]]) -> list[Example]:
    """Every assistant message with text behind the messages before it, encoded as the server encodes them."""
    turns = normalize_messages(messages)
    return [
        codec.encode_answer_example(codec.encode_chat(turns[:number]), turn["content"])
        for number, turn in enumerate(turns)
        if turn["role"] == "assistant" and turn["content"] and number > 0
    ]
