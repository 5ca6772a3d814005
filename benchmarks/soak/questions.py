"""Requests of every kind, with the answers of an engine that is called directly, without drafts and without a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, EngineConfig, SamplingParams, StructuredOutput
from ssd.engine import Engine, Request
from ssd.text.codec import TextCodec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PROMPT_CHARACTERS = 160
_REGEX = r"[a-z]{3,8}\([a-z]{1,4}, [0-9]{1,3}\)"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "remove", "list"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one choice must be."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the answer of every choice."""

    kind: str
    path: str
    body: Mapping[str, Any]
    prompt: tuple[int, ...]
    sampling: SamplingParams
    answers: tuple[Answer, ...]


class Reference:
    """The engine that knows the answers. Owned by one thread."""

    def __init__(self) -> None:
        self._codec = TextCodec.load(str(MODEL_PATH))
        self._engine = Engine.from_pretrained(
            MODEL_PATH,
            device="cpu",
            dtype="float32",
            codec=self._codec,
            config=EngineConfig(max_num_seqs=8, max_model_len=512, enable_prefix_caching=False, exact="on"),
            draft=DraftConfig(num_speculative_tokens=0),
        )

    def questions(self, number: int, max_tokens: int) -> list[Question]:
        """``number`` questions, of each kind as many."""
        kinds = self._kinds(max_tokens)
        return [self._question(*next(kinds)) for _ in range(number)]

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _kinds(self, max_tokens: int) -> Iterator[tuple[str, str, str, dict[str, Any], StructuredOutput | None, int]]:
        """(kind, path, text, fields of body and sampling, structured output, choices), in turn."""
        sampled = {"temperature": 0.8, "top_p": 0.95}
        for number, text in enumerate(snippets(seed=13)):
            asked, limit = text[-_PROMPT_CHARACTERS:], {"max_tokens": max_tokens}
            greedy = {**limit, "temperature": 0.0}
            seeded = {**limit, **sampled, "seed": number}
            yield "completion, greedy", COMPLETIONS, asked, greedy, None, 1
            yield "completion, sampled", COMPLETIONS, asked, seeded, None, 1
            yield "completion, n=3", COMPLETIONS, asked, seeded, None, 3
            yield "completion, stop", COMPLETIONS, asked, {**greedy, "stop": ("\n\n", "return")}, None, 1
            yield "completion, penalties", COMPLETIONS, asked, {**seeded, "presence_penalty": 0.5}, None, 1
            yield "chat, greedy", CHAT, asked, greedy, None, 1
            yield "chat, n=2", CHAT, asked, seeded, None, 2
            yield "chat, schema", CHAT, asked, greedy, StructuredOutput("json_schema", json.dumps(_SCHEMA)), 1
            yield "completion, regex", COMPLETIONS, asked, seeded, StructuredOutput("regex", _REGEX), 1

    def _question(
        self, kind: str, path: str, text: str, fields: dict[str, Any], output: StructuredOutput | None, n: int
    ) -> Question:
        body: dict[str, Any] = {**fields, "n": n, "return_token_ids": True}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": text}]
            prompt = self._codec.encode_chat(body["messages"])
        else:
            body["prompt"] = text
            prompt = self._codec.encode_prompt(text)
        if output is not None and output.kind == "json_schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "call", "schema": _SCHEMA}}
        elif output is not None:
            body["structured_outputs"] = {output.kind: output.source}
        sampling = SamplingParams(**fields, structured_output=output)
        return Question(kind, path, body, tuple(prompt), sampling, tuple(self._answers(prompt, sampling, n)))

    def _answers(self, prompt: Sequence[int], sampling: SamplingParams, n: int) -> list[Answer]:
        ids: list[list[int]] = [[] for _ in range(n)]
        texts, reasons = [""] * n, [""] * n
        for index in range(n):
            request = Request(
                request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling, choice_index=index,
                namespace=None,
            )  # fmt: skip
            self._engine.submit(request)
        while self._engine.has_work():
            for step in self._engine.step():
                index = int(step.request_id)
                ids[index] += step.token_ids
                texts[index] += step.text
                reasons[index] = str(step.finish_reason) if step.finish_reason is not None else ""
        return [Answer(tuple(ids[i]), texts[i], reasons[i]) for i in range(n)]
