"""Store the machine code of numba kernels on disk, so that later processes do not compile them again.

Numba's own cache is invalidated if the file of a function changes, but not if another file changes whose functions it
calls. The old code would then use an outdated memory layout. So this cache is invalidated if any file changes that the
function's file imports, directly or indirectly.

Errors of the cache are never raised. If a directory is not writable, a file is damaged, or another version of numba
works differently, kernels are compiled in every process, which takes some seconds.

A wheel and a container contain machine code for the drafting kernels, in ``prebuilt/``: see `prebuild`. A kernel looks
there first. If no machine code there matches its sources, numba, Python or this processor, the kernel is compiled.

**Checked build.** Set SSD_CHECK_ADDRESSES=1 before the process starts to find wrong addresses. Then every load from an
address and every view of an address must lie inside a block of memory that Python has registered and still holds, and
array indices must be in range; otherwise the kernel raises IndexError. It is several times slower, and its machine code
is stored next to that of the plain build. ``addresses.address`` registers memory when it returns an address;
``register_memory`` does it for an array whose address a kernel computes. For a view, the whole memory of its owner is
registered.
"""

from __future__ import annotations

import array
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

_lock = RLock()  # reentrant, because an array may be freed while this thread registers another one
_owners: set[int] = set()  # the ids of the arrays that own registered memory
_num_owners: Counter[tuple[int, int]] = Counter()  # by begin and end of each block; a mapped file may have several
_tables: deque[npt.NDArray[np.int64]] = deque(maxlen=64)  # the last tables, because a kernel may still read an old one
_newest = ctypes.c_int64()  # the address of the current table: its length, then begin and end of each block
binding.add_symbol(_SYMBOL, ctypes.addressof(_newest))


def register_memory(data: npt.NDArray[Any] | array.array[Any]) -> None:
    """Allow kernels to access the memory of an array until it is freed; needed only with SSD_CHECK_ADDRESSES=1."""
    if not CHECKED:
        return
    owner: Any = data
    while isinstance(getattr(owner, "base", None), np.ndarray):
        owner = owner.base
    base = getattr(owner, "base", None)
    is_whole = base is None and isinstance(owner, np.ndarray)
    whole = owner if is_whole else np.frombuffer(owner if base is None else base, np.uint8)
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
def registered_memory(_typing: Any) -> Any:
    """Return, in numba code, the address of the table of memory blocks that kernels may access."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        word = ir.IntType(64)
        newest = builder.module.globals.get(_SYMBOL) or ir.GlobalVariable(builder.module, word, _SYMBOL)
        return builder.load(newest)

    return types.int64(), generate


log = logging.getLogger(__name__)

_warned: set[str] = set()
_directories: list[Path] = []


_PACKAGE = Path(__file__).resolve().parents[1]
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+([\w, \t]+|\()|import[ \t]+([\w., \t]+))", re.M)


def source_stamp(path: Path, package: Path = _PACKAGE) -> str:
    """Return a hash of a source file and of all files of ``package`` that it imports, directly or indirectly."""
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
    """Return the files of ``package`` that a source file imports by absolute names.

    If the source file imports a package, all files of this package are returned.
    """
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
    """The number of numba functions compiled or loaded in this process, by the origin of their machine code.

    A function is counted once for each list of argument types.
    """

    compiled: int
    cached: int
    """The number of numba functions whose machine code an earlier process stored in `machine_code_directory`."""
    prebuilt: int
    """The number of numba functions whose machine code was loaded from the installed package."""
    compile_seconds: float


_counts: Counter[str] = Counter()
_compile_timer = event.TimingListener()
event.register("numba:compile", _compile_timer)


def kernel_counts() -> KernelCounts:
    """Return how many numba functions this process has compiled or loaded so far, by origin of the machine code."""
    seconds = _compile_timer.duration if _compile_timer.done else 0.0
    return KernelCounts(_counts["compiled"], _counts["cached"], _counts["prebuilt"], seconds)


PREBUILT: Final = Path(__file__).with_name("prebuilt") / str(sysconfig.get_config_var("SOABI"))
"""The directory of the machine code that the package contains for this Python version.

Only a process that has called `prebuild` writes to this directory.
"""
_TRIPLE: Final = binding.get_process_triple()
_BASELINES: Final = {
    "x86_64": ("x86-64-v3", ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")),
    "aarch64": ("generic", ()),
}
"""For each CPU architecture, the processor that prebuilt machine code is compiled for (by LLVM's name), and the CPU
features that this code requires.
"""
_SIMD: Final = Path(__file__).parent.parent / "model" / "cpu" / "simd.py"
"""The source file of the SIMD code generator. Kernels that import it depend on the processor and are never prebuilt."""
_is_prebuilding = False


def prebuild() -> bool:
    """From now on, compile kernels for a baseline processor (`_BASELINES`), and store machine code in `PREBUILT` only.

    Call this function before any kernel is imported.

    Returns:
        False, without any change, if this processor is below the baseline or its architecture has no baseline.
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
    """Return the LLVM processor for which prebuilt code is compiled; None if this process cannot use such code."""
    baseline, required = _BASELINES.get(_TRIPLE.partition("-")[0], (None, ()))
    features = binding.get_host_cpu_features()
    return baseline if config.CPU_NAME is None and all(features.get(name) for name in required) else None


class PrebuiltKernel:
    """The machine code of one numba function that the installed package contains, in files of numba's cache format.

    The index file maps pairs of a signature and a processor to machine code. It is valid only for the version of numba
    and the hash of the sources that it contains.
    """

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        self._name, self._stamp = f"{function.__module__}.{function.__qualname__}", stamp

    def _file(self) -> Any:
        from numba.core.caching import IndexDataCacheFile

        return IndexDataCacheFile(str(PREBUILT), self._name, self._stamp)

    def load(self, signature: Any, target: Any) -> Any:
        """Return the prebuilt machine code for ``signature``; None if this process has no usable code for it."""
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
        if not compiled.library.has_dynamic_globals:  # else it contains addresses that are valid in this process only
            PREBUILT.mkdir(parents=True, exist_ok=True)
            self._file().save((signature, compiled.codegen.magic_tuple()), compiled._reduce())


class KernelCache:
    """The stored machine code of one numba function, with the interface that numba's dispatcher expects.

    The class wraps numba's own cache of the function. In addition, stored code becomes invalid if other source files
    that the function depends on change. Loading and saving never raise.
    """

    def __init__(self, function: Callable[..., Any], *, is_inlined: bool) -> None:
        """Open the machine-code cache of ``function``; ``is_inlined`` is whether only other kernels call it."""
        path = Path(function.__code__.co_filename).resolve()
        stamp = source_stamp(path)
        is_native = is_inlined or CHECKED or _SIMD in _imports_of(path, _PACKAGE)
        self._prebuilt = None if is_native else PrebuiltKernel(function, stamp)
        self._cached: Any = None
        self.cache_path: str | None = None
        """The directory where this process stores machine code; None if no directory is writable, or while prebuilding.
        """
        if not _is_prebuilding:
            try:
                self._cached = _numba_cache(function, stamp)
                self.cache_path = self._cached.cache_path
            except Exception as error:
                _warn_once("cannot be stored", error)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the machine code stored for ``signature``; None if no usable code is stored."""
        found = None if self._prebuilt is None else self._prebuilt.load(signature, target)
        _counts["prebuilt"] += found is not None
        if found is None and self._cached is not None:
            found = self._load_cached(signature, target)
            _counts["cached"] += found is not None
        return found

    def _load_cached(self, signature: Any, target: Any) -> Any:
        try:
            return self._cached.load_overload(signature, target)
        except Exception as error:
            # A damaged file, or one with a type that no longer exists. Nothing could be stored next to it.
            try:
                self.flush()
            except Exception:
                _warn_once("cannot be read", error)
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store the machine code compiled for ``signature``, if possible."""
        _counts["compiled"] += 1
        if _is_prebuilding:
            if self._prebuilt is not None:
                self._prebuilt.save(signature, compiled)
        elif self._cached is not None:
            try:
                self._cached.save_overload(signature, compiled)
            except Exception as error:
                _warn_once("cannot be stored", error)

    def flush(self) -> None:
        """Delete the function's machine code that earlier processes stored, except prebuilt code."""
        if self._cached is not None:
            self._cached.flush()


def _numba_cache(function: Callable[..., Any], stamp: str) -> Any:
    """Return numba's own cache of a function, which is invalidated if ``stamp`` changes. May raise any exception."""
    from numba.core.caching import (
        FunctionCache,
        IndexDataCacheFile,
    )  # imported here, so that only this function fails if it is missing

    numba_cache = FunctionCache(function)
    if CHECKED:
        numba_cache._cache_file = IndexDataCacheFile(
            numba_cache.cache_path, f"{numba_cache._impl.filename_base}.checked", None
        )
    if not hasattr(numba_cache._cache_file, "_source_stamp"):
        raise AttributeError("the installed version of numba has no _source_stamp that could be replaced")
    numba_cache._cache_file._source_stamp = stamp
    return numba_cache


def machine_code_directory() -> Path | None:
    """Return the directory where this process stores machine code of kernels; None if no directory is writable."""
    return _directories[-1] if _directories else None


def cache_machine_code(dispatcher: Any) -> None:
    """Make a numba function load its machine code from disk if it was stored, and store newly compiled code."""
    try:
        # A version of numba that does not know this attribute ignores it, and then nothing is stored.
        kernel_cache = KernelCache(dispatcher.py_func, is_inlined="forceinline" in dispatcher.targetoptions)
        dispatcher._cache = kernel_cache
        if kernel_cache.cache_path is not None:
            _directories[:] = [Path(kernel_cache.cache_path)]
    except Exception as error:
        _warn_once("cannot be stored", error)


def _warn_once(what: str, error: Exception) -> None:
    """Log a warning about stored machine code, once for each kind of problem (``what``)."""
    if what not in _warned:
        _warned.add(what)
        log.warning(
            "the machine code of kernels %s (%s: %s). Every process therefore compiles them again, which takes "
            "some seconds. Set NUMBA_CACHE_DIR to a writable directory",
            what,
            type(error).__name__,
            error,
        )
