"""What the command says of a log: the same program, options and file that a user has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_log(path: Path, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
    """A record for each request, of token ids: what was asked and answered is what the engine saw."""
    with path.open("w") as file:
        for prompt, output in zip(prompts, outputs, strict=True):
            file.write(json.dumps({"token_ids": [*prompt, *output], "prompt_length": len(prompt)}) + "\n")


def evaluate(log: Path, model: str) -> dict[str, Any]:
    """``ssd-cache evaluate LOG --measure MODEL``, everything else by default. Raises SystemExit where it fails."""
    arguments = [sys.executable, "-m", "cache_builder", "evaluate", str(log), "--tokenizer", model, "--measure", model]
    done = subprocess.run(
        [*arguments, "--sample-tokens", "0", "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"ssd-cache evaluate ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
