"""The one place where text becomes token ids, for the server and the warm-up builder alike."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import xxhash

from ssd.errors import RequestError, shown
from ssd.text.load_tokenizer import HubOptions, eos_token_ids_of, load_tokenizer
from ssd.text.messages import SYSTEM_ROLES, in_words, normalize_messages, ways_to_say, with_one_system
from ssd.text.special_tokens import Marks, SpecialTokens, whole_characters

_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip


class Example(NamedTuple):
    """One sequence for the cache: ``token_ids[:prompt_length]`` is what a server would have been asked."""

    token_ids: list[int]
    prompt_length: int


class TextCodec:
    """A tokenizer with its chat template. Safe to use from several threads.

    Where torch is installed, the first ``load`` of a process imports it, because transformers does; a program that
    never runs a model calls ``ssd.text.load_tokenizer.hide_torch`` first.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        """``tokenizer`` : a transformers tokenizer. ``eos_token_ids`` : the ids that end an output, its own first."""
        self._tokenizer = tokenizer
        self._rust_decode = _rust_decode(tokenizer)
        # Those written in Rust work on several texts at once; of others nobody says so.
        self._lock: AbstractContextManager[object] = (
            nullcontext() if hasattr(tokenizer, "backend_tokenizer") else threading.Lock()
        )
        # Encoding once settles the padding and truncation settings, which the Rust tokenizer must not change while
        # another thread decodes ("Already borrowed").
        tokenizer.encode("", add_special_tokens=False)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        """One more than the greatest id, added tokens included. A model's logits may be padded to more."""
        self.eos_token_ids = eos_token_ids
        self.eos_token_id: int | None = eos_token_ids[0] if eos_token_ids else None
        self.bos_token_id: int | None = tokenizer.bos_token_id
        added = tokenizer.added_tokens_decoder
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(
            {id for id, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        )
        """Ids that stand for structure and not for text; ``TextStream`` leaves them out."""
        self._special_tokens = SpecialTokens(tokenizer, self.special_ids | {*eos_token_ids})
        self._takes_system = lru_cache(maxsize=8)(self._has_system)
        self._leaves_system_out = lru_cache(maxsize=8)(self._has_one_system)

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
        """The tokenizer of a model directory, a Hugging Face model id, or a lone ``tokenizer.json``.

        hub : where an id is fetched from. model, model_hub : the model that is served with it, where it is another; its
        generation config says what else ends an output. chat_template : in place of the tokenizer's own.
        Raises ModelError when there is none or it cannot be read.
        """
        tokenizer = load_tokenizer(name_or_path, hub)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        eos_token_ids = eos_token_ids_of(tokenizer, model or name_or_path, model_hub if model else hub)
        return cls(tokenizer, eos_token_ids)

    @cached_property
    def fingerprint(self) -> str:
        """What the ids mean, as 32 hexadecimal characters: xxh3-128 over all (id, token) pairs by id.

        Two tokenizers with the same fingerprint may split text differently, but never mean different text by one id.
        """
        digest = xxhash.xxh3_128()
        for token, token_id in sorted(self._tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0])):
            spelled = token.encode("utf-8", "surrogatepass")
            digest.update(token_id.to_bytes(4, "little") + len(spelled).to_bytes(4, "little") + spelled)
        return digest.hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works without a template of the caller's."""
        return bool(self._tokenizer.chat_template)

    # Text to ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text prompt, with the special tokens the tokenizer puts around one (often a beginning-of-text).

        Special tokens that the text spells out are those tokens: a prompt is the model's input as it is.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_completion(self, text: str) -> list[int]:
        """Ids of text alone, without any special token around it."""
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
    ) -> list[int]:
        """Ids of a conversation, through the tokenizer's chat template or the given one.

        ``messages`` : OpenAI's, with text content. ``template_kwargs`` : further variables for the template, ``tools``
        among them. Special tokens that these spell out are text, see `SpecialTokens`, unless ``allow_special_tokens``.
        ``tools_in_words`` : the template does not know of tools, see `ssd.text.messages`. What a template refuses is
        said to it in other ways, see `ssd.text.messages.ways_to_say`; so is what it would leave out without a word.
        Raises RequestError: ``param`` is "messages", "chat_template" or "chat_template_kwargs".
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
        marks: Marks | None = None
        try:
            with self._lock:
                template = self._tokenizer.get_chat_template(chat_template, kwargs.get("tools"))
                if "developer" not in template:  # it knows no such role: this is what it is elsewhere
                    for message in normalized:
                        message["role"] = "system" if message["role"] == "developer" else message["role"]
                if tools_in_words:
                    tools = kwargs.pop("tools", ())
                    normalized = in_words(normalized, tools, has_system=self._takes_system(template))
                has_others = any(message["role"] in SYSTEM_ROLES for message in normalized[1:])
                if has_others and self._leaves_system_out(template):
                    normalized = with_one_system(normalized)
                if not allow_special_tokens:
                    normalized, kwargs, marks = self._special_tokens.mark(normalized, kwargs, template)

                def render(conversation: list[dict[str, Any]]) -> str:
                    rendered: str = self._tokenizer.apply_chat_template(
                        conversation,
                        chat_template=template,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        tokenize=False,
                        **kwargs,
                    )
                    return rendered

                refusals: list[Exception] = []
                for conversation in ways_to_say(normalized):
                    try:
                        text = render(conversation)
                        break
                    except Exception as error:
                        refusals.append(error)
                else:
                    raise refusals[-1]
        except RequestError:
            raise
        except Exception as error:  # whatever a template raises: it is code, and the messages are its input
            at_fault = "messages" if chat_template is None else "chat_template"
            said = str(error) if marks is None else marks.without(str(error))
            raise RequestError(
                f"the chat template refuses these messages: {said or type(error).__name__:.500}", param=at_fault
            ) from error
        if marks is None:
            return self._encode(text, add_special_tokens=False)
        with self._lock:
            return self._special_tokens.encode(whole_characters(text), marks)

    def chat_template(self, given: str | None = None, *, with_tools: bool = False) -> str | None:
        """The source of the template that `encode_chat` uses: the ``given`` one, or the tokenizer's; None without one.

        ``with_tools`` : a tokenizer may have another for conversations with tools.
        """
        if given is None and not self.has_chat_template:
            return None
        try:
            template: str = self._tokenizer.get_chat_template(given, [{}] if with_tools else None)
        except ValueError:  # several, and none of them is the usual one
            return None
        return template

    def _has_system(self, template: str) -> bool:
        """Whether a template has a place for a system message."""
        return 0 in self._written(template, ["system", "user"])

    def _has_one_system(self, template: str) -> bool:
        """Whether a template writes some system messages, of several at the beginning and later, and no others."""
        second = "developer" if "developer" in template else "system"
        written = self._written(template, ["system", second, "user", "assistant", "system", "user"])
        return 0 < len(written & {0, 1, 4}) < 3

    def _written(self, template: str, roles: Sequence[str]) -> set[int]:
        """Which messages of a conversation of these roles a template writes; none where it refuses that."""
        said = [f"0f6ac8{number}" for number in range(len(roles))]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in zip(roles, said, strict=True)],
                chat_template=template,
                tokenize=False,
            )
        except Exception:  # it is code, and says so by raising whatever it likes
            return set()
        return {number for number, content in enumerate(said) if content in text}

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = whole_characters(text)
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    # Examples for the cache

    def encode_text_example(self, text: str) -> Example:
        """A document: its ids as a prompt, closed by end-of-text."""
        return Example(self._close(self.encode_prompt(text)), 0)

    def encode_completion_example(self, prompt: str, completion: str) -> Example:
        """A prompt as ``/v1/completions`` would encode it, and what the model answered."""
        return self.encode_answer_example(self.encode_prompt(prompt), completion)

    def encode_answer_example(self, prompt_ids: list[int], completion: str) -> Example:
        """What the model answered to a prompt that is ids already."""
        return Example(self._close(prompt_ids + self.encode_completion(completion)), len(prompt_ids))

    def _close(self, token_ids: list[int]) -> list[int]:
        if self.eos_token_id is None or (token_ids and token_ids[-1] == self.eos_token_id):
            return token_ids
        return [*token_ids, self.eos_token_id]

    # Single tokens

    def piece(self, token_id: int) -> str | None:
        """A token as the tokenizer writes it, which need not be text; None for an id without a token."""
        found: str | None = self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None
        return found

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added beside the vocabulary, so that its piece is its text."""
        return token_id in self._added_ids

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens added beside the vocabulary, special ones and others, by their text."""
        pieces = {token_id: self.piece(token_id) for token_id in sorted(self._added_ids)}
        return {piece: token_id for token_id, piece in pieces.items() if piece}

    def to_json(self) -> str:
        """The text of a ``tokenizer.json``; raises ValueError where the tokenizer is not one of Rust's."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"the tokenizer is a {type(self._tokenizer).__name__}, which has no tokenizer.json")
        with self._lock:
            text: str = backend.to_str()
        return text

    # Ids to text

    @cached_property
    def pieces(self) -> dict[tuple[int, int], tuple[str, str]]:
        """What `TextStream` found lately: the text that a token adds behind another, and its text alone."""
        return {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ``token_ids``, each within [0, 2^31). Ids without a token give nothing, broken UTF-8 U+FFFD."""
        if self._rust_decode is not None:
            return self._rust_decode(token_ids, skip_special_tokens=skip_special_tokens)
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _rust_decode(tokenizer: Any) -> Callable[..., str] | None:
    """The Rust tokenizer's own ``decode``, where transformers adds nothing to it: asked for every token of a server."""
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
    """Bytes and text of single tokens, such that those of an output, joined, are its text, special tokens included.

    Tokenizers that spell bytes as characters (GPT-2) or mark spaces and spell unknown characters by bytes
    (sentencepiece) are read piece by piece; others decode a token alone.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._spells_bytes, self._marks_spaces = _spelling(codec)
        self.bytes_of = lru_cache(maxsize=1 << 16)(self._bytes_of)
        """The bytes of a token id; none for an id without a token."""

    def text_of(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def is_shown(self, token_id: int) -> bool:
        """Whether an output's text has the token: it leaves special ones out."""
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
    """Whether pieces spell bytes by characters, and whether they mark spaces."""
    try:
        decoder: Any = json.loads(codec.to_json())["decoder"] or {}
    except ValueError:  # not one of Rust's: tokens are decoded alone
        return False, False
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type") for part in parts}
    return "ByteLevel" in kinds, bool(kinds & {"ByteFallback", "Metaspace"})


def _byte_characters() -> dict[str, int]:
    """Characters that stand for bytes in GPT-2's vocabulary: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()

MAX_BAD_WORDS = 1000
"""Most token sequences of one request; each is compared at each position."""


def encode_bad_words(codec: TextCodec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokenizer spells it at the beginning of a text and after a space, as in vLLM.

    Another spelling of the same text by other tokens is not found; so a common word may be kept out and a rare one come
    in pieces. Raises RequestError for a word without a token, and for too many.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, spaced = (tuple(codec.encode_completion(text)) for text in (word.lstrip(), " " + word.lstrip()))
        if not alone:
            raise RequestError(f"bad_words has {shown(word)}, which is no token: give words", param="bad_words")
        found[alone] = None
        # Where the space is a token of its own the word alone is found behind it.
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            found[spaced] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words has {len(found)} spellings, at most {MAX_BAD_WORDS}", param="bad_words")
    return tuple(found)
