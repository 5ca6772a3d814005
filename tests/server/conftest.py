"""What tests of the server share: a server, OpenAI's own client of it, and the log of the process."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from server.observe.logs import QueuedLogHandler, set_up_logging
from ssd.bundled import MODEL_PATH
from tests.server.bundled_engine import load_bundled
from tests.server.client import official_client, wait_until
from tests.server.failing_engine import RunningServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """With the bundled model, unless a module has its own."""
    with serving(load_bundled, model=str(MODEL_PATH), obfuscation_interval_s=0.0) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """Of the module's ``server``."""
    with official_client(server.port) as made:
        yield made


class Log:
    """What was logged as JSON."""

    def __init__(self, stream: io.StringIO, handler: QueuedLogHandler) -> None:
        self._stream, self._handler = stream, handler

    @property
    def text(self) -> str:
        self._handler.flush()
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, request_id: str) -> dict[str, Any]:
        """The one line of a request, once it is there."""
        wait_until(lambda: any(line.get("request_id") == request_id for line in self.lines))
        (line,) = [line for line in self.lines if line.get("request_id") == request_id]
        return line


@contextmanager
def logging_to(level: str = "info", kind: Any = "json") -> Iterator[Log]:
    """The log of the process, and the one it had before afterwards."""
    root = logging.getLogger()
    names = [None, "ssd", "server", "cache_builder"]
    before = root.handlers[:], [logging.getLogger(name).level for name in names], logging.raiseExceptions
    stream = io.StringIO()
    handler = set_up_logging(level, kind, stream)
    try:
        yield Log(stream, handler)
    finally:
        logging.captureWarnings(False)
        root.handlers[:], levels, logging.raiseExceptions = before
        for name, each in zip(names, levels, strict=True):
            logging.getLogger(name).setLevel(each)
        handler.close()


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    """Of the process, while a module is tested."""
    with logging_to() as found:
        yield found
