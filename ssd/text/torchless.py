"""For programs that tokenise and never run a model."""

from __future__ import annotations

import os
import sys


def hide_torch() -> bool:
    """Make ``import torch`` fail in this process, so that transformers starts without it. Returns whether it is hidden.

    transformers imports torch wherever it is installed, which costs a tokenizing program a second and some 200 MB. Only
    for the entry point of a program of its own: torch cannot be used in this process afterwards. Does nothing when
    torch or transformers is loaded already.
    """
    if sys.modules.get("torch") is not None or "transformers" in sys.modules:
        return "torch" in sys.modules and sys.modules["torch"] is None
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: importing it raises ModuleNotFoundError
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it says that torch is missing
    return True
