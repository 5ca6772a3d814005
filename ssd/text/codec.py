"""Conversion of text and chat messages to token ids, shared by the server and ``ssd-cache build``."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import xxhash

from ssd.errors import RequestError, quote_value
from ssd.text.call_variants import WriteCalls, has_object_arguments, variants, write_hermes_calls
from ssd.text.chat_template import ChatTemplate, Loss
from ssd.text.load_tokenizer import HubOptions, eos_token_ids_of, load_tokenizer
from ssd.text.messages import Message, describe_tools_in_words, equivalent_forms, normalize_messages
from ssd.text.special_tokens import Marks, SpecialTokens, replace_lone_surrogates

_RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


class Example(NamedTuple):
    """A token sequence that is added to the cache; its first ``prompt_length`` tokens are the prompt."""

    token_ids: list[int]
    prompt_length: int


class TextCodec:
    """A tokenizer with its chat template. Thread-safe.

    The first ``load`` in a process imports torch if it is installed, because transformers imports it. A program that
    never runs a model should call ``ssd.text.load_tokenizer.hide_torch`` before.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        """Create a codec.

        Args:
            tokenizer: A transformers tokenizer.
            eos_token_ids: The token ids that end an output, the tokenizer's own first.
        """
        self._tokenizer = tokenizer
        self._rust_decode = _rust_decode(tokenizer)
        # Tokenizers written in Rust are thread-safe. Others are not documented to be.
        self._lock: AbstractContextManager[object] = (
            nullcontext() if hasattr(tokenizer, "backend_tokenizer") else threading.Lock()
        )
        # Encoding once sets the padding and truncation options, which the Rust tokenizer must not change while
        # another thread decodes ("Already borrowed").
        tokenizer.encode("", add_special_tokens=False)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        # Including added tokens; logits may be padded beyond it.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.eos_token_ids = eos_token_ids
        self.eos_token_id: int | None = eos_token_ids[0] if eos_token_ids else None
        self.bos_token_id: int | None = tokenizer.bos_token_id
        added = tokenizer.added_tokens_decoder
        self._added_ids = frozenset(added)
        # ``TextStream`` leaves these tokens out of the text.
        self.special_ids = frozenset(
            {id for id, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        )
        self._special_tokens = SpecialTokens(tokenizer, self.special_ids | {*eos_token_ids})
        self._template = lru_cache(maxsize=8)(partial(ChatTemplate, apply=tokenizer.apply_chat_template))

    @classmethod
    def load(
        cls,
        name_or_path: str,
        hub: HubOptions | None = None,
        *,
        model: str | None = None,
        model_hub: HubOptions | None = None,
        chat_template: str | None = None,
    ) -> TextCodec:
        """Load the tokenizer of a model directory, a Hugging Face model id, or a single ``tokenizer.json``.

        Args:
            name_or_path: The directory, id or file of the tokenizer.
            hub: The download options for the tokenizer.
            model: The served model, if it is not ``name_or_path``; its files name the token ids that end an output.
            model_hub: The download options for files of ``model``.
            chat_template: A chat template that replaces the tokenizer's own.

        Raises:
            ModelError: The tokenizer does not exist or cannot be read.
        """
        tokenizer = load_tokenizer(name_or_path, hub)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        eos_token_ids = eos_token_ids_of(tokenizer, model or name_or_path, model_hub if model else hub)
        return cls(tokenizer, eos_token_ids)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, xxh3-128 in hexadecimal, which a cache compares to detect another tokenizer.

        Two tokenizers with the same fingerprint may split text differently, but a token id means the same text in both.
        """
        digest = xxhash.xxh3_128()
        for token, token_id in sorted(self._tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0])):
            spelled = token.encode("utf-8", "surrogatepass")
            digest.update(token_id.to_bytes(4, "little") + len(spelled).to_bytes(4, "little") + spelled)
        return digest.hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template, so that ``encode_chat`` needs none from the caller."""
        return bool(self._tokenizer.chat_template)

    # Text to ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text prompt, with the special tokens that the tokenizer adds (often a beginning-of-text token).

        Text that spells a special token becomes this token, because a prompt is the model's raw input.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_completion(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        allow_special_tokens: bool = False,
        tools_in_words: bool = False,
        write_calls: WriteCalls = write_hermes_calls,
    ) -> list[int]:
        """Encode a conversation with the tokenizer's chat template or a given template.

        If the template refuses or drops a part of the conversation, equivalent messages are tried, see `variants`.

        Args:
            messages: Messages in OpenAI's format with text content.
            add_generation_prompt: Whether the header of the assistant's next message is appended.
            continue_final_message: Whether the last message is left open, so that the model continues it.
            template_kwargs: Additional variables of the template, including ``tools``.
            chat_template: A template that replaces the tokenizer's own.
            allow_special_tokens: Whether text in messages and variables that spells a special token becomes this token.
                By default such text is encoded as ordinary text, see `SpecialTokens`.
            tools_in_words: Whether the tools are described in the text of a message, for a template that ignores tools.
            write_calls: Writes tool calls as text in the model's format, for a template that drops tool calls.

        Raises:
            RequestError: The template refuses the conversation or drops a part of it. ``param`` is "messages", "tools",
                "chat_template" or "chat_template_kwargs".
        """
        normalized = normalize_messages(messages)
        kwargs = dict(template_kwargs or {})
        if reserved := sorted(_RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(reserved)}: give only variables of the template",
                param="chat_template_kwargs",
            )
        if chat_template is None and not self.has_chat_template:
            raise RequestError(
                "this model has no chat template, so messages cannot be used: send a prompt to /v1/completions, or "
                "give a chat template (--chat-template FILE)",
                param="messages",
            )
        at_fault = "messages" if chat_template is None else "chat_template"
        marks: Marks | None = None
        with self._lock:
            try:
                source = self._tokenizer.get_chat_template(chat_template, kwargs.get("tools"))
                template = self._template(source)
                normalized, kwargs = template.with_roles(normalized), template.with_fields(kwargs)
                said, numbers = normalized, list(range(len(normalized)))
                if tools_in_words:
                    tools = kwargs.pop("tools", ())
                    said = describe_tools_in_words(normalized, tools, has_system=template.takes_system)
                    numbers = _numbers_in_words(normalized, said)
                if not allow_special_tokens:
                    said, kwargs, marks = self._special_tokens.mark(said, kwargs, source)
                options = {
                    "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continue_final_message,
                }
                choice = template.choose(said, kwargs, write_calls, **options)
                if choice.losses:
                    raise _left_out_error([Loss(numbers[loss.message], loss.call) for loss in choice.losses], at_fault)
                text = _render(template, said, choice.number, write_calls, {**kwargs, **options})
            except RequestError:
                raise
            except Exception as error:  # a template is code that may raise anything
                reason = (str(error) if marks is None else marks.remove_from(str(error))) or type(error).__name__
                if template.refuses_tools(kwargs):
                    raise RequestError(
                        f"the chat template refuses these tools: {reason:.500}", param="tools"
                    ) from error
                raise RequestError(
                    f"the chat template refuses these messages{_without_object(normalized)}: {reason:.500}",
                    param=at_fault,
                ) from error
        if marks is None:
            return self._encode(text, add_special_tokens=False)
        with self._lock:
            return self._special_tokens.encode(replace_lone_surrogates(text), marks)

    def chat_template(self, given: str | None = None, *, with_tools: bool = False) -> str | None:
        """Return the source of the chat template that `encode_chat` uses, or None if there is no template.

        Args:
            given: A template that replaces the tokenizer's own.
            with_tools: Whether the conversation has tools, for which some tokenizers have a separate template.
        """
        if given is None and not self.has_chat_template:
            return None
        try:
            template: str = self._tokenizer.get_chat_template(given, [{}] if with_tools else None)
        except ValueError:  # several, and none of them is the usual one
            return None
        return template

    def template(self, *, with_tools: bool = False) -> ChatTemplate | None:
        source = self.chat_template(with_tools=with_tools)
        return None if source is None else self._template(source)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = replace_lone_surrogates(text)
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    # Examples for the cache

    def encode_text_example(self, text: str) -> Example:
        """Encode a document, and append the end-of-text token, to add the document to the cache."""
        return Example(self._close(self.encode_prompt(text)), 0)

    def encode_completion_example(self, prompt: str, completion: str) -> Example:
        """Encode a prompt, as ``/v1/completions`` does, and its completion, to add both to the cache."""
        return self.encode_answer_example(self.encode_prompt(prompt), completion)

    def encode_answer_example(self, prompt_ids: list[int], completion: str) -> Example:
        """Encode a completion and append it to the token ids of its prompt, to add both to the cache."""
        return Example(self._close(prompt_ids + self.encode_completion(completion)), len(prompt_ids))

    def _close(self, token_ids: list[int]) -> list[int]:
        if self.eos_token_id is None or (token_ids and token_ids[-1] == self.eos_token_id):
            return token_ids
        return [*token_ids, self.eos_token_id]

    # Single tokens

    def piece(self, token_id: int) -> str | None:
        """Return the spelling of a token in the vocabulary, which may differ from its text; None for an unused id."""
        found: str | None = self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None
        return found

    def is_added(self, token_id: int) -> bool:
        """Return whether a token is an added token, i.e. whether it was added to the vocabulary as a whole text."""
        return token_id in self._added_ids

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """The token ids of all added tokens, special or not, by the tokens' texts."""
        pieces = {token_id: self.piece(token_id) for token_id in sorted(self._added_ids)}
        return {piece: token_id for token_id, piece in pieces.items() if piece}

    def to_json(self) -> str:
        """Return the text of the tokenizer's ``tokenizer.json``; raise ValueError if it is not implemented in Rust."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"the tokenizer is a {type(self._tokenizer).__name__}, which has no tokenizer.json")
        with self._lock:
            text: str = backend.to_str()
        return text

    # Ids to text

    @cached_property
    def pieces(self) -> dict[tuple[int, int], tuple[str, str]]:
        """A cache of token texts for `TextStream`, empty at first.

        The key is a pair (previous token, token). The value is the text that the token adds after the previous token,
        and the text of the token alone.
        """
        return {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of a sequence of token ids, which must be below 2^31.

        Ids without a token add no text. Bytes that are not UTF-8 become U+FFFD.
        """
        if self._rust_decode is not None:
            return self._rust_decode(token_ids, skip_special_tokens=skip_special_tokens)
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _render(
    template: ChatTemplate,
    messages: list[Message],
    number: int | None,
    write_calls: WriteCalls,
    options: Mapping[str, Any],
) -> str:
    if number is not None:
        chosen = next(islice(variants(messages, write_calls), number, None))
        with suppress(Exception):  # the test with marks succeeded, but the real contents may fail
            return template.render(chosen.messages, **options)
    refusals: list[Exception] = []
    for way in equivalent_forms(messages):
        try:
            return template.render(way, **options)
        except Exception as error:
            refusals.append(error)
    raise refusals[-1]


def _numbers_in_words(messages: Sequence[Message], told: Sequence[Message]) -> list[int]:
    follows = zip(messages, [{}, *messages], strict=False)
    numbers = [
        number
        for number, (message, before) in enumerate(follows)
        if not message["role"] == before.get("role") == "tool"
    ]
    return [0] * (len(told) - len(numbers)) + numbers


def _left_out_error(losses: Sequence[Loss], param: str) -> RequestError:
    named = ", ".join(map(str, losses[:5])) + (f" and {len(losses) - 5} more" if len(losses) > 5 else "")
    return RequestError(
        f"the chat template has no place for {named}: omit this part, send it in a user message, or give "
        "another chat template (--chat-template FILE)",
        param=param,
    )


def _without_object(messages: Sequence[Message]) -> str:
    for number, message in enumerate(messages):
        for place, call in enumerate(message.get("tool_calls", ())):
            function = call.get("function")
            if isinstance(function, Mapping) and not has_object_arguments(function):
                return f" ({Loss(number, place)} has arguments that are not a JSON object)"
    return ""


def _rust_decode(tokenizer: Any) -> Callable[..., str] | None:
    """Return the faster ``decode`` of the tokenizer's Rust backend; None if the tokenizer has a decoding of its own."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = (getattr(kind, "decode", None), getattr(kind, "_decode", None))
    if own != (PreTrainedTokenizerBase.decode, PreTrainedTokenizerFast._decode):
        return None
    decode: Callable[..., str] = tokenizer.backend_tokenizer.decode
    return decode


_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"


class TokenTexts:
    """Returns the bytes and the text of single tokens, e.g. for log-probabilities.

    The bytes of an output's tokens, joined, are the output's text. If the vocabulary spells tokens as in GPT-2 (each
    character stands for a byte) or sentencepiece (a mark stands for a space), the bytes follow from the spelling. With
    any other vocabulary, the token is decoded alone.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._spells_bytes, self._marks_spaces = _spelling(codec)
        self.bytes_of = lru_cache(maxsize=1 << 16)(self._bytes_of)  # empty for an id without a token

    def text_of(self, token_id: int) -> str:
        """Return the text of a single token; bytes of incomplete characters become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def is_shown(self, token_id: int) -> bool:
        """Return whether a token's text is part of the output's text; the text of special tokens is left out."""
        return token_id not in self._codec.special_ids

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._codec.piece(token_id)
        if piece is None:
            return b""
        if not self._codec.is_added(token_id):
            if self._spells_bytes and all(character in _BYTES for character in piece):
                return bytes(_BYTES[character] for character in piece)
            if self._marks_spaces:
                spelled = _BYTE_PIECE.fullmatch(piece)
                return bytes([int(spelled[1], 16)]) if spelled else piece.replace(_SPACE_MARK, " ").encode()
        return self._codec.decode([token_id]).encode()


def _spelling(codec: TextCodec) -> tuple[bool, bool]:
    try:
        decoder: Any = json.loads(codec.to_json())["decoder"] or {}
    except ValueError:  # not one of Rust's: tokens are decoded alone
        return False, False
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type") for part in parts}
    return "ByteLevel" in kinds, bool(kinds & {"ByteFallback", "Metaspace"})


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of GPT-2's vocabulary stands for.

    Printable Latin-1 characters stand for themselves, and characters from U+0100 on for the other bytes.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()

MAX_BAD_WORDS = 1000
"""The maximum number of token sequences to which a request's bad words are encoded.

The limit bounds the work at each output position.
"""


def encode_bad_words(codec: TextCodec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Encode each bad word and, as in vLLM, also the word with a leading space if this begins with another token.

    The model may still spell a bad word with other tokens. Raises RequestError if a word has no token or if there are
    too many words.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, spaced = (tuple(codec.encode_completion(text)) for text in (word.lstrip(), " " + word.lstrip()))
        if not alone:
            raise RequestError(
                f"bad_words has the entry {quote_value(word)}, which has no tokens: omit this entry", param="bad_words"
            )
        found[alone] = None
        # If the space is a token of its own, the word alone is found after it.
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            found[spaced] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(found)} token sequences, at most {MAX_BAD_WORDS} are accepted: give fewer",
            param="bad_words",
        )
    return tuple(found)
