"""All exceptions that this project raises on purpose.

::

    SSDError
     + ConfigError            an option is invalid (also a ValueError)
     + RequestError           a request is invalid; ``param`` names the field (also a ValueError)
     |  + ContextTooLong      the prompt and the requested tokens exceed the model's context
     + ModelError             the target model cannot be loaded or served
     + EngineError            the engine cannot accept or finish work
     |  + QueueFull           too many requests are waiting
     |  + EngineStopped       the engine was closed
     |  + EngineBroken        the target cannot compute anything any more
     + CacheError             the retrieval cache failed; the engine continues without drafts and counts it
        + SegmentCorrupt      a file is truncated or was changed
        + FormatVersion       a file was written by another version
        + TokenizerMismatch   a cache was made with another tokenizer
        + NamespaceMismatch   a cache contains the text of another namespace
        + CacheLocked         another process writes to the directory
        + StoreUnavailable    Redis or the disk does not answer

Messages say what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sized


class SSDError(Exception):
    """Base class of all exceptions that this project raises on purpose."""


class ConfigError(SSDError, ValueError):
    """An option has an invalid value."""


class RequestError(SSDError, ValueError):
    """A request is invalid or cannot be served.

    Attributes:
        param: The name of the faulty request field as the client wrote it, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    """The prompt, or the prompt with the requested tokens, exceeds the model's context length."""


class ModelError(SSDError):
    """The target model cannot be loaded or served."""


class EngineError(SSDError):
    """The engine cannot accept or finish work."""


class QueueFull(EngineError):
    """The request was refused because too many requests are waiting; the client should retry later."""


class EngineStopped(EngineError):
    """The engine was closed and accepts no more requests."""


class EngineBroken(EngineError):
    """The target model cannot compute anything any more; the process must be restarted."""


class CacheError(SSDError):
    """The retrieval cache failed. The engine catches this error, counts it, and continues without drafts."""


class SegmentCorrupt(CacheError):
    """A cache file was written only in part, truncated, or changed after it was written."""


class FormatVersion(CacheError):
    """A cache file was written in a format that this version of SSD does not read."""


class TokenizerMismatch(CacheError):
    """A cache was made with another tokenizer, so its token ids stand for other text."""


class NamespaceMismatch(CacheError):
    """A cache contains the text of another namespace and must not be used for the requested namespace."""


class CacheLocked(CacheError):
    """Another process is writing to the cache directory."""


class StoreUnavailable(CacheError):
    """The Redis server or the directory in which the cache is stored does not answer or refuses access."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reraise_exits(error: BaseException) -> None:
    """Raise ``error`` again if it is meant to end the program, e.g. KeyboardInterrupt; otherwise do nothing.

    This is for code that catches BaseException, because panics of Rust libraries do not derive from Exception.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error


def quote_value(value: object) -> str:
    """Return a short description of any value for an error message: its ``repr``, or its type and size if it is large.

    O(1); never raises an exception.
    """
    if isinstance(value, str):
        text = repr(value[:80])
        return text if len(value) <= 72 and len(text) <= 80 else f"{text[:60]}... ({len(value)} characters)"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (bool, int, float)) or value is None:
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"a list of {len(value)}" if value else "an empty list"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Sized) else type(value).__name__
