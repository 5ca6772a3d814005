"""The text that `ssd-cache explain` is asked about, as token ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from cache_builder.inputs.records import STANDARD_INPUT, InputError
from ssd.text.codec import TextCodec

_MOST_BYTES: Final = 64 << 20
_LARGEST_ID: Final = 2**31 - 2


def read_prompt(name: str, codec: TextCodec) -> list[int]:
    """The ids of the text in the file ``name``, as a server makes them; - is standard input.

    A name that ends in .json holds the body of a request, {"messages": [...]} or {"prompt": "..."}, or the messages
    alone; anything else is text. Raises InputError, RequestError.
    """
    text = _read(name)
    if not name.endswith(".json"):
        return codec.encode_prompt(text)
    body = _json(name, text)
    if isinstance(body, list):
        return codec.encode_chat(body)
    if isinstance(body, dict) and isinstance(body.get("messages"), list):
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise InputError(f'{name}: "chat_template_kwargs" must be an object, got {type(kwargs).__name__}')
        return codec.encode_chat(body["messages"], template_kwargs=kwargs)
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return codec.encode_prompt(body["prompt"])
    raise InputError(f'{name}: expected {{"messages": [...]}} or {{"prompt": "..."}}; text goes into a file named .txt')


def read_output(name: str, codec: TextCodec) -> list[int]:
    """The ids of what was said after a prompt. Raises InputError."""
    return codec.encode_completion(_read(name))


def read_token_ids(name: str) -> list[int]:
    """A JSON array of ids, or {"token_ids": [...]} as ``ssd-cache export`` writes them. Raises InputError."""
    body = _json(name, _read(name))
    ids: Any = body.get("token_ids") if isinstance(body, dict) else body
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= _LARGEST_ID for each in ids):
        raise InputError(f"{name}: expected one JSON array of token ids from 0 to {_LARGEST_ID}")
    return ids


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({error}). Correct it") from None


def _read(name: str) -> str:
    shown = "standard input" if name == STANDARD_INPUT else name
    try:
        if name == STANDARD_INPUT:
            content = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputError(f"{shown}: more than {_MOST_BYTES >> 20} MiB, longer than any prompt: give less of it")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown}: not UTF-8 text ({error.reason}). Convert it first, for instance with iconv"
        ) from None
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror or error}") from None
