"""Every exception this project raises on purpose.

::

    SSDError
     + ConfigError            a setting is wrong (also a ValueError)
     + RequestError           one request is wrong; ``param`` names the field (also a ValueError)
     |  + ContextTooLong      prompt and requested tokens do not fit the model
     + ModelError             the target model cannot be loaded or served
     + EngineError            the engine cannot take or finish work
     |  + QueueFull           try again later
     |  + EngineStopped
     |  + EngineBroken        the target computes nothing any more
     + CacheError             the retrieval cache; inside the engine it becomes "no draft" and a counter
        + SegmentCorrupt      a file is torn or was changed
        + FormatVersion       a file was written by another version
        + TokenizerMismatch   a cache made with another tokenizer
        + NamespaceMismatch   a cache that holds the text of another namespace
        + CacheLocked         another process writes this directory
        + StoreUnavailable    Redis or the disk does not answer

Messages say what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sized


class SSDError(Exception):
    """Base class of all exceptions that this project raises on purpose."""


class ConfigError(SSDError, ValueError):
    """A setting has an invalid value."""


class RequestError(SSDError, ValueError):
    """One request cannot be served.

    Attributes:
        param: The faulty field as the client wrote it, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    """The prompt, or the prompt with the requested tokens, exceeds the model's context."""


class ModelError(SSDError):
    """The target model cannot be loaded or served."""


class EngineError(SSDError):
    """The engine cannot accept or finish work."""


class QueueFull(EngineError):
    """Too many requests are waiting; the client should retry later."""


class EngineStopped(EngineError):
    """The engine was stopped and accepts no more work."""


class EngineBroken(EngineError):
    """The target cannot compute anything any more; the process must be restarted."""


class CacheError(SSDError):
    """The retrieval cache failed. Inside the engine this only means "no draft" and a counter."""


class SegmentCorrupt(CacheError):
    """A cache file is torn, truncated, or was changed after it was written."""


class FormatVersion(CacheError):
    """A cache file has a format that this version does not read."""


class TokenizerMismatch(CacheError):
    """A cache was made with another tokenizer, so its token ids mean other text."""


class NamespaceMismatch(CacheError):
    """A cache contains the text of another namespace and must not be used for this one."""


class CacheLocked(CacheError):
    """Another process writes to this cache directory."""


class StoreUnavailable(CacheError):
    """The shared store (Redis or a directory) does not answer or refuses."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reraise_exits(error: BaseException) -> None:
    """Raise ``error`` again if it ends the program; otherwise the caller may handle it.

    A panic of a library written in Rust is not an Exception, but is handled like any other failure.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error


def quote_value(value: object) -> str:
    """Return a value as an error quotes it, at most 80 characters. O(1) for any value; never raises."""
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
