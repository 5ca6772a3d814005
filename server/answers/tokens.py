"""Tokens of an output in its answer: the text that each brought, and their log-probabilities."""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from server.running.generation import Choice
from ssd.text.codec import TokenTexts

if TYPE_CHECKING:
    from ssd.engine import RequestOutput, TokenLogprobs
    from ssd.text.stream import TextStream


class ShownTokens(NamedTuple):
    """Tokens whose text is in the text of an output.

    ``places`` : where the text of each begins, white space aside. ``cut`` : the text of the last token as far as a stop
    string left it; None where all of it is there.
    """

    entries: Sequence[TokenLogprobs]
    places: Sequence[int] = ()
    cut: str | None = None


@dataclass(slots=True)
class _Spelled:
    """A choice as if no stop string ended it. ``waiting`` : tokens whose text was not sent, with its place."""

    stream: TextStream
    num_spelled: int = 0
    num_sent: int = 0
    waiting: deque[tuple[int, str, TokenLogprobs]] = field(default_factory=deque)


class Spelling:
    """Tells which token brought which text of one request's choices, each read once from its beginning."""

    def __init__(self, make_stream: Callable[..., TextStream]) -> None:
        """``make_stream`` : a fresh stream of a choice as the request asks for it, or without its ``stops``."""
        self._make_stream = make_stream
        self._streams: dict[int, TextStream] = {}
        self._spelled: dict[int, _Spelled] = {}

    def texts(self, index: int, token_ids: Sequence[int], text: str) -> list[str]:
        """``text`` by the tokens that came with it. O(tokens)."""
        if index not in self._streams:
            self._streams[index] = self._make_stream(index)
        stream, texts, rest = self._streams[index], [], text
        for token_id in token_ids:
            length = len(stream.push_token(token_id))
            texts.append(rest[:length])
            rest = rest[length:]
        if texts:  # at the end of the output, what was held back
            texts[-1] += rest
        return texts

    def shown(self, index: int, part: RequestOutput | Choice, *, hides_ending: bool) -> ShownTokens:
        """The tokens of the next output of a choice, or of the whole choice, whose text is in what was sent.

        ``hides_ending`` : the token that ends the output is not in the text. O(tokens).
        """
        if index not in self._spelled:
            self._spelled[index] = _Spelled(self._make_stream(index, stops=False))
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
class Written:
    """Characters of a choice that are there, and what makes more of its bytes: tokens may end within a character."""

    length: int = 0
    decoder: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("replace"))


class LogprobsWriter:
    """Writes those of one HTTP request. Not thread-safe."""

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool, every_token: bool) -> None:
        """``as_token_ids`` : tokens are written as "token_id:123", which is unambiguous where their text is not.

        ``every_token`` : those that are not in the text, too.
        """
        self._texts = texts
        self._as_token_ids = as_token_ids
        self.every_token = every_token

    def completion(
        self,
        entries: Sequence[TokenLogprobs | None],
        first: int | None,
        text: str,
        written: Written,
        cut: str | None = None,
    ) -> dict[str, Any]:
        """``logprobs`` of /v1/completions.

        Of a prompt's token ``first``, which nothing predicts, the entry is None. ``text`` : theirs, behind what is
        ``written``: special tokens are in it where a prompt spells them or they are not skipped. ``cut`` : see
        `ShownTokens`.
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
        """Of a special token where ``text`` has it; some tokenizers count a space more before a text's first word."""
        piece = self._texts.text_of(token_id)
        return len(piece) if text.find(piece, max(0, at - 1), at + 1 + len(piece)) >= 0 else 0

    def chat(self, shown: ShownTokens) -> dict[str, Any]:
        """``logprobs`` of a chat completion's choice."""
        content = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(*each) for each in entry.top]}
            for entry in shown.entries
        ]
        if shown.cut is not None:
            content[-1] |= {"token": shown.cut, "bytes": list(shown.cut.encode())}
        return {"content": content, "refusal": None}

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """``prompt_logprobs``: for each token an object by token id, the token itself first."""
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
