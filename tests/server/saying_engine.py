"""An engine that says what the last message tells it to, as a model would that had been trained to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd.engine import FinishReason, Request, RequestOutput, RequestStats
from tests.server.failing_engine import CharCodec, FailingEngine


class SayingCodec(CharCodec):
    """Its prompt is the last message alone."""

    added_tokens: Mapping[str, int] = {}

    def __init__(self, template: str) -> None:
        super().__init__()
        self._template = template

    def chat_template(self, given: str | None = None, **_options: Any) -> str | None:
        return given or self._template

    def encode_chat(self, messages: list[dict[str, Any]], **_options: Any) -> list[int]:
        return self.encode_prompt(messages[-1]["content"])


class SayingEngine(FailingEngine):
    """Says the prompt, ``width`` tokens a step, and ends."""

    def __init__(self, template: str, *, width: int = 3) -> None:
        super().__init__()
        self.codec = SayingCodec(template)
        self._width = width

    def _advance(self, request: Request, stats: RequestStats) -> RequestOutput:
        begin = stats.num_output_tokens
        most = request.sampling.max_tokens or len(request.prompt_token_ids)
        said = request.prompt_token_ids[:most]
        token_ids = said[begin : begin + self._width]
        stats.num_output_tokens += len(token_ids)
        reason = None
        if request.request_id in self._cancelled:
            reason = FinishReason.CANCELLED
        elif stats.num_output_tokens == len(said):
            reason = FinishReason.LENGTH if most < len(request.prompt_token_ids) else FinishReason.STOP
        return RequestOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            text="".join(map(chr, token_ids)),
            finish_reason=reason,
            stats=stats,
        )
