"""Streams whose events tell nothing about the drafts that were accepted: even pieces, padded, at an even pace.

Sizes and times of an encrypted stream's packets tell how many tokens each step gave, and so which text was drafted
(arXiv 2411.01076). Here every event but a choice's last has the same number of tokens, fills whole units of bytes, and
is sent at a tick of a clock that began with the request. What still shows is said in SECURITY.md.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from server.answers.answer import Answer
from server.running.generation import Generation, Usage

if TYPE_CHECKING:
    from ssd.engine import RequestOutput, TokenLogprobs
    from ssd.text.stream import TextStream

_LOOKS_S = 0.25
"""While it waits for a tick, a stream looks this often whether it shall end."""


@dataclass(slots=True)
class _Gathered:
    """What a choice has said and not yet sent. ``stream`` : spells its tokens once more, one at a time."""

    stream: TextStream
    piece_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    pieces: deque[RequestOutput] = field(default_factory=deque)
    ended: bool = False

    def add(self, output: RequestOutput) -> None:
        """Cut off the pieces that are complete. The text of a piece is what its tokens and those before them spell."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.text += output.text
        self.ended = output.finish_reason is not None
        size = self.piece_tokens
        while len(self.token_ids) > size or (len(self.token_ids) == size and not self.ended):
            length = sum(len(self.stream.push_token(token_id)) for token_id in self.token_ids[:size])
            self._cut(replace(output, finish_reason=None, stop_reason=None), size, length)
        if self.ended:
            self._cut(output, len(self.token_ids), len(self.text))

    def _cut(self, output: RequestOutput, num_tokens: int, num_characters: int) -> None:
        logprobs = None if output.logprobs is None else tuple(self.logprobs[:num_tokens])
        token_ids, text = tuple(self.token_ids[:num_tokens]), self.text[:num_characters]
        self.pieces.append(replace(output, token_ids=token_ids, text=text, logprobs=logprobs))
        del self.token_ids[:num_tokens], self.logprobs[:num_tokens]
        self.text = self.text[num_characters:]


class EvenPieces:
    """What the choices of a request say, cut anew, in rounds of one piece of each."""

    def __init__(self, streams: Sequence[TextStream], piece_tokens: int) -> None:
        """``streams`` : one a choice, fresh, with the stop strings of the request."""
        self._choices = [_Gathered(stream, piece_tokens) for stream in streams]

    @property
    def ended(self) -> bool:
        """Whether nothing is left and nothing will come."""
        return all(choice.ended and not choice.pieces for choice in self._choices)

    def add(self, index: int, output: RequestOutput) -> None:
        """What a step gave for a choice. O(tokens)."""
        self._choices[index].add(output)

    def next_round(self) -> list[tuple[int, RequestOutput]]:
        """The next piece of every choice that has not ended, by index; empty while one of them is not complete."""
        if not all(choice.pieces or choice.ended for choice in self._choices):
            return []
        return [(index, choice.pieces.popleft()) for index, choice in enumerate(self._choices) if choice.pieces]


class Pace:
    """A clock that begins now and ticks every ``interval_s`` seconds; 0 never keeps anybody waiting."""

    def __init__(self, interval_s: float, hurries: Callable[[], bool]) -> None:
        """``hurries`` : whether there is no time left to wait."""
        self._interval_s = interval_s
        self._hurries = hurries
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._tick = 0

    async def until(self, tick: int | None = None) -> None:
        """Wait for a tick, counted from 1, or the next one where it has passed, or nobody waited for yet."""
        if not self._interval_s:
            return
        passed = self._loop.time() - self._started
        self._tick = max(tick or self._tick + 1, math.ceil(passed / self._interval_s))
        at = self._started + self._tick * self._interval_s
        while (left := at - self._loop.time()) > 0 and not self._hurries():
            await asyncio.sleep(min(left, _LOOKS_S))


async def finish_at_a_tick(generation: Generation, pace: Pace, piece_tokens: int) -> None:
    """Wait until all choices have ended, and for the tick at which an obfuscated stream would have."""
    await generation.finish()
    longest = max((len(choice.token_ids) for choice in generation.choices), default=0)
    await pace.until(max(1, -(-longest // piece_tokens)))


async def obfuscated_events(
    answer: Answer, pieces: EvenPieces, pace: Pace, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """`server.answers.answer.events`, evenly cut and sent; where it fails, what did not fill a piece is not sent."""
    numbers, num_sent = count(), 0
    clock = asyncio.get_running_loop().time
    sent_at, ready = clock(), b""
    try:
        if beginning := await answer.beginning():
            yield beginning
        async for arrived in answer.generation.outputs(wait_s=keep_alive_s):
            if arrived is not None:
                pieces.add(*arrived)
            while pairs := pieces.next_round():
                await pace.until()
                if next(numbers) == 0:
                    usage = _usage_so_far(answer.generation, 0, last=False)
                    for index, _ in pairs:
                        ready += await answer.opening(index, usage)
                for index, piece in pairs:
                    num_sent += len(piece.token_ids)
                    ready += answer.piece(index, piece, _usage_so_far(answer.generation, num_sent, last=pieces.ended))
                if not pieces.ended:
                    yield ready
                    sent_at, ready = clock(), b""
            if not ready and clock() - sent_at >= keep_alive_s:
                yield answer.keep_alive
                sent_at = clock()
        ready += await answer.closing()
    except Exception as error:
        ready += answer.failure(error)
    yield ready + answer.end


def _usage_so_far(generation: Generation, num_sent: int, *, last: bool) -> Usage:
    """Usage by what was sent: what has been generated beyond it is nobody's business."""
    usage = generation.usage
    if last:
        return usage
    return Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=num_sent, cached_tokens=usage.cached_tokens)
