"""A conversation, and how it becomes a prompt."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from server.schema.tool_fields import ToolFields
from ssd.errors import RequestError


class ChatTemplateFields(ToolFields):
    """How messages and tools become a prompt."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = Field(default=None, max_length=1 << 16)
    documents: Annotated[list[dict[str, str]], Field(fail_fast=True)] = Field(
        default_factory=list, description="texts for a template that puts them into the prompt"
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = False

    def template_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``TextCodec.encode_chat``; raises RequestError when they contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: leave one out",
                param="continue_final_message",
            )
        if self.add_special_tokens:
            raise RequestError(
                "add_special_tokens is not supported with messages: the chat template adds them",
                param="add_special_tokens",
            )
        use = self.tool_use()
        told: dict[str, Any] = {} if use is None else {"tools": use.told()}
        if self.documents:
            told["documents"] = self.documents
        return {
            "add_generation_prompt": not self.continue_final_message and self.add_generation_prompt is not False,
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template,
            "template_kwargs": {**self.chat_template_kwargs, **told},
        }
