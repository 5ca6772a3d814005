"""Where compiled peers lie in their environment."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "peers"
"""Of the interpreter that runs this, the peers' own."""
SGLANG_LIBRARY = FOLDER / "sglang-ngram.so"
LLAMA_CPP_LIBRARY = FOLDER / "llama-cpp-drafting.so"


def require(library: Path) -> Path:
    """The library, if it was built. Raises ImportError."""
    if not library.is_file():
        raise ImportError(f"{library.name} was not built")
    return library
