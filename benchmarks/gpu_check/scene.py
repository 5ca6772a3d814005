"""What every part is given: where it runs, how large everything is, and how it writes down what it knows so far."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

SIZES: Final[dict[str, tuple[Any, Any, str]]] = {
    "prompts": (32, 2, "of the comparison of outputs, in each type of numbers"),
    "max_tokens": (48, 8, "of its outputs"),
    "requests": (80, 3, "of the stream of growth"),
    "repeated": (24, 2, "requests that are asked again"),
    "rounds": (16, 2, "timed steps of each shape"),
    "large": ("8b", "tiny", "shape of the large model, see benchmarks.steps"),
    "small": ("1b", "tiny", "shape of the small one"),
    "context": (1024, 64, "tokens that a row of the two holds"),
    "step_widths": ((1, 2, 4, 8, 16, 32, 64), (1, 4), "positions of timed steps at batch 1"),
    "step_batches": ((8, 32, 64), (2,), "larger batches of timed steps"),
    "copy_mb": (2048, 16, "size of the copy that tells what the memory can do"),
    "index_tokens": (1_000_000, 4000, "that the index holds while drafting is timed"),
    "propose_rows": (64, 4, "that are drafted for in one step"),
    "overhead_batch": ((1, 4, 16, 64), (1,), "of speculation that gains nothing"),
    "pairs": (8, 1, "of the same requests with and without speculation"),
    "profile_batch": ((1, 32), (1, 2), "of the profiled steps"),
    "soak_requests": (2000, 24, "of the soak; every seventh is cancelled"),
    "reopened": (4, 2, "times that the engine is opened and closed again"),
}
"""Each is an option of the command line; tuples take several numbers. On a GPU, for a look on a CPU, and what it is."""


Found = dict[str, Any]
"""What a part found: an object of JSON. "passed" is False where something is wrong."""

Keep = Callable[[Found], None]
"""Writes down what is known so far, so that a part that is cut has not run for nothing."""


@dataclass(frozen=True, slots=True)
class Scene:
    """``model`` : directory or id of the small model. ``real`` : of a pretrained one, None where there is none.

    ``device`` : "cuda" or "cpu". ``sizes`` : a value of each of `SIZES`. ``out`` : where files beside the result go,
    None for nowhere.
    """

    model: str
    real: str | None
    device: str
    sizes: SimpleNamespace
    out: Path | None

    @property
    def served_dtype(self) -> str:
        """The type that large models are served in here."""
        return "bfloat16" if self.device != "cpu" else "float32"


def read_results(directory: Path) -> Found:
    """What the parts of all calls found whose results lie in ``directory``; of two of a part, the later file's by name.

    Empty where none lies there.
    """
    found: Found = {}
    for path in sorted(directory.glob("gpu_check*.json")):
        found |= json.loads(path.read_text())
    return found


def let_go(device: torch.device) -> None:
    """Give back what nothing refers to any more: a target and its recorded steps refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> dict[str, int]:
    """Bytes: held by tensors, taken from the device by torch, in use on the device by anyone. Zeros on a CPU."""
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0, "in_use": 0}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "in_use": total - free,
    }
