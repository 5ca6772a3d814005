"""What is sent back for a generation: a stream, or an answer in one piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.admission.account import Budget, Share
from server.admission.lanes import Lanes
from server.answers.anthropic import AnthropicBodies, AnthropicEventWriter
from server.answers.bodies import Bodies, json_text
from server.answers.obfuscation import EvenPieces, Pace, finish_at_a_tick, obfuscated_events, padded
from server.answers.responses import ResponseBodies, ResponseEventWriter
from server.answers.stream import DraftWriter, EventWriter, events
from server.base.settings import ServerSettings
from server.running.engine_thread import Worker
from server.running.generation import Generation
from server.running.texts import codec_of
from server.schema.generate import StreamOptions
from ssd.text.stream import TextStream

_PIECE_BYTES = 1 << 18
"""Of a whole answer so much is handed to the connection at once: what it holds beyond that is paid for."""


class _PaidAnswer(Response):
    """A long answer, sent as it is taken: who reads slowly holds a share of what all may."""

    def __init__(self, content: bytes, share: Share) -> None:
        super().__init__(media_type="application/json", headers={"content-length": str(len(content))})
        self._content, self._share = content, share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the share is given back at the end, whatever that is."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self._content), _PIECE_BYTES):
                piece = self._content[at : at + _PIECE_BYTES]
                more = at + _PIECE_BYTES < len(self._content)
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self._share.give_back()


class Answers:
    """Writes them, as evenly and as late as the operator wants."""

    def __init__(self, worker: Worker, settings: ServerSettings, lanes: Lanes) -> None:
        self._worker, self._settings, self._lanes = worker, settings, lanes
        self._unsent = Budget(settings.limits.max_answers_bytes, "long answers")

    def events(self, generation: Generation, bodies: Bodies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        settings, engine = self._settings, self._worker.loaded_engine
        asked = options.include_obfuscation
        is_declined = asked is False or options.include_drafts  # which tell what obfuscation hides
        if settings.obfuscation == "always" or (settings.obfuscation == "default" and not is_declined):
            options = options.model_copy(update={"include_obfuscation": True})

        def spelling() -> TextStream:
            assert engine is not None and generation.sampling is not None  # every generation was submitted
            return TextStream.following(codec_of(engine), generation.sampling)

        if isinstance(bodies, ResponseBodies):
            writer: EventWriter = ResponseEventWriter(generation, bodies, options)
        elif isinstance(bodies, AnthropicBodies):
            writer = AnthropicEventWriter(generation, bodies, options)
        else:
            writer = EventWriter(generation, bodies, options, DraftWriter(spelling) if options.include_drafts else None)
        if not writer.pad or engine is None:
            return events(generation, bodies, writer, settings.keep_alive_s)
        pieces = EvenPieces([spelling() for _ in generation.choices], settings.obfuscation_tokens)
        return obfuscated_events(generation, writer, pieces, self._pace(), settings.keep_alive_s)

    async def finish(self, generation: Generation) -> None:
        """Wait for the end of a generation whose answer is not streamed."""
        if self._settings.obfuscation == "always":
            await finish_at_a_tick(generation, self._pace(), self._settings.obfuscation_tokens)
        else:
            await generation.finish()

    def _pace(self) -> Pace:
        return Pace(self._settings.obfuscation_interval_s, lambda: self._worker.hurries)

    async def whole(self, generation: Generation, bodies: Bodies) -> bytes:
        """The JSON of an answer that is not streamed."""

        def write() -> bytes:
            content = json_text(bodies.whole(generation))
            return padded(content) if self._settings.obfuscation == "always" else content

        return write() if bodies.is_short(generation) else await self._lanes.answers.run(write)

    def response(self, content: bytes) -> Response:
        """An answer of JSON; raises QueueFull where too many long ones wait to be taken."""
        if len(content) <= _PIECE_BYTES:
            return Response(content, media_type="application/json")
        share = self._unsent.share()
        share.grow(len(content))
        return _PaidAnswer(content, share)
