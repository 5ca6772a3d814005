"""Incremental detokenization that returns only complete characters, and no text that may become a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ssd.config import SamplingParams
from ssd.text.codec import TextCodec

_REPLACEMENT = "\ufffd"
_MAX_PIECES = 1 << 15
_MAX_INCOMPLETE_TOKENS = 8  # more than any character has bytes; beyond it the text is broken and not incomplete


class TextStream:
    """Incremental detokenizer of one output, which also finds stop strings. Not thread-safe.

    The returned texts, joined, are the decoded output without special tokens, up to the first stop string. Only the
    number of U+FFFD characters may differ, if the tokens of a sentencepiece-like tokenizer spell bytes that are not
    UTF-8.

    The text of a token depends on the tokens before it: it may begin with a space, or continue a character that needs
    several tokens. So each new token is decoded together with a window of the last tokens, in O(1). The text of the
    first tokens in the window (context) was already returned; that of the last ones (pending) was not.
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
        """Create a detokenizer for a text that continues the text of the token ids ``before``.

        Each string in ``stop`` ends the text. Special tokens are left out, except ``shown_special_ids``.
        """
        self.stop_hit: str | None = None  # the stop string that ended the text
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
        """Create the detokenizer for one output of a request. If ``stops`` is False, stop strings are ignored."""
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
        return bool(self._stop)

    def is_silent(self, token_id: int) -> bool:
        """Return whether a token adds no text to the output because it is a special token."""
        return token_id in self._silent

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that can be sent to the client.

        Text is held back while it may be an incomplete character or the beginning of a stop string. One call is faster
        than calling `push_token` for each token.
        """
        if len(token_ids) < 2:
            return self.push_token(token_ids[0]) if token_ids else ""
        together = None if self._is_known(token_ids) else self._push_together(token_ids)
        return "".join([self.push_token(token_id) for token_id in token_ids]) if together is None else together

    def push_token(self, token_id: int) -> str:
        """Add a token, and return the new text that can be sent; set ``stop_hit`` if a stop string is complete."""
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
            self._window.pop()  # an unused id has no text in any context: the window would grow
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
            if len(codec.pieces) >= _MAX_PIECES:
                codec.pieces.clear()
            codec.pieces[pair] = piece, self._context_text
        return self._send(piece)

    def _is_known(self, token_ids: Sequence[int]) -> bool:
        pieces = self._codec.pieces
        return self._num_context == len(self._window) == 1 and all(
            pair in pieces for pair in pairwise([self._window[0], *token_ids])
        )

    def _push_together(self, token_ids: Sequence[int]) -> str | None:
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
        """Return the text that was held back, with U+FFFD for incomplete characters. It may complete a stop string."""
        if self.stop_hit is not None:
            return ""
        sent = self._send(self._new_text(self._codec.decode(self._window), len(self._window)))
        self._window, self._num_context, self._context_text = [], 0, ""
        if self.stop_hit is None:
            sent, self._unsent = sent + self._unsent, ""
        return sent

    def _new_text(self, text: str, stop: int) -> str:
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._codec.decode(
            self._window[self._num_context : stop]
        )  # bytes that changed the text of the tokens before them

    def _split_broken(self, text: str) -> tuple[str, int]:
        for kept in range(1, 4):
            head = self._codec.decode(self._window[:-kept])
            if head + self._codec.decode(self._window[-kept:]) == text:
                return head, kept
        return text, 0

    def _send(self, piece: str) -> str:
        if not self._stop:
            return piece
        text = self._unsent + piece
        hits = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if hits:  # the stop string that is complete first; if several are, the longest
            end, at, self.stop_hit = min(hits)
            self._unsent = ""
            return text[: end if self._include_stop else at]
        num_held = max(_longest_overlap(text, stop) for stop in self._stop)
        self._unsent = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _end_of(token_ids: Sequence[int], codec: TextCodec) -> list[int]:
    """Return the fewest last tokens that together spell whole characters; empty if even the last 8 tokens do not."""
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
