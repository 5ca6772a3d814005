"""What each single token stands for: its bytes, which need not be whole characters."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from ssd.text.codec import TextCodec

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

    def shown_length(self, token_id: int) -> int:
        """Characters of the token in an output's text, which leaves special tokens out."""
        return 0 if token_id in self._codec.special_ids else len(self.text_of(token_id))

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
