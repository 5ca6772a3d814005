"""Chat templates of other projects: which parts of conversations are lost, here and by transformers.

``python -m benchmarks.templates DIR... [--out FILE] [--json]``

Every ``*.jinja`` file of the directories is rendered with the tokenizer of the bundled model in all message shapes, by
the path of a request and by transformers' ``apply_chat_template``. All contents and arguments are marks, so it is known
which of them are in a prompt. A shape is "equal" if both prompts are the same, "rewritten" if only other messages keep
all marks (or are accepted by the template), and "refused" if the request is answered with 400. "lost" counts marks that
are missing in a prompt of ours, "lost by transformers" those missing in its prompts. "read back" says whether the
parser that was detected finds the call that the template itself writes, whole and in pieces of three characters.

A run is wrong if a mark is lost, if a request is refused although transformers keeps all marks, or if a call of a known
format is not read back.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.run import Option, Run
from server.running.chat_preparation import MessageFormat, message_format
from server.tools.formats import AUTO, detect, make_parser, write_calls
from server.tools.message_parser import Messages, with_numbered_call_ids, with_short_call_ids
from ssd.bundled import MODEL_PATH
from ssd.errors import RequestError
from ssd.text.chat_template import SAMPLE_ARGUMENTS, SAMPLE_NAME, SAMPLE_SCHEMA, ChatTemplate
from ssd.text.codec import TextCodec
from ssd.text.messages import normalize_messages

_PIECE = 3
_TOOL = {"type": "function", "function": {"name": SAMPLE_NAME, "description": "x", "parameters": SAMPLE_SCHEMA}}
_BARE_TOOL = {"type": "function", "function": {"name": SAMPLE_NAME}}
SHAPES: Mapping[str, str] = {
    "user": "u",
    "system": "su",
    "developer": "du",
    "lone system": "s",
    "two systems": "ssu",
    "later system": "uausu",
    "later developer": "duadu",
    "turns": "uauau",
    "system and turns": "suauau",
    "two users": "uuau",
    "two assistants": "uaau",
    "assistant first": "au",
    "call": "uct",
    "call and answer": "uctau",
    "system, call": "suct",
    "developer, call": "ductau",
    "text beside a call": "uTt",
    "text beside a call, answered": "uTtau",
    "two calls": "uCtt",
    "two calls, answered": "uCttau",
    "text beside two calls": "uBtt",
    "one result of two calls": "uCtau",
    "calls in turn": "uctctct",
    "cut arguments": "uxt",
    "a list as arguments": "ult",
    "user behind a result": "uctu",
    "system behind a result": "ucts",
    "thinking": "uruau",
    "thinking, call": "uRtau",
}
"""Messages, one a letter. Of an assistant: c a call, T text beside it, C two calls, B text beside both, x arguments
that were cut, l a list as arguments, r and R text and a call with reasoning before it."""
_ROLES = {"s": "system", "d": "developer", "u": "user", "t": "tool"}

OPTIONS: dict[str, Any] = {"directories": Option(default=[], positional=True, help="with files *.jinja")}
COLUMNS = (
    ("template", "{template}"),
    ("calls", "{calls}"),
    ("reasoning", "{reasoning}"),
    (">equal", "{equal}"),
    (">rewritten", "{rewritten}"),
    (">refused", "{refused}"),
    (">lost", "{lost}"),
    (">lost by transformers", "{lost_by_transformers}"),
    ("read back", "{read_back}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 if something is lost."""
    run = Run("templates", __doc__, argv, OPTIONS, COLUMNS, under=("server/tools", "server/running", "ssd/text"))
    paths = [path for directory in run.args.directories for path in sorted(Path(directory).glob("*.jinja"))]
    if not paths:
        run.parser.error("give a directory with files *.jinja")
    codec, tokenizer = open_codec()
    for path in paths:
        run.row(row_of(path, codec, tokenizer))
    total = Counter[str]()
    for row in run.rows:
        total.update({name: row[name] for name in ("equal", "rewritten", "refused", "lost", "lost_by_transformers")})
    wrong = [row["template"] for row in run.rows if row["lost"] or row["refused_alone"] or row["read_back"] == "no"]
    return run.end(templates=len(paths), shapes=len(SHAPES), **total, wrong=wrong, is_wrong=bool(wrong))


def open_codec() -> tuple[TextCodec, Any]:
    """The bundled tokenizer, with the tokens that templates of other models write by name."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_PATH))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    return TextCodec(tokenizer, ()), tokenizer


def row_of(path: Path, codec: TextCodec, tokenizer: Any) -> dict[str, Any]:
    """What becomes of all shapes in one template."""
    source = path.read_text()
    template = ChatTemplate(source, tokenizer.apply_chat_template)
    form = message_format(template, AUTO, AUTO)
    count, shapes = Counter[str](), dict[str, str]()
    for name, letters in SHAPES.items():
        tools = {"tools": [_TOOL]} if set(letters) & set("ctTCBxlR") else {}
        what, lost, lost_by_transformers = compare(source, codec, tokenizer, form, messages_of(letters), tools)
        shapes[name] = what
        count.update({what: 1, "lost": lost, "lost_by_transformers": lost_by_transformers})
    shapes["functions without parameters"], *_ = compare(
        source, codec, tokenizer, form, messages_of("u"), {"tools": [_BARE_TOOL]}
    )
    count[shapes["functions without parameters"]] += 1
    return {
        "template": path.name,
        "calls": "in words" if form.in_words else form.tool_call or "unknown",
        "reasoning": form.reasoning or "none",
        **{name: count[name] for name in ("equal", "rewritten", "lost", "lost_by_transformers", "refused_alone")},
        "refused": count["refused"] + count["refused_alone"],
        "read_back": read_back(template),
        "shapes": shapes,
    }


def messages_of(letters: str) -> list[dict[str, Any]]:
    """A conversation as clients send it, with a mark of eight letters and digits for each part."""
    numbers = iter(range(1, 1000))
    messages: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for letter in letters:
        if letter in _ROLES:
            message: dict[str, Any] = {"role": _ROLES[letter], "content": f"mark{next(numbers):04}"}
            if letter == "t":
                message |= {"tool_call_id": open_ids.pop(0), "name": SAMPLE_NAME}
        else:
            message = {"role": "assistant", "content": f"mark{next(numbers):04}" if letter in "aTBr" else None}
            if letter in "rR":
                message["reasoning_content"] = "I think."
            if letter not in "ar":
                ids = [f"id{next(numbers):07}" for _ in range(2 if letter in "CB" else 1)]
                message["tool_calls"] = [_call(id, letter, next(numbers)) for id in ids]
                open_ids = ids
        messages.append(message)
    return messages


def _call(id: str, letter: str, number: int) -> dict[str, Any]:
    mark = f"mark{number:04}"
    arguments = {"x": f'{{"city": "{mark}', "l": f'["{mark}"]'}.get(letter, f'{{"city": "{mark}"}}')
    return {"id": id, "type": "function", "function": {"name": SAMPLE_NAME, "arguments": arguments}}


def compare(
    source: str,
    codec: TextCodec,
    tokenizer: Any,
    form: MessageFormat,
    messages: list[dict[str, Any]],
    tools: Mapping[str, Any],
) -> tuple[str, int, int]:
    """What became of a conversation, and how many marks are missing in our prompt and in that of transformers."""
    marks = _marks_in(str(messages))
    named = {"mistral": with_short_call_ids, "kimi_k2": with_numbered_call_ids}.get(str(form.tool_call), list)
    try:
        reference = tokenizer.apply_chat_template(
            _as_transformers(named(messages)), chat_template=source, tokenize=False, add_generation_prompt=True, **tools
        )
    except Exception:  # a template is a program
        reference = None
    missing = 0 if reference is None else len(marks - _marks_in(reference))
    if reference is not None and tools and SAMPLE_NAME not in reference:
        missing += 1
    try:
        text = codec.decode(
            codec.encode_chat(
                named(messages),
                chat_template=source,
                template_kwargs=tools,
                tools_in_words=form.in_words,
                write_calls=lambda functions: write_calls(form.tool_call, functions),
            )
        )
    except RequestError:
        return ("refused_alone" if reference is not None and not missing else "refused"), 0, missing
    return ("equal" if text == reference else "rewritten"), len(marks - _marks_in(text)), missing


def _marks_in(text: str) -> set[str]:
    return {text[at : at + 8] for at in range(len(text)) if text.startswith("mark0", at)}


def _as_transformers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the product normalizes them, which is what model cards tell users of transformers to do."""
    return normalize_messages(messages)


def read_back(template: ChatTemplate) -> str:
    """Whether the detected parser reads the call that the template writes: "yes", "no", or "-" without either."""
    sample = template.sample_call()
    tool_call, _ = detect(template.source, sample)
    if sample is None or tool_call is None:
        return "-"
    expected = [(SAMPLE_NAME, dict(SAMPLE_ARGUMENTS))]
    return "yes" if any(_calls_of(tool_call, text) == [expected] * 2 for text in sample.texts) else "no"


def _calls_of(tool_call: str, text: str) -> list[list[tuple[str, Any]]]:
    """The calls of a text that comes whole, and in pieces."""
    found = []
    for pieces in ([text], list(_pieces(text))):
        messages = Messages(lambda: make_parser(tool_call, None, functions={SAMPLE_NAME: SAMPLE_SCHEMA}))
        for piece in pieces:
            messages.push(0, piece, ended=False)
        messages.push(0, "", ended=True)
        found.append(
            [(call.name, json.loads(call.arguments)) for call in messages.message(0).tool_calls if call.is_json]
        )
    return found


def _pieces(text: str) -> Iterator[str]:
    for begin in range(0, len(text), _PIECE):
        yield text[begin : begin + _PIECE]


if __name__ == "__main__":
    sys.exit(main())
