"""Conversations of many answers: encoded turn by turn, and equal to every prompt encoded by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_builder.__main__ import main
from cache_builder.evaluation.log import read_log
from cache_builder.inputs import conversations
from cache_builder.inputs.conversations import EncodedAnswer, encode_answers
from cache_builder.inputs.sources import find_sources
from ssd.errors import RequestError
from ssd.text.codec import Example, TextCodec
from ssd.text.messages import normalize_messages
from tests.cache_files import read_cache
from tests.tokenizers_for_tests import write_model_directory

SYSTEM = {"role": "system", "content": "Answer briefly."}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
APPENDING = {
    "plain": PLAIN,
    "calls": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "an opening that history lacks": PLAIN.replace(
        "<|assistant|>{% endif %}", "<|assistant|>{% if tools is not defined %}<think></think>{% endif %}{% endif %}"
    ),
    "words": "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n",
}
OTHERS = {
    "thoughts of the last turn alone": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "thoughts after the last question": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.arguments | tojson }}{% endfor %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "tools before the last question": (
        "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}<|{{ m.role }}|>"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "numbers": "{% for m in messages %}<|{{ m.role }}|>{{ loop.index }} {{ m.content }}{% endfor %}<|assistant|>",
    "how many": "{{ messages | length }}" + PLAIN,
}


def conversation(num_turns: int) -> list[dict[str, Any]]:
    """Questions and answers; some of these call a tool, and some were thought about."""
    random = np.random.default_rng(num_turns)
    words = ["the", "key", "is", "under", "blue", "mats,", "hello", "<|user|>", "naïve", "你好\n\n"]
    messages: list[dict[str, Any]] = [SYSTEM]
    for number in range(num_turns):
        text = " ".join(random.choice(words, int(random.integers(1, 9))).tolist())
        messages.append({"role": "user", "content": text})
        if number % 3 == 1:
            call = {"name": "look", "arguments": json.dumps({"where": text})}
            calls = [{"id": f"call{number:05}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": f"call{number:05}", "content": text})
        thought = {"reasoning_content": f"hm {text}"} if number % 5 == 2 else {}
        if number % 3 == 1 and number % 2:
            messages[-2] |= {"reasoning_content": "hm"}
        messages.append({"role": "assistant", "content": text[::-1], **thought})
    return messages


def one_by_one(
    messages: list[dict[str, Any]], kwargs: dict[str, Any], codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> list[Example | EncodedAnswer]:
    """The slow twin: each prompt is encoded by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(conversations, "_FEW", len(messages))
        return encode_answers(messages, kwargs, codec)


@pytest.mark.parametrize("name", [*APPENDING, *OTHERS])
@pytest.mark.parametrize("with_tools", [False, True])
def test_turns_give_what_each_prompt_gives_by_itself(
    name: str, with_tools: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = TextCodec.load(str(write_model_directory(tmp_path)), chat_template=(APPENDING | OTHERS)[name])
    kwargs = {"tools": TOOLS} if with_tools else {}
    messages = normalize_messages(conversation(12))
    found = encode_answers(messages, kwargs, codec)
    expected = one_by_one(messages, kwargs, codec, monkeypatch)
    assert [([*map(int, each.token_ids)], each.prompt_length) for each in found] == expected
    if name in APPENDING:
        assert len(found) == 16 and all(isinstance(each, EncodedAnswer) for each in found)


def test_a_template_that_drops_old_messages_is_refused_as_the_server_refuses_it(tmp_path: Path) -> None:
    template = PLAIN.replace("in messages", "in messages[-6:]")
    codec = TextCodec.load(str(write_model_directory(tmp_path)), chat_template=template)
    with pytest.raises(RequestError, match=r"no place for messages\[0\]"):
        encode_answers(normalize_messages(conversation(12)), {}, codec)


def test_what_is_encoded_grows_with_the_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec.load(str(write_model_directory(tmp_path)))
    encode, num_messages = codec.encode_chat, [0]

    def counted(messages: Any, **options: Any) -> list[int]:
        num_messages[0] += len(messages)
        return encode(messages, **options)

    monkeypatch.setattr(codec, "encode_chat", counted)
    counts = []
    for num_turns in (100, 200):
        num_messages[0] = 0
        encode_answers(normalize_messages(conversation(num_turns)), {}, codec)
        counts.append(num_messages[0])
    assert counts[1] < 2.1 * counts[0]


def test_a_cache_and_a_log_of_a_long_conversation_are_those_of_its_prompts(
    model: Path, codec: TextCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": conversation(30)}))
    options = ["build", str(tmp_path / "in.jsonl"), "--tokenizer", str(model), "--out"]
    sources = find_sources([str(tmp_path / "in.jsonl")])
    assert main([*options, str(tmp_path / "fast")]) == 0
    fast = read_log(sources, codec)
    monkeypatch.setattr(conversations, "_FEW", 1000)
    assert main([*options, str(tmp_path / "slow")]) == 0
    slow = read_log(sources, codec)
    assert len(fast) == 40 and np.array_equal(fast.tokens, slow.tokens)
    assert np.array_equal(fast.prompt_lengths, slow.prompt_lengths)
    assert read_cache(tmp_path / "fast", codec.fingerprint) == read_cache(tmp_path / "slow", codec.fingerprint)
