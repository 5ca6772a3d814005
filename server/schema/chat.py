"""What requests to /v1/chat/completions may contain."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from server.schema.generate import GenerateBody
from server.schema.messages import ChatTemplateFields
from ssd.config import MAX_LOGPROBS
from ssd.errors import RequestError


class ChatBody(ChatTemplateFields, GenerateBody):
    """POST /v1/chat/completions."""

    include_reasoning: bool = Field(default=True, description="false: what the model thinks is left out of the answer")
    reasoning_effort: str | None = Field(default=None, max_length=64)
    logprobs: bool = False
    top_logprobs: int = Field(
        default=0, ge=0, le=MAX_LOGPROBS, description="alternatives to report beside each token; needs ``logprobs``"
    )
    echo: Literal[False] = False

    def num_logprobs(self) -> int | None:
        """``top_logprobs``; raises RequestError where ``logprobs`` does not ask for them."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def template_arguments(self) -> dict[str, Any]:
        """As above; ``reasoning_effort`` is the template's to honour, as in vLLM."""
        arguments = super().template_arguments()
        if self.reasoning_effort is not None:
            arguments["template_kwargs"] = {"reasoning_effort": self.reasoning_effort, **arguments["template_kwargs"]}
        return arguments
