"""Tools for chat templates that know of none: told, called and answered in plain words, as Hermes models are trained.

The marks are those of Nous Research's Hermes and of Qwen, so the calls are read by the parser of the same name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_PREAMBLE = """\
You may call functions. These are there, one a line, each with the JSON schema of its arguments:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these marks, and the next call after it; write nothing \
else then:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
What a function has returned is given to you between <tool_response> and </tool_response>."""

_KNOWS_TOOLS = re.compile(r"\btools\b")


def knows_tools(template: str) -> bool:
    """Whether a chat template reads the tools it is given."""
    return _KNOWS_TOOLS.search(template) is not None


def in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> list[Message]:
    """The conversation in roles that every template has.

    ``messages`` : normalized. ``has_system`` : the template takes a system message; else the tools are told at the
    beginning of the first message. O(characters).
    """
    told: list[Message] = []
    before = None
    for message in messages:
        role = message["role"]
        if role == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before == "tool":  # one message for all: some templates want turns
                told[-1]["content"] += f"\n{answer}"
            else:
                told.append({"role": "user", "content": answer})
        elif message.get("tool_calls"):
            told.append({"role": role, "content": _called(message)})
        else:
            told.append(dict(message))
        before = role
    if not tools:
        return told
    preamble = _PREAMBLE.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    if told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{preamble}"
    elif has_system:
        told.insert(0, {"role": "system", "content": preamble})
    else:
        told[0]["content"] = f"{preamble}\n\n{told[0]['content']}"
    return told


def _called(message: Mapping[str, Any]) -> str:
    calls = [call.get("function") for call in message["tool_calls"]]
    written = [
        f"<tool_call>\n{_json({'name': call.get('name'), 'arguments': call.get('arguments', {})})}\n</tool_call>"
        for call in calls
        if isinstance(call, Mapping)
    ]
    return "\n".join([message["content"], *written] if message["content"] else written)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
