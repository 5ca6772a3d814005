"""Prevents injection of control tokens: text in messages that spells a special token is encoded as plain text.

Only special tokens that the chat template itself writes become control tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

from ssd.errors import ModelError, RequestError

_PRIVATE = range(0xE000, 0xF900)  # private-use code points
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})")  # a private-use character in ASCII JSON
_SENTINELS = 0x100000  # code points for token numbers; the 2^16 before it hold random bits


class Marks(NamedTuple):
    """Two characters that are put around text that spells a special token, so that it is encoded as ordinary text."""

    begin: str
    end: str

    def remove_from(self, text: str) -> str:
        return re.sub(f"[{self.begin}{self.end}]", "", self.unescape(text))

    def unescape(self, text: str) -> str:
        """Replace JSON escapes of the two marks by the marks themselves. Some chat templates write text as JSON."""
        for mark in self:
            text = text.replace(json.dumps(mark)[1:-1], mark)
        return text


class _MarkedTokens(NamedTuple):
    tokens: frozenset[str]
    beginnings: frozenset[str]
    longest: int


class SpecialTokens:
    """Encodes a rendered chat prompt such that only the template's own special tokens become control tokens.

    A client thus cannot inject control tokens by text that spells them. First, `mark` puts two unused characters
    (marks) around such text in messages, before the template is rendered. It also marks the end of a string that the
    template's next characters could complete to a special token. Then `encode` finds the added tokens without marks in
    the rendered prompt, puts unguessable strings in their place, and removes the marks. Last, a copy of the tokenizer,
    which knows the unguessable strings in place of the added tokens, encodes the result. So marked text is encoded as
    ordinary text.

    Added tokens that are not special but written by the template, such as "<tool_call>", are treated in the same way,
    except in assistant messages, because the model itself generates them there. Thread-safe.
    """

    def __init__(self, tokenizer: Any, special_ids: Collection[int]) -> None:
        """Prepare a transformers tokenizer. Text that spells one of the ``special_ids`` is marked in every message."""
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self._special = frozenset(content for content, id in self._ids.items() if id in special_ids)
        # Text may contain the unknown token and, in some vocabularies, the padding token ("!"). Both have no effect.
        harmless = {tokenizer.unk_token_id, tokenizer.pad_token_id} - {tokenizer.eos_token_id}
        self._control_ids = frozenset(self._ids[content] for content in self._special) - harmless
        self._marked_tokens = lru_cache(maxsize=8)(self._find_marked_tokens)
        if len(self._ids) > 0x110000 - _SENTINELS:
            raise ModelError(
                f"the tokenizer has {len(self._ids)} special tokens, but at most {0x110000 - _SENTINELS} are "
                "supported: use another tokenizer"
            )
        secret = "".join(chr(_SENTINELS - 1 - secrets.randbelow(0xFFFE)) for _ in range(8))
        # 128 random bits and a number for each added token; drawn here because threads may race for the first use.
        self._sentinels = {content: secret + chr(_SENTINELS + number) for number, content in enumerate(self._ids)}

    def mark(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], template: str
    ) -> tuple[list[dict[str, Any]], dict[str, Any], Marks | None]:
        """Mark text of the client that spells a special token, so that `encode` encodes it as ordinary text.

        Text in normalized messages and in template variables is marked. ``template`` is the source of the chat
        template. Added tokens that it contains are marked too, except in assistant messages.

        Returns:
            The messages, the variables, and the characters used as marks. The characters are None if nothing was
            marked.

        Raises:
            RequestError: The tokenizer cannot encode such text as ordinary text.
        """
        spoken, given = self._marked_tokens(""), self._marked_tokens(template)
        parts = [(message, spoken if message.get("role") == "assistant" else given) for message in messages]
        parts += [({name: value}, given) for name, value in variables.items()]
        found = [
            span
            for part, marked_tokens in parts
            for text in _strings(part)
            for span in self._marks_of(text, marked_tokens)
        ]
        if not found:
            return messages, variables, None
        if self._twin is None and any(start < stop for start, stop in found):
            raise _special_token_error()
        marks = _unused_characters(template, *(text for part, _ in parts for text in _strings(part)))
        marked = [
            _map_strings(part, partial(self._mark_tokens, marked_tokens=marked_tokens, marks=marks))
            for part, marked_tokens in parts
        ]
        number = len(messages)
        return marked[:number], {name: value for part in marked[number:] for name, value in part.items()}, marks

    def encode(self, text: str, marks: Marks) -> list[int]:
        """Encode a prompt that was rendered from marked messages; marked text becomes ordinary text.

        Raises RequestError if the tokenizer would make a control token of ordinary text.
        """
        if self._twin is None:
            return self._encode_unmarked(marks.unescape(text), marks)
        parts: list[str] = []
        num_tokens = 0
        begin, end = marks
        # If a template has separated two marks, the text between them cannot form a token with text outside.
        for piece in re.split(f"({begin}[^{begin}{end}]*{end})|[{begin}{end}]", marks.unescape(text)):
            if piece is None:
                continue
            inner = piece[1:-1] if piece[:1] == begin else ""
            if inner in self._ids:
                parts.append(inner)
                continue
            piece, done = piece.strip(begin + end), 0
            for start, stop in self._spans(piece):
                parts += (piece[done:start], self._sentinels[piece[start:stop]])
                done, num_tokens = stop, num_tokens + 1
            parts.append(piece[done:])
        ids: list[int] = self._twin.encode("".join(parts), add_special_tokens=False).ids
        real = self._real_ids
        made = [id for id in ids if id not in real]
        if len(ids) - len(made) != num_tokens or not self._control_ids.isdisjoint(made):
            raise _special_token_error()
        return [real.get(id, id) for id in ids]

    def _encode_unmarked(self, text: str, marks: Marks) -> list[int]:
        """Encode a rendered prompt with a tokenizer that is not implemented in Rust, so no modified copy of it exists.

        Such a tokenizer cannot encode the text of a special token as ordinary text, so `mark` has refused messages that
        contain any. RequestError is raised if the template completed a client's string to a special token.
        """
        pieces = re.split(f"[{marks.begin}{marks.end}]", text)
        whole, ends = "".join(pieces), set(accumulate(map(len, pieces)))
        if any(not ends.isdisjoint(range(start + 1, stop)) for start, stop in self._spans(whole)):
            raise _special_token_error()
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=False, verbose=False)
        return ids

    def _find_marked_tokens(self, template: str) -> _MarkedTokens:
        written = {token for token in self._ids if token in template and not token.isspace()}
        tokens = self._special | written
        beginnings = frozenset(token[:length] for token in tokens for length in range(1, len(token)))
        return _MarkedTokens(tokens, beginnings, max(map(len, tokens), default=0))

    def _marks_of(self, text: str, marked_tokens: _MarkedTokens) -> list[tuple[int, int]]:
        text = replace_lone_surrogates(text)
        spans = [(start, stop) for start, stop in self._spans(text) if text[start:stop] in marked_tokens.tokens]
        if any(
            text[-length:] in marked_tokens.beginnings for length in range(1, min(marked_tokens.longest, len(text) + 1))
        ):
            spans.append((len(text), len(text)))
        return spans

    def _mark_tokens(self, text: str, marked_tokens: _MarkedTokens, marks: Marks) -> str:
        whole = replace_lone_surrogates(text)
        parts: list[str] = []
        done = 0
        for start, stop in self._marks_of(text, marked_tokens):
            parts += (whole[done:start], marks.begin, whole[start:stop], marks.end)
            done = stop
        return "".join(parts) + whole[done:]

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return the ranges of a text that spell added tokens, at each position the longest. O(characters)."""
        if not self._ids:
            return []
        found = self._finder.encode(text, add_special_tokens=False)
        return [span for span, token_id in zip(found.offsets, found.ids, strict=True) if token_id]

    @cached_property
    def _finder(self) -> Any:
        """A tokenizer that finds added tokens in a text. All other text becomes token 0."""
        from tokenizers import AddedToken, Tokenizer, models

        finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        added = self._tokenizer.added_tokens_decoder.values()
        finder.add_special_tokens(
            [AddedToken(token.content, single_word=token.single_word, normalized=False) for token in added]
        )
        return finder

    @cached_property
    def _twin(self) -> Any:
        """A copy of the tokenizer with unguessable strings instead of added tokens; None without a Rust tokenizer."""
        from tokenizers import AddedToken, Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        twin = Tokenizer(backend.model)  # shared, not copied
        for part in ("normalizer", "pre_tokenizer"):
            if (own := getattr(backend, part)) is not None:
                setattr(twin, part, own)
        for token in self._tokenizer.added_tokens_decoder.values():
            options = {name: getattr(token, name) for name in ("lstrip", "rstrip", "normalized", "special")}
            sentinel = AddedToken(self._sentinels[token.content], **options)
            (twin.add_special_tokens if token.special else twin.add_tokens)([sentinel])
        return twin

    @cached_property
    def _real_ids(self) -> dict[int, int]:
        """Maps the ids of the unguessable strings in the tokenizer's copy to the ids of the original added tokens."""
        return {self._twin.token_to_id(self._sentinels[content]): id for content, id in self._ids.items()}


def replace_lone_surrogates(text: str) -> str:
    """Replace lone UTF-16 surrogates, which JSON can spell but UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to every string in a JSON value, including object keys; return the new value."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(inner, change) for inner in value]
    return value


def _unused_characters(*texts: str) -> Marks:
    """Return two characters that occur in none of the texts, neither directly nor as JSON escapes."""
    taken = set().union(*texts) | {chr(int(spelled, 16)) for text in texts for spelled in _ESCAPED.findall(text)}
    free = [chr(point) for point in _PRIVATE if chr(point) not in taken][:2]
    if len(free) < 2:
        raise RequestError(
            "messages contain all private-use characters of Unicode, but SSD needs two of them: remove some of "
            "these characters",
            param="messages",
        )
    return Marks(*free)


def _special_token_error() -> RequestError:
    return RequestError(
        "messages contain a special token of this model that its tokenizer cannot encode as text: remove the token",
        param="messages",
    )
