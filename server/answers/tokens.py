"""Text and log-probabilities of single tokens in HTTP responses."""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from server.running.generation import ChoiceState
from ssd.text.codec import TokenTexts

if TYPE_CHECKING:
    from ssd.engine import RequestOutput, TokenLogprobs
    from ssd.text.detokenizer import TextStream


class ShownTokens(NamedTuple):
    """The tokens whose text was sent in a response, with their log-probabilities.

    Attributes:
        places: The position in the text at which each token begins, without leading white space.
        cut: If a stop string cut the last token's text, the part of this text that was sent; else None.
    """

    entries: Sequence[TokenLogprobs]
    places: Sequence[int] = ()
    cut: str | None = None


@dataclass(slots=True)
class _AttributedChoice:
    """Decodes the tokens of one choice one by one, to find out which tokens produced the text before a stop string.

    ``waiting`` holds the tokens whose text was not sent yet, each with the position of its text.
    """

    stream: TextStream
    num_spelled: int = 0
    num_sent: int = 0
    waiting: deque[tuple[int, str, TokenLogprobs]] = field(default_factory=deque)


class TokenAttribution:
    """Finds out which token produced which part of a choice's text. Outputs must be passed in order."""

    def __init__(self, make_stream: Callable[..., TextStream]) -> None:
        self._make_stream = make_stream
        self._streams: dict[int, TextStream] = {}
        self._spelled: dict[int, _AttributedChoice] = {}

    def texts(self, index: int, token_ids: Sequence[int], text: str) -> list[str]:
        """Divide new text of a choice among the tokens ``token_ids`` that produced the text. O(tokens)."""
        if index not in self._streams:
            self._streams[index] = self._make_stream(index)
        stream, texts, rest = self._streams[index], [], text
        for token_id in token_ids:
            length = len(stream.push_token(token_id))
            texts.append(rest[:length])
            rest = rest[length:]
        if texts:  # the last token gets the text that was held back
            texts[-1] += rest
        return texts

    def shown(self, index: int, part: RequestOutput | ChoiceState, *, hides_ending: bool) -> ShownTokens:
        """Return the tokens, with log-probabilities, that produced a choice's new or complete text. O(tokens).

        If ``hides_ending`` is set, a stop token that ended the output is left out, because the text does not contain
        it.
        """
        if index not in self._spelled:
            self._spelled[index] = _AttributedChoice(self._make_stream(index, stops=False))
        choice = self._spelled[index]
        ends_by_token = part.finish_reason == "stop" and not isinstance(part.stop_reason, str)
        token_ids = part.token_ids[: -1 if ends_by_token and hides_ending else None]
        for token_id, entry in zip(token_ids, part.logprobs or (), strict=False):
            text = choice.stream.push_token(token_id)
            if not choice.stream.is_silent(token_id):
                choice.waiting.append((choice.num_spelled, text, entry))
            choice.num_spelled += len(text)
        sent_before = choice.num_sent
        choice.num_sent += sum(map(len, part.text))
        entries: list[TokenLogprobs] = []
        places: list[int] = []
        cut: str | None = None
        while choice.waiting:
            begin, text, entry = choice.waiting[0]
            left = choice.num_sent - begin
            if left <= 0 or (len(text) > left and part.finish_reason is None):
                break
            choice.waiting.popleft()
            entries.append(entry)
            places.append(max(begin + text.find(text.lstrip()), sent_before))
            cut = text[:left] if len(text) > left else None
        return ShownTokens(entries, places, cut)


@dataclass(slots=True)
class WrittenText:
    """The part of a choice's text that was sent, needed to compute the ``text_offset`` of the choice's next tokens.

    ``length`` is a number of characters. ``decoder`` keeps the first bytes of a character that later tokens complete.
    """

    length: int = 0
    decoder: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("replace"))


class LogprobsWriter:
    """Serializes the log-probabilities in the response to one HTTP request. Not thread-safe.

    With ``as_token_ids``, tokens are written as "token_id:123". With ``every_token``, tokens without text are included
    too.
    """

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool, every_token: bool) -> None:
        self._texts, self._as_token_ids, self.every_token = texts, as_token_ids, every_token

    def completion(
        self,
        entries: Sequence[TokenLogprobs | None],
        first: int | None,
        text: str,
        written: WrittenText,
        cut: str | None = None,
    ) -> dict[str, Any]:
        """Return the field ``logprobs`` of /v1/completions for tokens whose text is ``text``.

        ``first`` is the first token of a repeated prompt, which has no log-probability. ``written`` is the text that
        was sent before; these tokens are added to it. ``cut`` replaces the text of the last token if a stop string cut
        this text.
        """
        token_ids = [first if entry is None else entry.token_id for entry in entries]
        tokens = [self._text(token_id) if token_id is not None else "" for token_id in token_ids]
        offsets, begin = [], written.length
        for token_id in token_ids:
            offsets.append(written.length)
            if token_id is None:
                continue
            if self._texts.is_shown(token_id):
                written.length += len(written.decoder.decode(self._texts.bytes_of(token_id)))
            else:
                written.length += self._spelled_length(token_id, text, written.length - begin)
        if cut is not None and not self._as_token_ids:
            tokens[-1] = cut
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _spelled_length(self, token_id: int, text: str, at: int) -> int:
        """Return the length of a special token's text at position ``at``; some tokenizers add a space before it."""
        piece = self._texts.text_of(token_id)
        return len(piece) if text.find(piece, max(0, at - 1), at + 1 + len(piece)) >= 0 else 0

    def chat(self, shown: ShownTokens) -> dict[str, Any]:
        """Return the field ``logprobs`` of /v1/chat/completions."""
        content = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(*each) for each in entry.top]}
            for entry in shown.entries
        ]
        if shown.cut is not None:
            content[-1] |= {"token": shown.cut, "bytes": list(shown.cut.encode())}
        return {"content": content, "refusal": None}

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Return vLLM's field ``prompt_logprobs``: for each prompt token, its most likely tokens by token id."""
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
        chosen = {entry.token_id: (entry.logprob, entry.rank)}
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, (logprob, rank) in {**chosen, **ranked, **chosen}.items()
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in sorted({*entry.top, (entry.token_id, entry.logprob)}, key=lambda pair: -pair[1]):
            top.setdefault(self._text(token_id), logprob)
        return top

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(self._texts.bytes_of(token_id))}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._texts.text_of(token_id)
