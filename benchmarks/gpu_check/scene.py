"""What every part is given: where it runs, how large everything is, and how it writes down what it knows so far."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Each is an option of the command line; tuples take several numbers. The defaults are a GPU's."""

    prompts: int = 32
    """Of the comparison of outputs, in each type of numbers."""
    max_tokens: int = 48
    """Of its outputs."""
    requests: int = 80
    """Of the stream of growth."""
    repeated: int = 24
    """Requests that are asked again."""
    rounds: int = 16
    """Timed passes or steps of each shape."""
    batch: tuple[int, ...] = (1, 4, 16)
    """Rows of the small model's timed passes."""
    width: tuple[int, ...] = (1, 2, 5, 9, 17, 65)
    """Positions of a row of these."""
    large: str = "8b"
    """Shape of the large model, see `benchmarks.steps`."""
    small: str = "1b"
    """Shape of the small one."""
    context: int = 1024
    """Tokens that a row of the two holds."""
    step_widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Positions of timed steps at batch 1."""
    step_batches: tuple[int, ...] = (8, 32, 64)
    """Larger batches of timed steps."""
    longest: int = 8192
    """Longest text of the comparison of attentions with float32."""
    copy_mb: int = 2048
    """Size of the copy that tells what the memory can do."""
    index_tokens: int = 1_000_000
    """Tokens that the index holds while drafting is timed."""
    propose_rows: int = 64
    """Rows that are drafted for in one step."""
    overhead_batch: tuple[int, ...] = (1, 4, 16, 64)
    """Of speculation that gains nothing."""
    pairs: int = 8
    """Of the same requests with and without speculation."""
    profile_batch: tuple[int, ...] = (1, 32)
    """Of the profiled steps."""
    soak_requests: int = 2000
    """Of the soak; every seventh is cancelled."""
    reopened: int = 4
    """Times that the engine is opened and closed again."""


ON_CPU = Sizes(
    prompts=2,
    max_tokens=8,
    requests=3,
    repeated=2,
    rounds=2,
    batch=(1, 3),
    width=(1, 4),
    large="tiny",
    small="tiny",
    context=64,
    step_widths=(1, 4),
    step_batches=(2,),
    longest=96,
    copy_mb=16,
    index_tokens=4000,
    propose_rows=4,
    overhead_batch=(1,),
    pairs=1,
    profile_batch=(1, 2),
    soak_requests=24,
    reopened=2,
)


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
