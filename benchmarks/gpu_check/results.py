"""What calls wrote down, together."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_check.scene import Found


def read_results(directory: Path) -> Found:
    """What the parts of all calls found whose results lie in ``directory``; of two of a part, the later file's by name.

    Empty where none lies there.
    """
    found: Found = {}
    for path in sorted(directory.glob("gpu_check*.json")):
        found |= json.loads(path.read_text())
    return found
