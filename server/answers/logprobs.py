"""Log-probabilities as OpenAI's clients read them, and the prompt's as vLLM writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ssd.text.token_text import TokenTexts

if TYPE_CHECKING:
    from ssd.engine import TokenLogprobs


class LogprobsWriter:
    """Writes those of one HTTP request. Not thread-safe."""

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool) -> None:
        """``as_token_ids`` : tokens are written as "token_id:123", which is unambiguous where their text is not."""
        self._texts = texts
        self._as_token_ids = as_token_ids

    def completion(self, entries: Sequence[TokenLogprobs | None], first: int | None, offset: int) -> dict[str, Any]:
        """``logprobs`` of /v1/completions.

        entries : None for a prompt's first token, which nothing predicts and which is then token ``first``.
        offset : characters of the text before the first token. Each entry of ``top_logprobs`` holds the token itself as
        well; where several tokens have the same text, the most probable.
        """
        token_ids = [first if entry is None else entry.token_id for entry in entries]
        tokens = [self._text(token_id) if token_id is not None else "" for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += self._texts.shown_length(token_id) if token_id is not None else 0
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """``logprobs`` of a chat completion's choice."""
        content = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(*each) for each in entry.top]}
            for entry in entries
        ]
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

    def length_of(self, token_ids: Sequence[int]) -> int:
        """Characters of the text they are."""
        return sum(map(self._texts.shown_length, token_ids))
