"""Compiled kernels on disk, so that a process that starts does not compile what an earlier one has.

Numba keeps machine code until the function's own file changes; one that calls it would go on with the old code of
another file, and here that means another layout of memory. So it is kept until any file that may hold a kernel changes.

Keeping it is all that may fail: a directory that cannot be written, a torn file, a numba that does this in another way.
Then kernels are compiled in every process, some seconds each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

log = logging.getLogger(__name__)

_complained: set[str] = set()


def _stamp_of(package: Path) -> str:
    """A digest of every file of the package that may hold a kernel. O(their size), about a millisecond."""
    digest = xxhash.xxh3_128()
    for room in ("retrieval", "drafting", "target"):
        for path in sorted((package / room).rglob("*.py")):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


_SOURCES = _stamp_of(Path(__file__).resolve().parents[1])


class KernelCache:
    """The machine code of one function, as numba's dispatcher asks for it; never raises.

    Wraps numba's own cache of a function, made with the stamp of all sources in the place of the one file's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises whatever a numba of another make, or one that finds no directory to write, raises."""
        from numba.core.caching import FunctionCache  # here: that it is not there must not fail more than this

        self._kept = FunctionCache(function)
        if not hasattr(self._kept._cache_file, "_source_stamp"):
            raise AttributeError("it has no stamp of its sources that could be replaced")
        self._kept._cache_file._source_stamp = _SOURCES
        self.cache_path: str = self._kept.cache_path

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The code compiled for ``signature``, None when there is none that can be used."""
        try:
            return self._kept.load_overload(signature, target)
        except Exception as error:
            _complain("cannot be read", error)
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled for ``signature``, if that is possible."""
        try:
            self._kept.save_overload(signature, compiled)
        except Exception as error:
            _complain("cannot be kept", error)

    def flush(self) -> None:
        """Forget all of it."""
        self._kept.flush()


def keep_machine_code(dispatcher: Any) -> None:
    """Have numba's ``dispatcher`` look for its machine code on disk before it compiles, and keep what it compiles."""
    try:
        # An attribute that another numba does not know is one that it does not look at: then nothing is kept.
        dispatcher._cache = KernelCache(dispatcher.py_func)
    except Exception as error:
        _complain("cannot be kept", error)


def _complain(what: str, error: Exception) -> None:
    """Once for each kind: all kernels have the same trouble."""
    if what not in _complained:
        _complained.add(what)
        log.warning(
            "compiled kernels %s (%s: %s): every process compiles them anew, which takes some seconds at its start. "
            "Set NUMBA_CACHE_DIR to a directory that can be written",
            what, type(error).__name__, error,
        )  # fmt: skip
