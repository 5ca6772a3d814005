"""The description of the API in /openapi.json, which /docs shows."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from server.admission.auth_middleware import OPEN_PATHS
from server.schema.anthropic import AnthropicBody, CountTokensBody
from server.schema.body import Body
from server.schema.chat import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.generate import CompletionBody
from server.schema.responses import ResponsesBody

_BODIES: dict[str, tuple[type[Body], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (AnthropicBody,),
    "/v1/messages/count_tokens": (CountTokensBody,),
    "/tokenize": (TokenizeTextBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
}
_MESSAGES = [{"role": "user", "content": "Write a haiku about caches."}]
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def read_lines(path):\n", "max_tokens": 64, "temperature": 0},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 64, "stream": True},
    "/v1/responses": {"input": "Write a haiku about caches.", "max_output_tokens": 64},
    "/v1/messages": {"model": "MODEL", "max_tokens": 64, "messages": _MESSAGES},
    "/v1/messages/count_tokens": {"model": "MODEL", "messages": _MESSAGES},
    "/tokenize": {"prompt": "def read_lines(path):\n"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_ABOUT = {
    "/v1/completions": "Continue a text.",
    "/v1/chat/completions": "Answer a conversation, with tools, reasoning and structured output.",
    "/v1/responses": "Answer a conversation by OpenAI's Responses API. Responses are not stored.",
    "/v1/messages": "Answer a conversation by Anthropic's Messages API.",
    "/v1/messages/count_tokens": "Count the tokens of a message's prompt.",
    "/v1/models": "List the model and its LoRA adapters.",
    "/v1/models/{name}": "Describe one model.",
    "/v1/cache": "Delete all cached text of the key's tenant.",
    "/tokenize": "Return the token ids of a text, or of a conversation after the chat template.",
    "/detokenize": "Return the text of token ids.",
    "/live": "Return 200 while the process answers.",
    "/health": "Return 200 while requests are accepted, and 503 before and after.",
    "/version": "Return the version of the server.",
    "/metrics": "Return metrics for Prometheus.",
}
_FIELDS = {
    "model": "Name of the model or of a LoRA adapter; optional if the server has only one model.",
    "messages": "Messages of the conversation.",
    "max_tokens": "Maximum number of tokens to generate (default: up to the model's context).",
    "max_output_tokens": "Maximum number of tokens to generate (default: up to the model's context).",
    "temperature": "Sampling temperature; 0 is greedy (default: the model's generation_config.json, else 1).",
    "top_p": "Sample from the smallest set of tokens with this total probability.",
    "top_k": "Sample from this many most probable tokens; 0 or -1: all.",
    "min_p": "Minimum probability of a token, relative to the most probable token.",
    "seed": "Seed of the sampling. Equal requests with equal seeds get equal outputs.",
    "n": "Number of choices.",
    "stop": "Strings that end the output.",
    "stop_sequences": "Strings that end the output.",
    "stop_token_ids": "Token ids that end the output.",
    "include_stop_str_in_output": "Include the stop string in the text.",
    "ignore_eos": "Continue after the end-of-text token.",
    "stream": "Send the output as server-sent events while it is generated.",
    "stream_options": "Options of a stream.",
    "include_usage": "Send the token counts in the last chunk.",
    "continuous_usage_stats": "Send the token counts in every chunk.",
    "include_obfuscation": "Pad chunks, so that their sizes do not reveal drafts.",
    "logit_bias": "Numbers that are added to the logits of tokens, by token id.",
    "repetition_penalty": "Penalty factor for tokens in the prompt or the output; 1 is none.",
    "presence_penalty": "Penalty for tokens that occur in the output.",
    "frequency_penalty": "Penalty for each occurrence of a token in the output.",
    "bad_words": "Texts that the output must not contain.",
    "allowed_token_ids": "The only token ids that may be generated.",
    "response_format": "Form of the output: text, any JSON object, or JSON that follows a schema.",
    "structured_outputs": "Constraint of the output: a JSON schema, a regular expression, choices or a grammar.",
    "prediction": "Text that the output is expected to resemble. It is drafted, and the output does not change.",
    "cache_salt": "Text that separates the prefix cache and the retrieval cache from requests with another salt.",
    "priority": "Priority of the request under --scheduling-policy priority; lower values are served first.",
    "top_logprobs": "Number of alternatives with log-probabilities per token.",
    "logprobs": "Return the log-probabilities of the output tokens.",
    "echo": "Return the prompt in front of the output.",
    "add_special_tokens": "Add the tokenizer's special tokens, e.g. the begin-of-text token.",
    "return_token_ids": "Return the token ids of the prompt and the output.",
    "return_tokens_as_token_ids": 'Write tokens in log-probabilities as "token_id:ID".',
    "return_token_strs": "Return the text of each token.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether the model may, must or must not call tools, or the tool that it must call.",
    "parallel_tool_calls": "Allow several tool calls in one answer.",
    "disable_parallel_tool_use": "Allow at most one tool call in an answer.",
    "reasoning_effort": "Effort of the reasoning, as the chat template defines it.",
    "reasoning": "Options of the reasoning.",
    "thinking": "Options of the reasoning.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "add_generation_prompt": "End the prompt with the beginning of an assistant message.",
    "continue_final_message": "Continue the last message instead of answering it.",
    "include": "Further fields of the response.",
    "context_management": "Removal of earlier thinking from the conversation.",
    "output_config": "Form of the output, and the effort of the reasoning.",
    "prompt": "The text.",
    "tokens": "Token ids.",
}
"""Descriptions of request fields in /openapi.json by field name. A field has the same description in all APIs."""
_PLACE = "#/components/schemas/{model}"


class _ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: _ErrorDetails


class _AnthropicErrorDetails(BaseModel):
    type: str
    message: str
    details: dict[str, Any] = {}


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: _AnthropicErrorDetails
    request_id: str | None


def describe(app: FastAPI, *, needs_key: bool) -> None:
    """Complete /openapi.json with request bodies, errors and API keys, which FastAPI cannot know from the endpoints."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _complete(found, needs_key)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]


def _complete(description: dict[str, Any], needs_key: bool) -> None:
    schemas: dict[str, Any] = {}
    for kind in (Error, AnthropicError):
        _reference(kind, schemas)
    components: dict[str, Any] = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in description["paths"].items():
        for operation in operations.values():
            if path in _BODIES:
                references = [_reference(kind, schemas) for kind in _BODIES[path]]
                schema = references[0] if len(references) == 1 else {"anyOf": references}
                content = {"schema": schema, "example": _EXAMPLES[path]}
                operation["requestBody"] = {"required": True, "content": {"application/json": content}}
            operation["description"] = _ABOUT[path]
            operation["responses"] = _responses(path)
            if needs_key and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
    description["components"] = components


def _reference(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, str]:
    schema = kind.model_json_schema(ref_template=_PLACE)
    found = {**schema.pop("$defs", {}), kind.__name__: schema}
    for each in found.values():
        for name, field in each.get("properties", {}).items():
            if name in _FIELDS:
                field.setdefault("description", _FIELDS[name])
    schemas |= found
    return {"$ref": _PLACE.format(model=kind.__name__)}


def _responses(path: str) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {"schema": {"type": "string"} if path == "/metrics" else {"type": "object"}}}
    if path.endswith(("/completions", "/responses", "/messages")):
        content["text/event-stream"] = {}
    answers = {"200": {"description": "the result", "content": content}}
    if path == "/health":
        return {**answers, "503": {"description": "requests are not accepted now", "content": content}}
    model = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    error = {"application/json": {"schema": {"$ref": _PLACE.format(model=model)}}}
    return {**answers, "default": {"description": "an error", "content": error}}
