"""Compiled kernels on disk, so that a process that starts does not compile what an earlier one has.

Numba keeps machine code until the function's own file changes; one that calls it would go on with the old code of
another file, and here that means another layout of memory. So it is kept until a file changes that the function's own
imports, directly or through others: what a kernel is made of, it imports.

Keeping it is all that may fail: a directory that cannot be written, a torn file, a numba that does this in another
way. Then kernels are compiled in every process, some seconds each time.

A wheel and a container come with machine code for the drafting kernels, in ``prebuilt/``: see `prebuild`. A kernel
looks there first. If nothing there matches its sources, numba, Python or this processor, the kernel is compiled.

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
import shutil
import sysconfig
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite import binding, ir
from numba import config, types
from numba.core import event
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


class KernelCounts(NamedTuple):
    """How this process got the machine code of its kernels, in overloads: one function for one list of types."""

    compiled: int
    cached: int
    """Overloads loaded from `machine_code_directory`, where an earlier process kept them."""
    prebuilt: int
    """Overloads loaded from the package."""
    compile_seconds: float


_counts: Counter[str] = Counter()
_compile_timer = event.TimingListener()
event.register("numba:compile", _compile_timer)


def kernel_counts() -> KernelCounts:
    """Return the counts since this process began; a compilation that is still running is not in them."""
    seconds = _compile_timer.duration if _compile_timer.done else 0.0
    return KernelCounts(_counts["compiled"], _counts["cached"], _counts["prebuilt"], seconds)


PREBUILT: Final = Path(__file__).with_name("prebuilt") / str(sysconfig.get_config_var("SOABI"))
"""The directory of machine code in this package for this Python; only a process that called `prebuild` writes there."""
_TRIPLE: Final = binding.get_process_triple()
_BASELINES: Final = {
    "x86_64": ("x86-64-v3", ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")),
    "aarch64": ("generic", ()),
}
"""By architecture: the processor that prebuilt code is compiled for, in LLVM's words, and the features it requires."""
_VECTORS: Final = Path(__file__).with_name("vectors.py")
"""Kernels whose files import this one are never prebuilt: their tiles have the size of this processor's registers."""
_is_prebuilding = False


def prebuild() -> bool:
    """Compile kernels for the baseline processor from now on, and keep them in `PREBUILT` and nowhere else.

    Call it before any kernel is imported. Returns False and changes nothing if this processor is below the baseline, or
    if its architecture has none.
    """
    global _is_prebuilding
    baseline = _baseline()
    if baseline is None:
        return False
    config.CPU_NAME, config.CPU_FEATURES = baseline, ""
    shutil.rmtree(PREBUILT, ignore_errors=True)
    _is_prebuilding = True
    return True


def _baseline() -> str | None:
    """Return the processor that prebuilt code is for; None if this one lacks a feature, or numba was told another."""
    baseline, required = _BASELINES.get(_TRIPLE.partition("-")[0], (None, ()))
    features = binding.get_host_cpu_features()
    return baseline if config.CPU_NAME is None and all(features.get(name) for name in required) else None


class PrebuiltKernel:
    """The prebuilt machine code of one function, in files that numba's own cache could have written.

    An index names numba's version and the stamp of the sources. Its keys are signatures and processors.
    """

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        self._name, self._stamp = f"{function.__module__}.{function.__qualname__}", stamp

    def _file(self) -> Any:
        from numba.core.caching import IndexDataCacheFile

        return IndexDataCacheFile(str(PREBUILT), self._name, self._stamp)

    def load(self, signature: Any, target: Any) -> Any:
        """Return the code for ``signature``; None if there is none, if its files are torn or foreign, or on failure."""
        baseline = _baseline()
        if baseline is None:
            return None
        try:
            from numba.core.compiler import CompileResult

            data = self._file().load((signature, (_TRIPLE, baseline, "")))
            target.refresh()
            return data and CompileResult._rebuild(target, *data)
        except Exception:
            return None

    def save(self, signature: Any, compiled: Any) -> None:
        """Write the code that was compiled for ``signature``."""
        if not compiled.library.has_dynamic_globals:  # addresses of this process
            PREBUILT.mkdir(parents=True, exist_ok=True)
            self._file().save((signature, compiled.codegen.magic_tuple()), compiled._reduce())


class KernelCache:
    """The machine code of one function, as numba's dispatcher asks for it; loading and saving never raise.

    Wraps numba's own cache of a function, made with the stamp of all its sources in the place of the one file's.
    """

    def __init__(self, function: Callable[..., Any], *, is_inlined: bool) -> None:
        """``is_inlined`` : only other kernels call it, whose prebuilt code contains it."""
        path = Path(function.__code__.co_filename).resolve()
        stamp = source_stamp(path)
        is_native = is_inlined or CHECKED or _VECTORS in _imports_of(path, _PACKAGE)
        self._prebuilt = None if is_native else PrebuiltKernel(function, stamp)
        self._kept: Any = None
        self.cache_path: str | None = None
        """The directory that this process keeps the code in; None if there is none, or while prebuilding."""
        if not _is_prebuilding:
            try:
                self._kept = _kept_by_numba(function, stamp)
                self.cache_path = self._kept.cache_path
            except Exception as error:
                _complain("cannot be kept", error)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The code compiled for ``signature``, None when there is none that can be used."""
        found = None if self._prebuilt is None else self._prebuilt.load(signature, target)
        _counts["prebuilt"] += found is not None
        if found is None and self._kept is not None:
            found = self._load_kept(signature, target)
            _counts["cached"] += found is not None
        return found

    def _load_kept(self, signature: Any, target: Any) -> Any:
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
        _counts["compiled"] += 1
        if _is_prebuilding:
            if self._prebuilt is not None:
                self._prebuilt.save(signature, compiled)
        elif self._kept is not None:
            try:
                self._kept.save_overload(signature, compiled)
            except Exception as error:
                _complain("cannot be kept", error)

    def flush(self) -> None:
        """Forget all of it that an earlier process kept; prebuilt code stays."""
        if self._kept is not None:
            self._kept.flush()


def _kept_by_numba(function: Callable[..., Any], stamp: str) -> Any:
    """Return numba's cache of ``function``; raises whatever another numba raises, or one without a place to write."""
    from numba.core.caching import (
        FunctionCache,
        IndexDataCacheFile,
    )  # here: that it is not there must not fail more than this

    kept = FunctionCache(function)
    if CHECKED:
        kept._cache_file = IndexDataCacheFile(kept.cache_path, f"{kept._impl.filename_base}.checked", None)
    if not hasattr(kept._cache_file, "_source_stamp"):
        raise AttributeError("it has no stamp of its sources that could be replaced")
    kept._cache_file._source_stamp = stamp
    return kept


def machine_code_directory() -> Path | None:
    """Where machine code is kept that this process compiled or read; None where none is kept."""
    return _directories[-1] if _directories else None


def keep_machine_code(dispatcher: Any) -> None:
    """Have numba's ``dispatcher`` look for its machine code on disk before it compiles, and keep what it compiles."""
    try:
        # An attribute that another numba does not know is one that it does not look at: then nothing is kept.
        kept = KernelCache(dispatcher.py_func, is_inlined="forceinline" in dispatcher.targetoptions)
        dispatcher._cache = kept
        if kept.cache_path is not None:
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
