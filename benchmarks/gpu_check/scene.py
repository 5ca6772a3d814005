"""What every part is given, and how it writes down what it knows so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.sizes import Sizes

Found = dict[str, Any]
"""What a part found: an object of JSON. "passed" is False where something is wrong."""

Keep = Callable[[Found], None]
"""Writes down what is known so far, so that a part that is cut has not run for nothing."""


@dataclass(frozen=True, slots=True)
class Scene:
    """``model`` : directory or id of the small model. ``real`` : of a pretrained one, None where there is none.

    ``device`` : "cuda" or "cpu". ``out`` : where files beside the result go, None for nowhere.
    """

    model: str
    real: str | None
    device: str
    sizes: Sizes
    out: Path | None

    @property
    def served_dtype(self) -> str:
        """The type that large models are served in here."""
        return "bfloat16" if self.device != "cpu" else "float32"
