"""Obfuscated streams, whose sizes and times do not reveal which tokens were drafted and accepted.

The sizes and times of an encrypted stream's packets reveal how many tokens each step produced, and so which text was
drafted (arXiv 2411.01076). In an obfuscated stream every event except a choice's last has the same number of tokens, is
padded to a multiple of a fixed number of bytes, and is sent at a tick of a clock that starts with the request.
SECURITY.md lists the remaining leaks.
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
    from ssd.text.detokenizer import TextStream

_LOOKS_S = 0.25
"""While an obfuscated stream waits for its next tick, it checks for a shutdown at this interval in seconds."""


@dataclass(slots=True)
class _ChoiceBuffer:
    """The output of one choice that has not been sent yet, divided into chunks with equal numbers of tokens."""

    stream: TextStream
    piece_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    pieces: deque[RequestOutput] = field(default_factory=deque)
    ended: bool = False

    def add(self, output: RequestOutput) -> None:
        """Append new output and split off complete chunks.

        The text of a chunk is the text that its tokens add to the decoded text of all earlier tokens.
        """
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


class EqualChunks:
    """Divides the outputs of all choices into chunks with equal numbers of tokens, for obfuscated streams.

    A chunk is sent only together with a chunk of every other unfinished choice. ``streams`` are new detokenizers, one
    per choice. They decode the tokens a second time, to find the text of each chunk.
    """

    def __init__(self, streams: Sequence[TextStream], piece_tokens: int) -> None:
        self._choices = [_ChoiceBuffer(stream, piece_tokens) for stream in streams]

    @property
    def ended(self) -> bool:
        return all(choice.ended and not choice.pieces for choice in self._choices)

    def add(self, index: int, output: RequestOutput) -> None:
        self._choices[index].add(output)

    def next_round(self) -> list[tuple[int, RequestOutput]]:
        """Return the next chunk of each unfinished choice with the choice's index.

        The result is empty until each unfinished choice has a complete chunk.
        """
        if not all(choice.pieces or choice.ended for choice in self._choices):
            return []
        return [(index, choice.pieces.popleft()) for index, choice in enumerate(self._choices) if choice.pieces]


class TickClock:
    """A clock that ticks every ``interval_s`` seconds from now, so that an obfuscated stream sends at regular times.

    If ``hurries`` returns True, because the server is about to stop, ``wait_until`` stops waiting.
    """

    def __init__(self, interval_s: float, hurries: Callable[[], bool]) -> None:
        self._interval_s = interval_s
        self._hurries = hurries
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._tick = 0

    async def wait_until(self, tick: int | None = None) -> None:
        """Wait for a tick of the clock. Ticks are counted from 1.

        Without ``tick``, or if the tick with that number has passed, wait for the next tick.
        """
        if not self._interval_s:
            return
        passed = self._loop.time() - self._started
        self._tick = max(tick or self._tick + 1, math.ceil(passed / self._interval_s))
        at = self._started + self._tick * self._interval_s
        while (left := at - self._loop.time()) > 0 and not self._hurries():
            await asyncio.sleep(min(left, _LOOKS_S))


async def finish_at_tick(generation: Generation, pace: TickClock, piece_tokens: int) -> None:
    """Wait until all choices of a response that is not streamed have ended, and then for a tick of the clock.

    The tick is the one at which an obfuscated stream of the same length would end if it sent one chunk per tick. If the
    output was generated more slowly, it is the next tick. So the response time reveals little about how many draft
    tokens were accepted.
    """
    await generation.finish()
    longest = max((len(choice.token_ids) for choice in generation.choices), default=0)
    await pace.wait_until(max(1, -(-longest // piece_tokens)))


async def obfuscated_events(
    answer: Answer, pieces: EqualChunks, pace: TickClock, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an obfuscated stream: chunks with equal numbers of tokens at regular times.

    If the generation fails, the tokens of an incomplete chunk are not sent.
    """
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
                await pace.wait_until()
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
    """Return the token counts for a chunk of a stream with ``include_obfuscation``.

    Completion tokens that were not sent yet are not counted, so that the counts do not reveal them.
    """
    usage = generation.usage
    if last:
        return usage
    return Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=num_sent, cached_tokens=usage.cached_tokens)
