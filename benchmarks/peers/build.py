"""Compile the C++ code of a peer: ``python -m benchmarks.peers.build {sglang-ngram | llama-cpp SDIST}``.

The interpreter of the peers' environment runs this program; it needs a C++ compiler. sglang-ngram is compiled from the
sources in the installed wheel, with the flags of SGLang's own loader. llama-cpp is compiled from a few files of the
source distribution of llama-cpp-python (SDIST), which contains all of llama.cpp.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(sys.prefix) / "peers"
"""The directory for compiled libraries, in the environment of the running interpreter."""
SGLANG_LIBRARY = FOLDER / "sglang-ngram.so"
LLAMA_CPP_LIBRARY = FOLDER / "llama-cpp-drafting.so"

_OURS = Path(__file__).with_name("llama_cpp.cpp")
_LLAMA_CPP_FILES = ("speculative", "ngram-cache", "ngram-map", "ngram-mod")
_LLAMA_CPP_HEADERS = ("common", "include", "ggml/include", "src", "vendor")
_LLAMA_CPP_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-DNDEBUG")
_NEVER_CALLED = re.compile(r"ggml|gguf|llama|common|string_join|tty_can_use_colors")
CPP_FILES = tuple(
    f"ngram_corpus/{name}.cpp" for name in ("result", "trie", "suffix_automaton", "ngram", "ngram_corpus_ffi")
)
FLAGS = ("-std=c++20", "-O3")
"""The compiler flags of SGLang's own loader (kernels/jit/utils/compile/paths.py)."""
_BARE = ("", ".kernels", ".kernels.ops", ".kernels.ops.speculative", ".kernels.jit", ".srt", ".srt.speculative")


def require(library: Path) -> Path:
    """Return the path of a compiled library. Raises ImportError if it was not built."""
    if not library.is_file():
        raise ImportError(f"{library.name} was not built")
    return library


def package_folder() -> Path:
    """Return the directory of the installed sglang package, without importing it. Raises ImportError without one."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def load_corpus_class() -> Any:
    """Import `NgramCorpus` of sglang/srt/speculative/cpp_ngram/ngram_corpus.py, using the compiled library.

    The parent packages are replaced by empty modules, so that their ``__init__`` is not run. SGLang's loader, which
    would compile at first use, is replaced by one that only loads. Raises ImportError.
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


def build_sglang() -> None:
    """Compile the trie of SGLang's n-gram speculation."""
    sources = package_folder() / "kernels" / "jit"
    import_module("tvm_ffi.cpp").build(
        "sglang_ngram",
        cpp_files=[str(sources / "csrc" / name) for name in CPP_FILES],
        extra_cflags=list(FLAGS),
        extra_include_paths=[str(sources / "include")],
        build_directory=str(FOLDER / "sglang-ngram-build"),
        output=str(SGLANG_LIBRARY),
    )


def build_llama_cpp(distribution: Path) -> None:
    """Compile the drafters of llama.cpp that need no model. ``distribution`` is the .tar.gz of llama-cpp-python."""
    root = _unpack(distribution) / "vendor" / "llama.cpp"
    headers = [f"-I{root / name}" for name in _LLAMA_CPP_HEADERS]
    sources = [*(root / "common" / f"{name}.cpp" for name in _LLAMA_CPP_FILES), _OURS]
    objects = []
    for source in sources:
        objects.append(FOLDER / f"{source.stem}.o")
        _run([_compiler(), *_LLAMA_CPP_FLAGS, *headers, "-c", source, "-o", objects[-1]])
    # speculative.cpp also drafts with models; what that calls of the rest of llama.cpp is never reached here.
    stubs = FOLDER / "never_called.c"
    stubs.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in _missing(objects)))
    stub_object = stubs.with_suffix(".o")
    _run([_compiler(), "-x", "c", "-w", "-fPIC", "-c", stubs, "-o", stub_object])
    _run([_compiler(), "-shared", "-Wl,-z,defs", *objects, stub_object, "-o", LLAMA_CPP_LIBRARY])


def _unpack(distribution: Path) -> Path:
    """Unpack llama.cpp's headers and drafters, with metadata for `importlib.metadata`; return the directory."""
    with tarfile.open(distribution) as archive:
        wanted = [
            member
            for member in archive
            if member.isfile()
            and (
                member.name.endswith("PKG-INFO")
                or (member.name.endswith((".h", ".hpp")) and "/vendor/llama.cpp/" in member.name)
                or Path(member.name).name in {f"{name}.cpp" for name in _LLAMA_CPP_FILES}
            )
        ]
        archive.extractall(FOLDER, wanted, filter="data")
    (root,) = FOLDER.glob("llama_cpp_python-*[0-9]/")
    metadata = root.with_suffix(root.suffix + ".dist-info")
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_bytes((root / "PKG-INFO").read_bytes())
    return root


def _missing(objects: Sequence[Path]) -> list[str]:
    """Return the functions of llama.cpp that are called but not defined in the compiled objects."""
    listing = _run(["nm", "--format=posix", *objects])
    found = {tuple(line.split()[:2]) for line in listing.splitlines() if len(line.split()) >= 2}
    defined = {name for name, kind in found if kind not in "Uw"}
    return sorted(name for name, kind in found if kind == "U" and name not in defined and _NEVER_CALLED.search(name))


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _run(command: Sequence[str | Path]) -> str:
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: list[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    if arguments == ["sglang-ngram"]:
        build_sglang()
    elif len(arguments) == 2 and arguments[0] == "llama-cpp":
        build_llama_cpp(Path(arguments[1]))
    else:
        print("usage: python -m benchmarks.peers.build {sglang-ngram | llama-cpp SDIST}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
