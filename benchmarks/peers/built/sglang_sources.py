"""SGLang's n-gram corpus out of its wheel, without the serving stack that importing ``sglang`` would need."""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.peers.built.places import SGLANG_LIBRARY, require

CPP_FILES = tuple(
    f"ngram_corpus/{name}.cpp" for name in ("result", "trie", "suffix_automaton", "ngram", "ngram_corpus_ffi")
)
FLAGS = ("-std=c++20", "-O3")
"""Of its own loader (kernels/jit/utils/compile/paths.py)."""
_BARE = ("", ".kernels", ".kernels.ops", ".kernels.ops.speculative", ".kernels.jit", ".srt", ".srt.speculative")


def package_folder() -> Path:
    """Where the wheel's package lies; nothing of it is run. Raises ImportError."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def load_corpus_class() -> Any:
    """`NgramCorpus` of sglang/srt/speculative/cpp_ngram/ngram_corpus.py, over the library that was built before.

    The packages around it are entered without their ``__init__``, and its loader, which would compile at first use, is
    stood in for by one that loads. Raises ImportError.
    """
    folder = package_folder()
    library = str(require(SGLANG_LIBRARY))
    for suffix in _BARE:
        package = ModuleType(f"sglang{suffix}")
        package.__path__ = [str(folder.joinpath(*suffix.split(".")))]
        sys.modules[package.__name__] = package
    loader: Any = ModuleType("sglang.kernels.jit.utils")
    loader.cache_once = functools.cache
    loader.load_jit = lambda *names, cpp_files, header_only: import_module("tvm_ffi").load_module(library)
    sys.modules[loader.__name__] = loader
    return import_module("sglang.srt.speculative.cpp_ngram.ngram_corpus").NgramCorpus
