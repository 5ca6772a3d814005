"""A target that recites recorded outputs by ids, whatever is drafted; engine, codec and server around it are real."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from ssd.config import CacheConfig, DraftConfig, EngineConfig
from ssd.drafting import make_drafter
from ssd.engine import Engine
from ssd.jit.addresses import Int64s
from ssd.model.runners.sequential_runner import FullContextRunner
from ssd.model.sampling.sampler import PassOutput
from ssd.model.target import TokenMatrix
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests.tokenizers_for_tests import write_model_directory

BEGIN, END = "<|recites|>", "<|stop|>"
MAX_LENGTH = 8192

_TEMPLATE = """{%- set begins = BEGINS -%}{%- set told = namespace(begin='') -%}
{{- tools|map(attribute='function.name')|join(' ') if tools -}}
{%- for message in messages -%}
{{- '<|user|>' ~ message.role ~ ' ' ~ (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- call.id ~ call.function.name ~ call.function.arguments|tojson -}}
{%- endfor -%}
{%- if message.content in begins -%}{%- set told.begin = begins[message.content] -%}{%- endif -%}
{%- endfor -%}{{- 'BEGIN' ~ told.begin -}}"""
"""After the conversation come the first tokens of the answer, as the real model's template has them."""

Outputs = Mapping[str, tuple[str, str]]
"""What is said where a conversation's last request is "recite NAME": what the template writes of it, and the rest."""


def reciting(
    directory: Path, outputs: Outputs, special: Collection[str], added: Collection[str]
) -> Callable[[ExitStack], Engine]:
    """Loads an engine; ``special`` : tokens of the vocabulary that text leaves out; ``added`` : others it shows."""
    begins = {f"recite {name}": begin for name, (begin, _) in outputs.items()}
    template = _TEMPLATE.replace("BEGINS", json.dumps(begins, ensure_ascii=False)).replace("BEGIN", BEGIN)
    write_model_directory(directory, chat_template=template)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*special, BEGIN, END]])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": BEGIN}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(END)}))

    def load(resources: ExitStack) -> Engine:
        codec = TextCodec.load(str(directory))
        caches = CacheManager(CacheConfig(), codec.fingerprint)
        resources.callback(caches.close)
        target = RecitingTarget(codec, outputs, num_slots=4)
        config = EngineConfig(max_num_seqs=4, max_model_len=MAX_LENGTH)
        drafter = make_drafter("ssd", DraftConfig())
        return Engine(target, drafter=drafter, codec=codec, caches=caches, config=config)

    return load


class RecitingTarget(FullContextRunner):
    """Its logits are those of a model that learned the outputs by heart."""

    backend = "reciting"

    def __init__(self, codec: TextCodec, outputs: Outputs, num_slots: int) -> None:
        super().__init__(_no_model(codec.vocab_size), num_slots, MAX_LENGTH)
        self._codec = codec
        self._end = codec.eos_token_ids[0]
        (self._begin,) = codec.encode_completion(BEGIN)
        self._answers = {
            name: (len(codec.encode_completion(begin)), [*codec.encode_completion(rest), self._end])
            for name, (begin, rest) in outputs.items()
        }
        self._answer = lru_cache(maxsize=64)(self._find)

    def warm_up(self) -> None:
        """There are no weights."""

    def _append(self, slots: Int64s, tokens: TokenMatrix, counts: Int64s, **kwargs: Any) -> PassOutput:
        if not kwargs.get("is_scored", True):
            return PassOutput(torch.empty(0))
        logits = torch.zeros(len(slots), int(max(counts)), self.vocab_size)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            text = self._token_ids[slot, : self.length(slot) + int(count)].tolist()
            for place in range(int(count)):
                logits[row, place, self._next(text[: len(text) - int(count) + place + 1])] = 50.0
        return PassOutput(logits)

    def _next(self, text: list[int]) -> int:
        if self._begin not in text:
            return self._end
        begin = len(text) - text[::-1].index(self._begin)
        num_begun, output = self._answer(tuple(text[:begin]))
        said = text[begin + num_begun :]
        return output[len(said)] if output[: len(said)] == said and len(said) < len(output) else self._end

    def _find(self, prompt: tuple[int, ...]) -> tuple[int, list[int]]:
        asked = re.findall(r"recite ([\w./-]+)", self._codec.decode(prompt))
        return self._answers[asked[-1]] if asked else (0, [self._end])


def _no_model(vocab_size: int) -> Any:
    """What a target asks of its model."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=vocab_size))
    return SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, config=config, forward=lambda: None)
