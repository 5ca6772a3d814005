"""A target that recites recorded outputs, token by token, whatever is drafted: real engine, codec and server around it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from ssd.config import CacheConfig, DraftConfig, EngineConfig
from ssd.engine import Engine
from ssd.engine.drafters import make_drafter
from ssd.model.sampling.sampler import PassOutput
from ssd.model.target import TokenMatrix
from ssd.model.ways.row_target import WholeTarget
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec
from tests.tokenizers_for_tests import write_model_directory

TEMPLATE = """{%%- set begins = %s -%%}{%%- set ns = namespace(begin='') -%%}{%%- set _ = tools -%%}
{%%- for message in messages -%%}
{{- '<|' ~ ('user' if message.role == 'tool' else message.role) ~ '|>' ~ (message.content or '') -}}
{%%- for call in message.tool_calls or [] -%%}{{- '\n' ~ call.function.name ~ call.function.arguments|tojson -}}{%%- endfor -%%}
{%%- if message.role == 'tool' -%%}{%%- set ns.tool = true -%%}{%%- endif -%%}
{%%- if message.content in begins -%%}{%%- set ns.begin = begins[message.content] -%%}{%%- endif -%%}
{%%- endfor -%%}{{- '<|assistant|>' ~ ns.begin -}}"""
"""Of a conversation; the answer begins as ``begins`` has it for the last message that is named there."""


class RecitingTarget(WholeTarget):
    """Says what a text's last line of the kind "recite NAME" asks for, and ends."""

    way = "reciting"

    def __init__(self, codec: TextCodec, outputs: Mapping[str, list[int]], num_slots: int, max_length: int) -> None:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=codec.vocab_size))
        super().__init__(_NoModel(config), num_slots, max_length)  # type: ignore[arg-type]
        self._codec, self._outputs = codec, outputs
        (self._begin,) = codec.encode_completion("<|assistant|>")

    def warm_up(self) -> None:
        """There are no weights."""

    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> PassOutput:
        self.prefill(slots, tokens, counts)
        logits = torch.zeros(len(slots), int(max(counts)), self.vocab_size)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            text = self._texts[slot]
            for place in range(count):
                logits[row, place, self._next(text[: len(text) - int(count) + place + 1])] = 50.0
        return PassOutput(logits)

    def _next(self, text: list[int]) -> int:
        end = self._codec.eos_token_ids[0]
        if self._begin not in text:
            return end
        begin = len(text) - text[::-1].index(self._begin)
        asked = re.findall(r"recite (\S+?);(.*?);", self._codec.decode(text[:begin]), re.DOTALL)
        if not asked:
            return end
        name, begun = asked[-1]
        said = text[begin + len(self._codec.encode_completion(begun)) :]
        output = [*self._outputs[name], end]
        return output[len(said)] if said == output[: len(said)] and len(said) < len(output) else end


class _NoModel:
    """What a target asks of its model."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any) -> None:
        self.config = config

    def forward(self) -> None:
        """Never called."""
