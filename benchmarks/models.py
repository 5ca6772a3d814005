"""Which model a benchmark runs on: the argument that says so, and where the real one of ``make real-model`` lies."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from ssd.bundled import MODEL_PATH

REAL = "real"

VARIABLE = "SSD_REAL_MODEL"
MARKER = "real-model.json"
"""Lies in the directory once it is whole, and names the model."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take the model as its first argument or as ``--model``: a directory, an id, or "real"."""
    text = f"Hugging Face directory or id, or {REAL!r} for what `make real-model` made (default: bundled)"
    # The positional one has no default of its own, which would take the place of what --model said.
    parser.add_argument("model", nargs="?", type=find_model, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--model", dest="model", type=find_model, default=MODEL_PATH, help="the same, named")


def find_model(name: str) -> str | Path:
    """What ``name`` stands for. Raises ArgumentTypeError where "real" was asked for and is not there."""
    if name == "bundled":
        return MODEL_PATH
    if name != REAL:
        return name
    directory = default_directory()
    if not (directory / MARKER).is_file():
        raise argparse.ArgumentTypeError(
            f"no real model in {directory}; `make real-model` makes one, {VARIABLE} says where it is"
        )
    return directory


def default_directory() -> Path:
    """``$SSD_REAL_MODEL``, or ``.real-model`` in the checkout."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(__file__).parent.parent / ".real-model"


def name_of(directory: Path) -> str | None:
    """What results call the real model in ``directory``; None where another model lies there."""
    marker = directory / MARKER
    return str(json.loads(marker.read_text())["name"]) if marker.is_file() else None
