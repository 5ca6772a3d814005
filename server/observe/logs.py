"""Logging of the process as text or JSON lines. A separate thread writes the lines, so logging never blocks."""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

OURS = ("ssd", "server", "cache_builder")
"""The names of this project's loggers, to which the configured level applies. Libraries log warnings and errors only.
"""

_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_WAITING = 8192
_PATIENCE_S = 2.0
"""The maximum time in seconds for which the process waits at exit, so that queued log lines are written."""
_NO_FILES = (
    "no file descriptor is free: connections wait until others close. Allow more (ulimit -n, LimitNOFILE) or lower "
    "--max-connections"
)
_PLAIN = re.compile(r"[\x21\x23-\x3c\x3e-\x7e]+")
"""Matches values that need no quotes in ``key=value`` log lines: printable, no spaces, quotes or equals signs."""


class Fields(dict[str, Any]):
    """A log message of named values, written as ``key=value`` in text logs and as separate keys in JSON logs.

    Values that are None are left out.
    """

    def __init__(self, event: str, **values: Any) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})
        self.event = event

    def __str__(self) -> str:
        return " ".join([self.event, *(f"{name}={_text(value)}" for name, value in self.items())])


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ",".join(f"{name}:{count}" for name, count in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class QueuedLogHandler(QueueHandler):
    """A log handler that queues records for a thread that writes them. If the queue is full, it drops new records."""

    def __init__(self, target: logging.Handler, *, most_waiting: int = _MAX_WAITING) -> None:
        self._waiting: SimpleQueue[logging.LogRecord | threading.Event | None] = SimpleQueue()
        super().__init__(self._waiting)
        self.num_dropped = 0
        self._target = target
        self.is_json = isinstance(target.formatter, JsonFormatter)
        self._most = most_waiting
        self._num_reported = 0
        self._no_files_s = -math.inf
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop a "too many open files" error if one was logged in the last second: each new connection causes one."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            if record.created < self._no_files_s + 1:
                return False
            self._no_files_s = record.created
            record.msg, record.args, record.exc_info = _NO_FILES, None, None
        return super().filter(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if not isinstance(record.msg, Fields):
            record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text, record.exc_info = traceback_text(record.exc_info[1]), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a log record or drop it. ``SimpleQueue`` is used because it is safe in signal handlers."""
        if self._waiting.qsize() >= self._most:
            self.num_dropped += 1
        else:
            self._waiting.put_nowait(record)

    def flush(self) -> None:
        written = threading.Event()
        self._waiting.put_nowait(written)
        written.wait(_PATIENCE_S)

    def close(self) -> None:
        """Write the queued log records and end the writing thread, within four seconds."""
        if self._thread.is_alive():
            self.flush()
            self._waiting.put_nowait(None)
            self._thread.join(_PATIENCE_S)
        super().close()

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._target.handle(item)
            if self._num_reported < self.num_dropped and self._waiting.qsize() < self._most // 2:
                dropped, self._num_reported = self.num_dropped - self._num_reported, self.num_dropped
                self._target.handle(_record(f"{dropped} log lines were dropped: the log is not read fast enough"))


def _record(message: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)


class JsonFormatter(logging.Formatter):
    """Formats log records as JSON objects with ``time`` in UTC, ``level``, ``logger``, ``message`` and named values."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, Fields):
            line["message"] = record.msg.event
            for name, value in record.msg.items():
                line[name] = round(value, 6) if isinstance(value, float) else value
        else:
            line["message"] = record.getMessage()
        if record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line)


def traceback_text(error: BaseException | None) -> str:
    """Return the traceback of an exception and of its causes.

    The messages of ValueError, LookupError and TypeError are left out, because they may quote the content of a request.
    """
    lines: list[str] = []
    while error is not None:
        kind = type(error)
        shown = kind.__name__
        if not isinstance(error, (ValueError, LookupError, TypeError)):
            shown = "".join(traceback.format_exception_only(error)).strip()
        lines.insert(0, "".join(traceback.format_tb(error.__traceback__)) + shown)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n-- which led to --\n".join(lines)


def set_up_logging(level: str, kind: LogFormat, stream: TextIO | None = None) -> QueuedLogHandler:
    """Send log records to ``stream`` (default: standard error). ``level`` applies only to this project's loggers."""
    logging.raiseExceptions = False  # an error of the log cannot be logged
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # these fields are not printed
    target = logging.StreamHandler(stream or sys.stderr)
    target.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(_LINE))
    handler = QueuedLogHandler(target)
    least = getattr(logging, level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(least, logging.WARNING))
    for name in OURS:
        logging.getLogger(name).setLevel(least)
    logging.captureWarnings(True)
    return handler


def wants_json(words: Sequence[str]) -> bool:
    """Return whether the command line, or the configuration file that it names, selects JSON log lines.

    The result is needed to report errors that occur before the options are parsed.
    """
    given = _GIVEN.findall("\n".join(words))
    for name, value in reversed(given):
        if name == "log-format":
            return bool(value == "json")
    try:
        return any(_FILED.search(Path(value).read_text(encoding="utf-8")) for _, value in given)
    except (OSError, ValueError):
        return False


_GIVEN = re.compile(r"^--(log-format|config)[=\n](.+)$", re.MULTILINE)
_FILED = re.compile(r"""^\s*["']?log[-_]format["']?\s*[:=]\s*["']?json\b""", re.MULTILINE)


def report_start(kind: str, message: str) -> None:
    """Report an error or warning of the server's start, as a JSON log line or as plain text."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, QueuedLogHandler)]
    is_json = any(handler.is_json for handler in handlers)
    if is_json:
        logging.getLogger("server.command").log(getattr(logging, kind.upper()), message)
    for handler in handlers:
        handler.flush()  # keeps the order of log lines
    if not is_json:
        print(f"ssd-serve: {kind}: {message}", file=sys.stderr)


def num_dropped_lines() -> int:
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, QueuedLogHandler))
