"""Conversations on their way into the engine: the prompt, and what the answer is held to and read by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from server.base.settings import ServerSettings
from server.intake.conversations import AnswerPlan, plan_answer
from server.intake.message_formats import MessageFormat, MessageFormats
from server.intake.texts import Texts, codec_of
from server.schema.chat import ChatBody
from server.schema.messages import ChatTemplateFields
from server.schema.tokenize import TokenizeChatBody
from server.tenants.turns import Lanes
from server.tools.messages import with_short_call_ids
from ssd.errors import RequestError

if TYPE_CHECKING:
    from ssd.engine import Engine

B = TypeVar("B", bound=ChatTemplateFields)


class Chats:
    """Tells the model of tools in the way its chat template does, or in words where that knows of none."""

    def __init__(self, texts: Texts, lanes: Lanes, settings: ServerSettings) -> None:
        self._texts, self._lanes, self._settings = texts, lanes, settings
        self._formats = MessageFormats(settings.tool_call_parser, settings.reasoning_parser)

    async def prepare(self, engine: Engine, body: ChatBody) -> tuple[list[int], AnswerPlan]:
        """Token ids of the conversation, and the plan of its answer; raises RequestError."""
        body, form = self._told(engine, body)
        prompt = await self._texts.messages(engine, body, tools_in_words=form.in_words)
        codec, limits, use = codec_of(engine), self._settings.limits, body.tool_use()
        if use is not None and (use.mode == "required" or body.response_format is not None):  # a grammar of all tools
            return prompt, await self._lanes.answers.run(plan_answer, body, form, codec, prompt, limits)
        return prompt, plan_answer(body, form, codec, prompt, limits)

    async def tokenize(self, engine: Engine, body: TokenizeChatBody) -> tuple[list[int], Any]:
        """Token ids of the conversation, and each one's text where that is asked for."""
        body, form = self._told(engine, body)
        return await self._texts.tokenize(engine, body, tools_in_words=form.in_words)

    def _told(self, engine: Engine, body: B) -> tuple[B, MessageFormat]:
        """The conversation as the template is given it, and the format of its messages."""
        use = body.tool_use()
        if use is not None and use.mode == "none" and self._settings.exclude_tools_when_tool_choice_none:
            body, use = body.without_tools(), None
        codec = codec_of(engine)
        if body.documents and "documents" not in (codec.chat_template(body.chat_template) or "documents"):
            raise RequestError(
                "the chat template of this model does not read documents: put them into a message", param="documents"
            )
        form = self._formats.of(codec, body.chat_template, with_tools=use is not None)
        if form.has_short_call_ids:
            body = body.model_copy(update={"messages": with_short_call_ids(body.messages)})
        return body, form
