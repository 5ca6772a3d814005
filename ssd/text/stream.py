"""Incremental detokenization that returns only complete characters, and no text that may become a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ssd.config import SamplingParams
from ssd.text.codec import TextCodec

_REPLACEMENT = "\ufffd"
_MOST_PIECES = 1 << 15
_MAX_INCOMPLETE_TOKENS = 8  # more than any character has bytes; beyond it the text is broken and not incomplete


class TextStream:
    """Incremental detokenization of one output. Not thread-safe; decodes O(1) tokens per pushed token.

    The texts that ``push_token`` and ``finish`` return, joined, are ``decode`` of the pushed ids without invisible
    tokens, up to the first stop string; with ``before``, they are what follows that text. If a tokenizer spells unknown
    characters by bytes (as sentencepiece does) and the bytes are not UTF-8, the number of U+FFFD may differ, because
    the full decoder sees the whole run of bytes.

    Whether a token begins with a space depends on the token before it, and several tokens may spell one character. So a
    short window is decoded, which begins at the beginning of a returned text::

        window = [ context: text was returned | pending: not yet ]
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_special_ids: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        """Start a text.

        Args:
            codec: The tokenizer.
            stop: Non-empty strings, each of which ends the text.
            include_stop: Whether the stop string is returned as well.
            skip_special_tokens: Whether special tokens give no text.
            shown_special_ids: Special tokens that give text even so.
            before: The token ids of a text that this one continues.
        """
        self.stop_hit: str | None = None
        """The stop string that ended the text. No more text is returned after it."""
        self._codec = codec
        self._stop = stop
        self._include_stop = include_stop
        self._silent: frozenset[int] = codec.special_ids if skip_special_tokens else frozenset()
        if shown_special_ids:
            self._silent = self._silent.difference(shown_special_ids)
        self._window = _end_of(before, codec)
        self._num_context = len(self._window)
        self._context_text = codec.decode(self._window)
        self._unsent = ""

    @classmethod
    def following(
        cls, codec: TextCodec, sampling: SamplingParams, prompt: Sequence[int], *, stops: bool = True
    ) -> TextStream:
        """Create the stream for one output of a request. Without ``stops``, stop strings are ignored."""
        return cls(
            codec,
            stop=sampling.stop if stops else (),
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            shown_special_ids=sampling.shown_special_ids,
            before=prompt if sampling.continues_prompt else (),
        )

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings, so that the text of each token matters."""
        return bool(self._stop)

    def is_silent(self, token_id: int) -> bool:
        """Return whether a token gives no text because it is special."""
        return token_id in self._silent

    def push(self, token_ids: Sequence[int]) -> str:
        """Push tokens and return the new text that is safe to send; equal to ``push_token`` of each, but faster."""
        if len(token_ids) < 2:
            return self.push_token(token_ids[0]) if token_ids else ""
        together = None if self._is_known(token_ids) else self._push_together(token_ids)
        return "".join([self.push_token(token_id) for token_id in token_ids]) if together is None else together

    def push_token(self, token_id: int) -> str:
        """Push a token and return the new text that is safe to send. Check ``stop_hit`` afterwards."""
        codec, window = self._codec, self._window
        pair = (window[0], token_id) if self._num_context == len(window) == 1 else None
        known = None if pair is None else codec.pieces.get(pair)
        if known is not None and token_id not in self._silent and self.stop_hit is None:
            piece, self._context_text = known
            window[0] = token_id
            return self._send(piece)
        if self.stop_hit is not None or token_id in self._silent or not 0 <= token_id < codec.vocab_size:
            return ""
        self._window.append(token_id)
        text = codec.decode(self._window)
        if text == self._context_text and not codec.decode([token_id] * _MAX_INCOMPLETE_TOKENS):
            self._window.pop()  # it is no text anywhere, as ids in a hole of the vocabulary are: the window would grow
            return ""
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._context_text):
            if len(self._window) - self._num_context <= _MAX_INCOMPLETE_TOKENS:
                return ""
            text, kept = self._split_broken(text)
        else:
            kept = 0
        piece = self._new_text(text, len(self._window) - kept)
        begin = self._num_context if piece else 0
        pending = self._window[begin:]
        self._window = pending
        self._num_context = len(pending) - kept
        self._context_text = codec.decode(pending[: self._num_context])
        if pair is not None and pending == [token_id] and not kept:
            if len(codec.pieces) >= _MOST_PIECES:
                codec.pieces.clear()
            codec.pieces[pair] = piece, self._context_text
        return self._send(piece)

    def _is_known(self, token_ids: Sequence[int]) -> bool:
        """Return whether the text that each of the tokens adds is cached."""
        pieces = self._codec.pieces
        return self._num_context == len(self._window) == 1 and all(
            pair in pieces for pair in pairwise([self._window[0], *token_ids])
        )

    def _push_together(self, token_ids: Sequence[int]) -> str | None:
        """Push tokens at once; returns None and pushes nothing if a stop or an incomplete character is possible."""
        codec, silent = self._codec, self._silent
        if self._stop or not silent.isdisjoint(token_ids) or min(token_ids) < 0 or max(token_ids) >= codec.vocab_size:
            return None
        text, last = codec.decode([*self._window, *token_ids]), codec.decode(token_ids[-1:])
        if _REPLACEMENT in text or _REPLACEMENT in last or not last or not text.startswith(self._context_text):
            return None
        piece = text[len(self._context_text) :]
        self._window, self._num_context, self._context_text = [token_ids[-1]], 1, last
        return piece

    def finish(self) -> str:
        """Return the remaining text, with incomplete characters as U+FFFD. It may complete a stop string."""
        if self.stop_hit is not None:
            return ""
        sent = self._send(self._new_text(self._codec.decode(self._window), len(self._window)))
        self._window, self._num_context, self._context_text = [], 0, ""
        if self.stop_hit is None:
            sent, self._unsent = sent + self._unsent, ""
        return sent

    def _new_text(self, text: str, stop: int) -> str:
        """Return the part of ``text``, the window up to token ``stop``, that follows the context's text."""
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._codec.decode(self._window[self._num_context : stop])  # bytes that broke the run they joined

    def _split_broken(self, text: str) -> tuple[str, int]:
        """Return the window's text up to the last complete character, and the number of tokens after it."""
        for kept in range(1, 4):
            head = self._codec.decode(self._window[:-kept])
            if head + self._codec.decode(self._window[-kept:]) == text:
                return head, kept
        return text, 0

    def _send(self, piece: str) -> str:
        """Return ``piece`` without an end that may become a stop string. Sets ``stop_hit``."""
        if not self._stop:
            return piece
        text = self._unsent + piece
        hits = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if hits:  # the one complete first, as if characters came one by one; of those the longest
            end, at, self.stop_hit = min(hits)
            self._unsent = ""
            return text[: end if self._include_stop else at]
        num_held = max(_longest_overlap(text, stop) for stop in self._stop)
        self._unsent = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _end_of(token_ids: Sequence[int], codec: TextCodec) -> list[int]:
    """Return the last token with the tokens before it that spell the same character; empty for a broken one."""
    for count in range(1, min(len(token_ids), _MAX_INCOMPLETE_TOKENS) + 1):
        end = list(token_ids[-count:])
        if end[0] in codec.special_ids:
            break
        if _REPLACEMENT not in codec.decode(end):
            return end
    return []


def _longest_overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` with which ``text`` ends."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
