"""Opening of inputs, from files, URLs or standard input, as streams of decompressed bytes."""

from __future__ import annotations

import io
import lzma
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from cache_builder.inputs.record import STANDARD_INPUT, InputError, Progress, display_name
from ssd.errors import first_line

_COMPRESSIONS: Final = (
    (".gz", b"\x1f\x8b", "gzip"),
    (".zst", b"\x28\xb5\x2f\xfd", "zstd"),
    (".xz", b"\xfd7zXZ\x00", "xz"),
    (".bz2", b"BZh", "bz2"),
    (".lz4", b"\x04\x22\x4d\x18", "lz4"),
)
"""The file name suffix, the first bytes and the name of each supported compression."""
COMPRESSED: Final = tuple(suffix for suffix, _, _ in _COMPRESSIONS)
_BUFFER = 1 << 18


def is_url(name: str) -> bool:
    scheme, mark, _ = name.partition("://")
    return bool(mark) and scheme.replace("+", "").replace("-", "").isalnum()


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in that file system.

    Raises InputError if the URL cannot be opened or fsspec is not installed.
    """
    try:
        import fsspec
    except ModuleNotFoundError:
        raise InputError(
            f"{url} cannot be read, because URLs need fsspec: pip install 'ssd-serving[builder]'"
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
        return system, str(path)
    except Exception as error:  # fsspec drivers may raise any exception; the message names a missing package
        raise InputError(f"{url} cannot be reached: {first_line(error)}") from None


def is_regular(name: str) -> bool:
    """Return whether any process can read the input from any position; False for pipes and standard input."""
    if name == STANDARD_INPUT:
        return False
    return not name.startswith("memory://") if is_url(name) else stat.S_ISREG(Path(name).stat().st_mode)


@contextmanager
def open_raw(name: str, progress: Progress = lambda num_bytes: None) -> Iterator[io.BufferedReader]:
    """Open an input without decompressing it. Raises InputError; reading from the stream raises OSError."""
    if name == STANDARD_INPUT:
        yield _count_bytes(sys.stdin.buffer, progress)
        return
    try:
        if is_url(name):
            system, path = file_system(name)
            file = system.open(path, "rb")
        else:
            file = Path(name).open("rb")  # noqa: SIM115  # closed below
    except InputError:
        raise
    except Exception as error:  # fsspec drivers may raise any exception
        raise InputError(f"{name} cannot be read: {_error_reason(error)}") from None
    with file:
        yield _count_bytes(file, progress)


@contextmanager
def open_stream(name: str, progress: Progress = lambda num_bytes: None) -> Iterator[io.BufferedReader]:
    """Open an input, and decompress it if its name or first bytes indicate a compression.

    Memory is bounded for any compression ratio. Raises InputError if the input cannot be opened. Reading damaged or
    truncated data from the stream raises InputError too.
    """
    with open_raw(name, progress) as raw:
        begin = raw.peek(8)
        kinds = (kind for suffix, magic, kind in _COMPRESSIONS if begin.startswith(magic) or name.endswith(suffix))
        kind = next(kinds, None)
        yield raw if kind is None else io.BufferedReader(_DecompressedStream(raw, name, kind), _BUFFER)


@contextmanager
def input_errors(name: str) -> Iterator[None]:
    """Convert errors of reading the input ``name`` to InputError."""
    shown = display_name(name)
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown} is not UTF-8 text ({error.reason}): convert it first, for instance with iconv"
        ) from None
    except OSError as error:
        raise InputError(f"{shown} cannot be read: {_error_reason(error)}") from None


def _error_reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)


def _count_bytes(file: IO[bytes], progress: Progress) -> io.BufferedReader:
    return io.BufferedReader(_CountingStream(file, progress), _BUFFER)


class _ForwardStream(io.RawIOBase):
    """A raw stream for ``io.BufferedReader`` that reads from an object with only a ``read`` method, without seeking."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _CountingStream(_ForwardStream):
    """A raw stream that reports the number of bytes read to ``progress``, and converts errors of fsspec to OSError."""

    def __init__(self, raw: IO[bytes], progress: Progress) -> None:
        super().__init__(raw)
        self._progress = progress

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            size = super().readinto(buffer)
        except OSError:
            raise
        except Exception as error:  # fsspec drivers may raise any exception
            raise OSError(first_line(error)) from error
        self._progress(size)
        return size

    def seekable(self) -> bool:
        return bool(self._raw.seekable())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())


_DAMAGE: Final = ("ZSTD", "zlib", "bz2", "LZ4", "Truncated")
"""Words in pyarrow's error messages for damaged compressed data, which distinguish them from messages of other errors.
"""


class _DecompressedStream(_ForwardStream):
    """A raw stream that decompresses another stream in bounded memory."""

    def __init__(self, raw: io.BufferedReader, name: str, kind: str) -> None:
        try:
            import pyarrow as pa
        except ModuleNotFoundError:
            raise InputError(
                f"{name} cannot be read, because compressed files need pyarrow: pip install 'ssd-serving[builder]'"
            ) from None
        if kind == "xz":  # pyarrow does not read it
            super().__init__(lzma.LZMAFile(raw))  # noqa: SIM115  # it holds nothing but memory
        else:
            super().__init__(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), kind))
        self._what = f"{display_name(name)} contains damaged {kind} data"

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            return super().readinto(buffer)
        except (OSError, EOFError, lzma.LZMAError) as error:
            if isinstance(error, OSError) and not any(mark in str(error) for mark in _DAMAGE):
                raise
            is_cut = isinstance(error, EOFError) or "Truncated" in str(error)
            why = "it ends too early" if is_cut else first_line(error)
            raise InputError(f"{self._what} ({why}): copy it again, or compress it again") from None
