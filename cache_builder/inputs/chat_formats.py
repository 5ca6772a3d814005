"""Extraction of prompts and answers from the record formats of other programs.

Supported are the bodies and batches of OpenAI's and Anthropic's APIs, the logs of LiteLLM and Langfuse, exports of
ChatGPT and Claude, ShareGPT, and plain pairs. A format is a key and a small reader, see `CONVERSATIONS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cache_builder.inputs.otel_records import find_spans, is_openinference, parse_model_call
from cache_builder.inputs.recorded_responses import STATUSES, as_mapping, find_chunks, is_error, join_chunks
from ssd.errors import RequestError

Message = Mapping[str, Any]

UNDERSTOOD: Final = (
    'supported are "text", "prompt" with "completion", "messages", "conversations", "token_ids", "request" or '
    '"messages" or "input" with "response" or "output", batches, and exports of chats; use --field for other names'
)
_REDACTED: Final = ("redacted-by-litellm", "redacted")
_MAX_DEPTH: Final = 6


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt with its answers, or a conversation, extracted from a record.

    Attributes:
        prompt: The prompt as text, messages or token ids; or a whole conversation. None: unknown.
        answers: The answers to the prompt, each a text or an assistant message. Empty if ``is_conversation``.
        is_conversation: Whether ``prompt`` is a conversation that contains its answers, the assistant messages.
        tools: The tools in OpenAI's format.
        template_kwargs: The variables of the chat template as they are in the record, not yet validated.
    """

    prompt: str | Sequence[Any] | None
    answers: tuple[str | Message, ...] = ()
    is_conversation: bool = False
    tools: Any = None
    template_kwargs: Any = field(default_factory=dict)


_LISTS: Final = ("samples", "data", "runs", "results", "items", "records", "entries", "rows")
"""Keys under which a file that is one JSON object may contain the list of its records."""


def find_nested_records(line: Mapping[str, Any], depth: int = 0) -> tuple[str, list[Mapping[str, Any]]] | None:
    """Return the key and the list of records in a JSON object; None if there is no list, or more than one."""
    lists = {key: value for key, value in line.items() if _is_list_of_objects(value)}
    key = next((name for name in _LISTS if name in lists), next(iter(lists)) if len(lists) == 1 else None)
    if key is not None:
        return key, lists[key]
    inner = ((key, find_nested_records(value, depth + 1)) for key, value in line.items() if isinstance(value, dict))
    found = [(f"{key}.{within[0]}", within[1]) for key, within in inner if within] if depth < _MAX_DEPTH else []
    return found[0] if len(found) == 1 else None


def _is_list_of_objects(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
    return is_list and not all("role" in each for each in value)


def parse_exchanges(line: Mapping[str, Any]) -> list[Exchange] | None:
    """Return the prompts and answers in a record; None if the format of the record is unknown.

    Raises RequestError if the format is known but not supported.
    """
    if (spans := find_spans(line)) is not None:
        if any(map(is_openinference, spans)):
            raise _refusal("a span of OpenInference (Phoenix)", "spans with gen_ai attributes")
        calls = [(span, parse_model_call(span)) for span in spans]
        return [each for _, call in calls for each in ((parse_exchanges(call) or ()) if call else (Exchange(None),))]
    for names, what, instead in _REFUSED:
        if line.keys() >= names and "completion" not in line:
            raise _refusal(what, instead)
    for key, kinds, read in CONVERSATIONS:
        if isinstance(line.get(key), kinds):
            return [Exchange(read(line), is_conversation=True, **_template(line))]
    if isinstance(observations := line.get("observations"), list):
        found = [parse_exchanges(each) for each in observations if isinstance(each, dict)]
        return [exchange for each in found for exchange in each or ()]
    answer_keys = [key for key in ANSWER_KEYS if key in line]
    answer_key = next((key for key in answer_keys if _is_there(line[key])), answer_keys[0] if answer_keys else None)
    there = [key for key in PROMPT_KEYS if _is_there(line.get(key))]
    request_key = next((key for key in there if _has_prompt(line, key)), None)
    if answer_key is None:
        if request_key == "messages":
            return [
                Exchange(_turns(_parse_nested_json(line["messages"]), line), is_conversation=True, **_template(line))
            ]
        if request_key is None and (conversation := _only_conversation(line)) is not None:
            return [Exchange(_turns(conversation, line), is_conversation=True, **_template(line))]
        is_call = "text" not in line and (any(key in _CALLS for key in there) or "input" in line)
        return [Exchange(None)] if is_call else None
    is_other = (
        line.get("type") in _NO_MODEL
        or line.get("status") == "failure"
        or is_error({key: line[key] for key in STATUSES if key in line})
    )
    answers = () if is_other else tuple(find_answers(line if answer_key == "choices" else line[answer_key]))
    if request_key in (None, "input") and (prompt := _instruction(line)):
        return [Exchange(prompt, answers, **_template(line))]
    if request_key is None:
        is_half = isinstance(line[answer_key], str) and not there and not any(key in line for key in _PLAIN)
        return None if is_half and answer_key in ("completion", "output") else [Exchange(None, answers)]
    prompt, options = _read_prompt(line, request_key)
    if isinstance(prompt, Mapping) or not (
        isinstance(prompt, str | Sequence) or hasattr(prompt, "__array__") or prompt is None
    ):
        keys = ", ".join(f'"{str(key)[:40]}"' for key in list(prompt)[:8]) if isinstance(prompt, Mapping) else ""
        raise RequestError(
            f'"{request_key}" must be text, messages or token ids, got {type(prompt).__name__}'
            + (
                f" with the keys {keys}: name the text with --field prompt=... and --field completion=..."
                if keys
                else ""
            )
        )
    if isinstance(prompt, list) and answers and _repeats(prompt[-1:], answers[0]):
        return [Exchange(prompt, is_conversation=True, **options)]
    if _is_redacted(prompt):
        prompt = None
    elif isinstance(prompt, str) and any(not isinstance(each, str) for each in answers):
        prompt = [{"role": "user", "content": prompt}]
    return [Exchange(prompt, answers, **options)]


_REFUSED: Final = (
    (
        {"chosen", "rejected"},
        "a pair of answers, one of them preferred (DPO),",
        "the preferred one with --field prompt=prompt --field completion=chosen",
    ),
    (
        {"preferred_output", "non_preferred_output"},
        "a pair of answers, one of them preferred (DPO),",
        "the preferred one with --field messages=input.messages --field completion=preferred_output",
    ),
    ({"run_type", "inputs"}, "a run of LangSmith", "its messages with --field"),
    ({"answer_id", "choices"}, "an answer of MT-bench without its question", "conversations"),
    ({"parent_id", "role", "text"}, "a message of a tree such as OpenAssistant's", "whole conversations"),
)
"""Record formats that are recognized but not supported: their keys, their names, and what the user can use instead."""


def _refusal(what: str, instead: str) -> RequestError:
    return RequestError(f"{what} is not supported: give {instead}")


def _only_conversation(line: Mapping[str, Any]) -> list[Any] | None:
    """Return the only list of chat messages in a record, under any key; None if there is none or more than one."""
    found = [
        value
        for value in line.values()
        if isinstance(value, list) and value and all(_has_keys(each, "role") and len(each) > 1 for each in value)
    ]
    return found[0] if len(found) == 1 else None


def _repeats(last: Sequence[Any], answer: str | Message) -> bool:
    """Return whether the last message equals the answer, so that the messages already contain the answer."""
    text = answer if isinstance(answer, str) else answer["content"]
    return any(
        _has_keys(each, "role", "content") and each["role"] == "assistant" and _text_of(each["content"]) == text
        for each in last
    )


# -- conversations, whole ---------------------------------------------------------------------------------------------

_ROLES: Final = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}


def _sharegpt(line: Mapping[str, Any]) -> Any:
    """Convert ShareGPT's messages, which have the fields ``from`` and ``value``, to chat messages."""
    turns = line["conversations"]
    if not isinstance(turns, list):
        return turns
    found, last_id = list[Any](), ""
    for number, turn in enumerate(turns):
        message = _named(turn["from"], turn["value"]) if _has_keys(turn, "from", "value") else turn
        if _has_keys(turn, "value") and turn.get("from") in _CALLERS and (calls := _calls_in(turn["value"])):
            last_id = f"call{number:05}"  # Mistral's templates require nine characters
            message = _message("assistant", "", [{**call, "id": last_id} for call in calls], "")
        elif isinstance(message, dict) and message.get("role") == "tool" and last_id:
            message = {**message, "tool_call_id": last_id}
        found.append(message)
    return found


_CALLERS: Final = ("function_call", "tool_call")


def _calls_in(value: Any) -> list[dict[str, Any]]:
    """Parse a text that consists of tool calls in JSON; any other text gives an empty list."""
    parsed = _parse_nested_json(value.strip()) if isinstance(value, str) else value
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(_has_keys(call, "name") for call in calls):
        return []
    return [_call(call, "id", "arguments" if "arguments" in call else "parameters") for call in calls]


def _claude(line: Mapping[str, Any]) -> Any:
    """Convert a conversation exported from Claude to chat messages."""
    turns = [turn for turn in line["chat_messages"] if isinstance(turn, dict) and "sender" in turn]
    return _join_turns((turn["sender"], turn.get("text") or _text_of(turn.get("content"))) for turn in turns)


def _chatgpt(line: Mapping[str, Any]) -> Any:
    """Convert a conversation exported from ChatGPT, a tree of messages, following the branch that was shown last."""
    nodes = {key: node for key, node in line["mapping"].items() if isinstance(node, dict)}
    at, branch, seen = line.get("current_node"), list[tuple[Any, str]](), set[str]()
    if not isinstance(at, str) or at not in nodes:
        at = next((key for key in reversed(nodes) if not nodes[key].get("children")), None)
    while isinstance(at, str) and at in nodes and at not in seen:
        seen.add(at)
        message = nodes[at].get("message")
        if isinstance(message, dict) and not as_mapping(message.get("metadata")).get(
            "is_visually_hidden_from_conversation"
        ):
            content = as_mapping(message.get("content"))
            parts = content.get("parts") if content.get("content_type", "text") in ("text", "multimodal_text") else None
            text = "\n".join(part for part in parts if isinstance(part, str)) if isinstance(parts, list) else ""
            branch.append((as_mapping(message.get("author")).get("role"), text))
        at = nodes[at].get("parent")
    return _join_turns(reversed(branch))


CONVERSATIONS: Final[tuple[tuple[str, tuple[type, ...], Callable[[Mapping[str, Any]], Any]], ...]] = (
    ("mapping", (dict,), _chatgpt),
    ("chat_messages", (list,), _claude),
    ("conversations", (list, dict), _sharegpt),
)
"""Formats of exported conversations: a key that identifies the format, the types of its value, and a converter."""


def _named(role: Any, content: Any) -> Message:
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content}


def _join_turns(turns: Iterator[tuple[Any, Any]]) -> Sequence[Message]:
    """Convert (role, text) pairs to chat messages. Tool messages are dropped, and turns of the same role are joined."""
    found: list[dict[str, Any]] = []
    for role, text in turns:
        message = _named(role, text)
        if not text or not isinstance(text, str) or message["role"] not in ("system", "user", "assistant"):
            continue
        if found and found[-1]["role"] == message["role"]:
            found[-1]["content"] += "\n\n" + text
        else:
            found.append({**message})
    return found


# -- prompts ----------------------------------------------------------------------------------------------------------

_CALLS: Final = ("request", "params", "body", "request_body", "requestBody", "proxy_server_request")
PROMPT_KEYS: Final = tuple(
    "request params body request_body requestBody messages prompt input proxy_server_request".split()
)
"""Keys under which records may contain the prompt; the first key with a prompt is used."""
_PLAIN: Final = ("messages", "prompt", "input")


def _has_prompt(line: Mapping[str, Any], key: str) -> bool:
    """Return whether a record contains a prompt under the key ``key``.

    The fields "request", "params" and "body" contain a prompt in some formats and other data in other formats.
    """
    if key in _PLAIN or (key == "request" and isinstance(line[key], str)):
        return True
    return not isinstance(_parse_nested_json(line[key]), str) and _read_prompt(line, key)[0] is not None


def _read_prompt(line: Mapping[str, Any], key: str) -> tuple[Any, dict[str, Any]]:
    if key in ("messages", "prompt"):
        value = line[key]
        parsed = _parse_nested_json(value) if key == "messages" else value
        is_chat = isinstance(parsed, list) and any(isinstance(each, dict) for each in parsed)
        return (_turns(parsed, line, key) if is_chat else _text_or_ids(value)), _template(line)
    value = _parse_nested_json(line[key])
    if isinstance(value, dict):
        body = _body(value)
        inner = next((name for name in _PLAIN if body.get(name)), None)
        return (None, {}) if inner is None else _read_prompt(body, inner)
    if isinstance(value, list) and any(_has_keys(each, "role") or _has_keys(each, "type") for each in value):
        return _turns(value, line, key), _template(line)
    if isinstance(line.get("instructions"), str) and isinstance(value, str):
        return _turns([{"role": "user", "content": value}], line), _template(line)
    return (line[key] if isinstance(line[key], str) else None), _template(line)


def _text_or_ids(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) else value


def _template(line: Mapping[str, Any]) -> dict[str, Any]:
    places = (
        line,
        *(as_mapping(line.get(name)) for name in ("model_parameters", "modelParameters", "optional_params")),
    )
    tools = next((_parse_nested_json(place["tools"]) for place in places if place.get("tools")), None)
    if isinstance(tools, list):
        tools = [_tool(tool) for tool in tools]
    return {"tools": tools, "template_kwargs": line.get("chat_template_kwargs") or {}}


def _tool(tool: Any) -> Any:
    """Convert a tool definition of Anthropic's or OpenAI's Responses API to the format of chat completions."""
    if not _has_keys(tool, "name"):
        return tool
    parameters = tool.get("input_schema", tool.get("parameters", {}))
    about = {"description": tool["description"]} if "description" in tool else {}
    return {"type": "function", "function": {"name": tool["name"], **about, "parameters": parameters}}


def _turns(messages: Any, body: Mapping[str, Any], name: str = "messages") -> Any:
    """Convert messages of Anthropic or LangChain, or items of OpenAI's responses, to messages of chat completions.

    Other values are returned unchanged. Raises RequestError that mentions the field ``name``.
    """
    if not isinstance(messages, list):
        return messages
    system = body.get("system") or body.get("instructions")
    found: list[Any] = [{"role": "system", "content": system}] if isinstance(system, str | list) else []
    for number, message in enumerate(messages):
        turns = list(_turn(message)) if isinstance(message, dict) else [message]
        for turn in turns:
            if isinstance(turn, dict) and "role" not in turn:
                keys = ", ".join(f'"{str(key)[:40]}"' for key in list(message)[:8])
                raise RequestError(f'"{name}"[{number}] has no "role" (its keys: {keys or "none"}): give chat messages')
        before = as_mapping(found[-1]) if found else {}
        if as_mapping(message).get("type") == "function_call" and before.get("role") == "assistant":
            found[-1] = {**before, "tool_calls": [*(before.get("tool_calls") or ()), *turns[0]["tool_calls"]]}
        else:
            found += turns
    return found


def _turn(message: Message) -> Iterator[Any]:
    kind, content = message.get("type"), message.get("content")
    if kind == "function_call":
        yield {"role": "assistant", "content": None, "tool_calls": [_call(message, "call_id", "arguments")]}
    elif kind == "function_call_output":
        yield {"role": "tool", "tool_call_id": message.get("call_id"), "content": _text_of(message.get("output"))}
    elif kind == "reasoning":
        return
    elif not isinstance(content, list) or not any(
        _has_keys(block, "type") and block["type"] in _BLOCKS for block in content
    ):
        given = {key: value for key, value in message.items() if key != "type"}
        if "role" not in message and isinstance(kind, str) and kind in _ROLES | _LANGCHAIN:
            given["role"] = (_ROLES | _LANGCHAIN)[kind]
        if isinstance(content, list):
            given["content"] = [_part(part) for part in content]
        if (
            isinstance(calls := message.get("tool_calls"), list)
            and calls
            and all(_has_keys(call, "name") for call in calls)
        ):
            given["tool_calls"] = [_call(call, "id", "args" if "args" in call else "arguments") for call in calls]
        yield given
    else:
        blocks = [block for block in content if isinstance(block, dict)]
        for block in blocks:
            if block.get("type") == "tool_result":
                text = _text_of(block.get("content"))
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        calls = [_call(block, "id", "input") for block in blocks if block.get("type") == "tool_use"]
        thought = "\n".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking")
        text = _text_of(blocks)
        if text or calls:
            yield _message(str(message.get("role")), text, calls, thought)


_LANGCHAIN: Final = {"system": "system", "tool": "tool"}
"""Maps those LangChain message types that no other format uses to roles of chat messages."""


def _part(part: Any) -> Any:
    if not _has_keys(part, "type") or part["type"] not in _TEXTS or "text" in part:
        return part
    return {**part, "text": part.get("value", part.get("content"))}


_BLOCKS: Final = ("tool_use", "tool_result", "thinking", "redacted_thinking")
_TEXTS: Final = ("text", "input_text", "output_text")


def _call(block: Message, id_key: str, arguments_key: str) -> dict[str, Any]:
    given = block.get(arguments_key)
    arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False, default=str)
    return {
        "id": block.get(id_key),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": arguments},
    }


def _message(role: str, text: str, calls: Sequence[Any], thought: str) -> dict[str, Any]:
    has = {"tool_calls": calls, "reasoning_content": thought}
    return {"role": role, "content": text, **{name: value for name, value in has.items() if value}}


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or "") for part in parts if part.get("type", "text") in _TEXTS)


def _instruction(line: Mapping[str, Any]) -> list[Any] | None:
    """Convert an instruction record of Alpaca, Dolly or OpenOrca to chat messages; None for any other record."""
    text = line.get("instruction") or line.get("question")
    if not isinstance(text, str):
        return None
    more = [line[key] for key in ("input", "context") if isinstance(line.get(key), str) and line[key]]
    turns = [{"role": "user", "content": "\n\n".join([text, *more])}]
    for pair in reversed(line["history"] if isinstance(line.get("history"), list) else []):
        if isinstance(pair, list | tuple) and len(pair) == 2:
            turns[:0] = [
                {"role": role, "content": each} for role, each in zip(("user", "assistant"), pair, strict=True)
            ]
    system = line.get("system") or line.get("system_prompt")
    return _turns(turns, {"system": system})  # type: ignore[no-any-return]


# -- answers ----------------------------------------------------------------------------------------------------------

ANSWER_KEYS: Final = ("response", "completion", "result", "output", "response_body", "responseBody", "choices")
"""Keys under which records may contain the answer; the first key with a value that is not empty is used.

"choices" is the key of records that are API responses themselves.
"""
_NO_MODEL: Final = ("SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL")
"""Types of Langfuse's observations that are not model calls."""
_ONE_TEXT: Final = ("text", "completion", "content", "response", "output")


def find_answers(value: Any, depth: int = 0) -> list[str | Message]:
    """Return the answers in an API response of any format, as texts and messages. O(size)."""
    parsed = _parse_nested_json(value)
    if depth > _MAX_DEPTH or parsed is None or is_error(parsed):
        return []
    if (chunks := find_chunks(parsed)) is not None:
        return _find_answers_in_object(join_chunks(chunks), depth)
    if isinstance(parsed, str):
        return [parsed] if parsed and parsed not in _REDACTED else []
    if isinstance(parsed, dict):
        if isinstance(text := _text_of_body(parsed), str):  # an HTTP body that is not JSON contains no answer
            return [answer for answer in find_answers(text, depth + 1) if answer != text]
        found = _find_answers_in_object(_body(parsed), depth)
        if not found and not parsed.keys().isdisjoint(("choices", "usage")):
            return []
    else:
        turns = parsed if isinstance(parsed, list) else []
        if any(_has_keys(turn, "role") or _has_keys(turn, "type") for turn in turns):
            found = _one_answer(turns)
        else:
            found = [answer for turn in turns for answer in find_answers(turn, depth + 1)]
    return [value] if not found and isinstance(value, str) else found  # JSON that a model wrote


def _find_answers_in_object(body: Mapping[str, Any], depth: int) -> list[str | Message]:
    if isinstance(choices := body.get("choices"), list):
        return [answer for choice in choices if isinstance(choice, dict) for answer in find_answers(choice, depth + 1)]
    if isinstance(body.get("message"), dict):
        return find_answers(body["message"], depth + 1)
    if body.get("role") or isinstance(body.get("content"), list) or body.get("tool_calls"):
        return _one_answer([{"role": "assistant", **body}])
    if isinstance(body.get("output"), list):
        return find_answers(body["output"], depth + 1)
    return [body[key] for key in _ONE_TEXT if isinstance(body.get(key), str) and body[key]][:1]


def _one_answer(turns: Sequence[Any]) -> list[str | Message]:
    """Join the reasoning, messages and tool calls of one response into one assistant message."""
    texts, calls, thoughts = list[str](), list[Any](), list[str]()
    for message in _turns([turn for turn in turns if isinstance(turn, dict)], {}):
        if message.get("role") == "assistant":
            text = _text_of(message.get("content"))
            texts += [text] if text and text not in _REDACTED else []
            calls += message["tool_calls"] if isinstance(message.get("tool_calls"), list) else []
            if _has_keys(older := message.get("function_call"), "name"):
                calls.append({"type": "function", "function": older})
            thought = message.get("reasoning_content") or message.get("reasoning")
            thoughts += [thought] if isinstance(thought, str) and thought not in _REDACTED else []
        elif message.get("type") in _TEXTS or isinstance(message.get("text"), str):
            texts.append(str(message.get("text") or ""))
    if not any(texts) and not calls:
        return []
    return [_message("assistant", "\n".join(texts), calls, "\n".join(thoughts))]


def _is_redacted(prompt: Any) -> bool:
    if isinstance(prompt, list):
        return all(_has_keys(turn, "content") and turn["content"] in _REDACTED for turn in prompt)
    return isinstance(prompt, str) and prompt in _REDACTED


def _parse_nested_json(value: Any) -> Any:
    """Return the JSON value in a string that contains JSON, as some exports do; return any other value unchanged."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _body(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON body of a recorded request or response; return ``part`` itself if it contains no separate body.

    In a batch the body is an object in ``part``, and in an HTTP archive it is a text in ``part``.
    """
    for name in ("body", "params"):
        if isinstance(part.get(name), dict):
            return part[name]  # type: ignore[no-any-return]
    parsed = _parse_nested_json(_text_of_body(part))
    return parsed if isinstance(parsed, dict) else part


def _text_of_body(part: Mapping[str, Any]) -> Any:
    """Return the text of an HTTP body recorded by a gateway or in an HTTP archive (HAR); None if there is none."""
    for name in ("body", "postData", "content"):
        value = part.get(name)
        text = value if name == "body" else value.get("text") if isinstance(value, dict) else None
        if isinstance(text, str):
            return text
    return None


def _is_there(value: Any) -> bool:
    if isinstance(value, str):
        return value not in ("", "{}", "[]")
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _has_keys(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and all(name in value for name in names)
