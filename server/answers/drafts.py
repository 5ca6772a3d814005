"""What a stream says about drafts: of each pass how many tokens were proposed, from where, and which were accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd.engine import RequestOutput
    from ssd.text.stream import TextStream


class DraftWriter:
    """Describes the drafts of one request's choices; one that begins anew with each stream."""

    def __init__(self, make_stream: Callable[[], TextStream]) -> None:
        """``make_stream`` : a fresh stream with the stop strings of the request, to spell a choice once more."""
        self._make_stream = make_stream
        self._streams: dict[int, TextStream] = {}

    def describe(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """The field ``draft`` of a chunk; None where no pass made it. O(tokens).

        "texts" is what each token added to the text of the chunk, which they make up together; the first
        "num_accepted" of them were drafted. "pass" is the number among the passes of the choice, from 1. Of a pass
        for which nothing was drafted the source is None.
        """
        draft = output.draft
        if draft is None:
            return None
        return {
            "pass": draft.number,
            "source": draft.source if draft.num_drafted else None,
            "num_drafted": draft.num_drafted,
            "num_accepted": draft.num_accepted,
            "texts": self._texts(index, output),
        }

    def _texts(self, index: int, output: RequestOutput) -> list[str]:
        if index not in self._streams:
            self._streams[index] = self._make_stream()
        stream, texts, rest = self._streams[index], [], output.text
        for token_id in output.token_ids:
            length = len(stream.push_token(token_id))
            texts.append(rest[:length])
            rest = rest[length:]
        if texts:  # at the end of the output, what was held back
            texts[-1] += rest
        return texts
