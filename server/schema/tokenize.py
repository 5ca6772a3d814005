"""What requests to /tokenize and /detokenize may contain."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.schema.body import Body
from server.schema.messages import ChatTemplateFields


class TokenizeTextBody(Body):
    """POST /tokenize with a prompt."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatTemplateFields, Body):
    """POST /tokenize with messages."""

    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
