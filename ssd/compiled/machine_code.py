"""Compiled kernels on disk, so that a process that starts does not compile what an earlier one has.

Numba keeps machine code until the function's own file changes; one that calls it would go on with the old code of
another file, and here that means another layout of memory. So it is kept until a file changes that the function's own
imports, directly or through others: what a kernel is made of, it imports.

Keeping it is all that may fail: a directory that cannot be written, a torn file, a numba that does this in another
way. Then kernels are compiled in every process, some seconds each time.

There is a build that finds wrong addresses: set SSD_CHECK_ADDRESSES=1 before the process starts. In it every view made
from an address, and every load from one, must lie inside one piece of memory that Python named and still holds, and
indices of arrays must lie within them; else the kernel raises IndexError. It takes several times as long, and its
machine code is kept beside that of the plain build. Memory is named where its address is taken: ``addresses.address``,
and ``name_memory`` for an array that a kernel takes the address of. Of a view, all that its owner has counts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

CHECKED: Final = os.environ.get("SSD_CHECK_ADDRESSES", "") not in ("", "0")

_SYMBOL: Final = "ssd_named_memory"

_lock = RLock()  # what ends while another is named is forgotten by the same thread
_owners: set[int] = set()  # ids of the arrays that own what was named
_num_owners: Counter[tuple[int, int]] = Counter()  # of each piece of memory, by its begin and end: a file may have some
_tables: deque[npt.NDArray[np.int64]] = deque(maxlen=64)  # the last ones: a kernel may still read one that was replaced
_newest = ctypes.c_int64()  # where the table in use lies: its length, then begin and end of each piece
binding.add_symbol(_SYMBOL, ctypes.addressof(_newest))


def name_memory(array: npt.NDArray[Any]) -> None:
    """Let kernels of a checked build read and write what ``array`` lies in, until that is freed. O(pieces named)."""
    if not CHECKED:
        return
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    whole = owner if owner.base is None else np.frombuffer(owner.base, np.uint8)
    begin = int(whole.__array_interface__["data"][0])
    piece = begin, begin + whole.nbytes
    if id(owner) in _owners or whole.nbytes == 0:
        return
    with _lock:
        _owners.add(id(owner))
        _num_owners[piece] += 1
        _publish()
    weakref.finalize(owner, _forget, id(owner), piece).atexit = False


def _forget(owner: int, piece: tuple[int, int]) -> None:
    with _lock:
        _owners.discard(owner)
        _num_owners[piece] -= 1
        if not _num_owners[piece]:
            del _num_owners[piece]
        _publish()


def _publish() -> None:
    pieces = sorted(_num_owners)
    table = np.array([len(pieces), *chain.from_iterable(pieces)], np.int64)
    _tables.append(table)
    _newest.value = int(table.__array_interface__["data"][0])


_publish()


@intrinsic
def named_memory(_typing: Any) -> Any:
    """For kernels: where the table of what was named lies."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        word = ir.IntType(64)
        newest = builder.module.globals.get(_SYMBOL) or ir.GlobalVariable(builder.module, word, _SYMBOL)
        return builder.load(newest)

    return types.int64(), generate


log = logging.getLogger(__name__)

_complained: set[str] = set()
_directories: list[Path] = []


_PACKAGE = Path(__file__).resolve().parents[1]
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+([\w, \t]+|\()|import[ \t]+([\w., \t]+))", re.M)


def source_stamp(path: Path, package: Path = _PACKAGE) -> str:
    """A digest of a file and of all files of ``package`` that it imports, directly or not. O(their size)."""
    found, waiting = {path}, [path]
    while waiting:
        new = _imports_of(waiting.pop(), package) - found
        found |= new
        waiting += new
    digest = xxhash.xxh3_128()
    for each in sorted(found):
        name = each.relative_to(package).as_posix() if each.is_relative_to(package) else each.name
        text = _text_of(each)
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@cache
def _imports_of(path: Path, package: Path) -> frozenset[Path]:
    """The files of ``package`` that a file imports by absolute names, wherever in it; of a package in it, all."""
    names: set[str] = set()
    for module, members, modules in _IMPORT.findall(_text_of(path)):
        if module:
            names |= {module.decode(), *(f"{module.decode()}.{each.split()[0]}" for each in _listed(members))}
        names |= {each.split()[0] for each in _listed(modules)}
    found: set[Path] = set()
    for name in names:
        top, *rest = name.split(".")
        if top != package.name or not rest:
            continue
        place = package.joinpath(*rest)
        found |= set(place.rglob("*.py")) if place.is_dir() else {place.with_suffix(".py")}
    return frozenset(each for each in found if each.is_file())


def _listed(names: bytes) -> list[str]:
    return [name.decode() for name in names.split(b",") if name.strip(b" \t(")]


@cache
def _text_of(path: Path) -> bytes:
    return path.read_bytes()


class KernelCache:
    """The machine code of one function, as numba's dispatcher asks for it; never raises.

    Wraps numba's own cache of a function, made with the stamp of all its sources in the place of the one file's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises whatever a numba of another make, or one that finds no directory to write, raises."""
        from numba.core.caching import (
            FunctionCache,
            IndexDataCacheFile,
        )  # here: that it is not there must not fail more than this

        self._kept = FunctionCache(function)
        self.cache_path: str = self._kept.cache_path
        if CHECKED:
            name = f"{self._kept._impl.filename_base}.checked"
            self._kept._cache_file = IndexDataCacheFile(self.cache_path, name, None)
        if not hasattr(self._kept._cache_file, "_source_stamp"):
            raise AttributeError("it has no stamp of its sources that could be replaced")
        self._kept._cache_file._source_stamp = source_stamp(Path(function.__code__.co_filename).resolve())

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The code compiled for ``signature``, None when there is none that can be used."""
        try:
            return self._kept.load_overload(signature, target)
        except Exception as error:
            # A torn file, or one that names a type that sources no longer have: nothing could be kept beside it.
            try:
                self.flush()
            except Exception:
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


def machine_code_directory() -> Path | None:
    """Where machine code is kept that this process compiled or read; None where none is kept."""
    return _directories[-1] if _directories else None


def keep_machine_code(dispatcher: Any) -> None:
    """Have numba's ``dispatcher`` look for its machine code on disk before it compiles, and keep what it compiles."""
    try:
        # An attribute that another numba does not know is one that it does not look at: then nothing is kept.
        kept = KernelCache(dispatcher.py_func)
        dispatcher._cache = kept
        _directories[:] = [Path(kept.cache_path)]
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
