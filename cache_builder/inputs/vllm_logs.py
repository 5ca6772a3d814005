"""vLLM's log with ``--enable-log-requests --enable-log-outputs``: a request and its response, some lines apart.

The prompt is logged by "Received request ID: prompt: '...'", by newer versions at the level DEBUG by "Request ID
details: prompt: '...'"; the text by "Generated response ID: output: '...'". Both are Python literals, so that a text
is one line; ``--max-log-len`` cuts them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import IO, Any, Final

from cache_builder.inputs.lines import lines_of
from cache_builder.inputs.record import InputError, Record

MARKS: Final = (b"Generated response ", b"Received request ", b" details: prompt: ")

_PROMPT = re.compile(r"(?:Received request|Request) (\S+?)(?:: | details: )prompt: (?=['\"])")
_OUTPUT = re.compile(r"Generated response (\S+?)(?: \((streaming \w+)\))?: output: (?=['\"])")
_IDS = re.compile(r"[,\]')] ?prompt_token_ids: (\[[\d, ]*\])")
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_MOST_WAITING_CHARS = 1 << 28


def vllm_exchanges(shown: str, file: IO[bytes]) -> Iterator[Record]:
    """A record for every response with text, with its prompt where one was logged.

    Prompts wait for their responses in 256 million characters at most; the oldest go. Raises InputError.
    """
    waiting: dict[str, dict[str, Any]] = {}
    num_chars = 0
    has_found = False
    for where, line in lines_of(shown, file):
        if not any(mark in line for mark in MARKS):
            continue
        text = line.decode()
        if asked := _PROMPT.search(text):
            prompt, end = _literal(text, asked.end())
            if prompt is None:
                continue
            entry: dict[str, Any] = {"prompt": prompt, "is_rendered": asked[1].startswith("chatcmpl")}
            if ids := _IDS.search(text, end - 1):
                entry["prompt_token_ids"] = [int(number) for number in re.findall(r"\d+", ids[1])]
            num_chars += len(text) - int(waiting.pop(asked[1], {}).get("chars", 0))
            waiting[asked[1]] = {**entry, "chars": len(text)}
            while num_chars > _MOST_WAITING_CHARS and waiting:
                num_chars -= int(waiting.pop(next(iter(waiting)))["chars"])
        elif (said := _OUTPUT.search(text)) and said[2] != "streaming delta":
            has_found = True
            output, _ = _literal(text, said.end())
            known = waiting.pop(said[1], None) or waiting.pop(f"{said[1]}-0", None)
            if known is not None:
                num_chars -= int(known.pop("chars"))
            if output:
                yield Record(where, "", is_json=True, line={**(known or {}), "completion": output, "log": "vllm"})
    if not has_found:
        raise InputError(f'{shown}: holds no line "Generated response": run vLLM with --enable-log-outputs')


def _literal(text: str, start: int) -> tuple[str | None, int]:
    """The string that begins at ``start`` and where it ends; None where it is cut."""
    found = _LITERAL.match(text, start)
    if found is None:
        return None, start
    try:
        value = ast.literal_eval(found[0])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None, found.end()
    return str(value), found.end()
