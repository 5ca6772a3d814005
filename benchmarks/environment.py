"""What a result was measured on, and with what: kept at the head of its JSON."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import name_of
from ssd.bundled import MODEL_PATH

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ssd.model.target import Target


def head(benchmark: str) -> dict[str, Any]:
    """The first keys of every result: what was run, when and where."""
    return {"benchmark": benchmark, "date": datetime.date.today().isoformat(), "environment": describe()}


def model_name(model: str | Path) -> str:
    """What a model is called in results; no path."""
    return "bundled model" if Path(model) == MODEL_PATH else name_of(Path(model)) or Path(model).name


def device_name(device: torch.device) -> str:
    """What a device is called in results."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def model_facts(name: str, model: Target | PreTrainedModel) -> dict[str, Any]:
    """What ran and on what device."""
    import torch

    return {
        "model": name,
        "device": device_name(model.device),
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
    }


def describe() -> dict[str, Any]:
    """Machine, versions and commit; no host name."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "numba", "numpy")},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return (head.stdout.strip() or "unknown") + ("+" if dirty.stdout.strip() else "")
