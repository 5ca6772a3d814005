"""Check that chat templates of other models keep all parts of a conversation, here and in transformers.

``python -m benchmarks.templates DIR... [--out FILE] [--json]``

Renders every ``*.jinja`` file of the directories with the bundled tokenizer for many kinds of conversations, once as
the server does for a request and once with transformers' ``apply_chat_template``. Each content and each argument is a
unique mark, so that marks missing in a prompt can be counted. The table shows for each template the number of
conversations that are "equal" (both prompts are the same), "rewritten" (the server changed the messages so that all
marks are kept or the template accepts them) and "refused" (the server answers the request with 400). "lost" counts
marks missing in the server's prompts, and "lost by transformers" those missing in its prompts. "read back" tells
whether the detected tool parser finds the call that the template itself writes, in whole text and in chunks of three
characters.

A run is wrong if a mark is lost, if a request is refused although transformers keeps all marks, or if a call of a known
format is not read back. Prints a table; the last line of stdout is one JSON object.
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
"""The conversations by name, one letter per message. s, d, u and t are system, developer, user and tool messages, a an
assistant message with text. Assistant messages with tool calls: c one call, C two calls, T text and a call, B text and
two calls, x truncated arguments, l a list as arguments. With reasoning: r text, R a call."""
_ROLES = {"s": "system", "d": "developer", "u": "user", "t": "tool"}

OPTIONS: dict[str, Any] = {"directories": Option(default=[], positional=True, help="directory with *.jinja files")}
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
    """Run the command line; return 1 if the run is wrong, else 0."""
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
    """Open the bundled tokenizer, with added special tokens that templates of other models use."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_PATH))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    return TextCodec(tokenizer, ()), tokenizer


def row_of(path: Path, codec: TextCodec, tokenizer: Any) -> dict[str, Any]:
    """Render all conversations with one template, and return the result row."""
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
    """Create a conversation from letters of `SHAPES`; each content and argument is a unique mark ("mark0001")."""
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
    """Render a conversation on both sides; return the outcome and the number of marks that each prompt lacks.

    The outcome is "equal", "rewritten", "refused" or "refused_alone" (refused although transformers keeps all marks).
    The numbers are those of the server's prompt and of transformers' prompt.
    """
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
    """Normalize the messages as the server does; model cards tell users of transformers to do the same."""
    return normalize_messages(messages)


def read_back(template: ChatTemplate) -> str:
    """Return whether the detected parser reads the tool call that the template writes.

    The result is "yes", "no", or "-" if the template writes no call or no parser was detected.
    """
    sample = template.sample_call()
    tool_call, _ = detect(template.source, sample)
    if sample is None or tool_call is None:
        return "-"
    expected = [(SAMPLE_NAME, dict(SAMPLE_ARGUMENTS))]
    return "yes" if any(_calls_of(tool_call, text) == [expected] * 2 for text in sample.texts) else "no"


def _calls_of(tool_call: str, text: str) -> list[list[tuple[str, Any]]]:
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
