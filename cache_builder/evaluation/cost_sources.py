"""Where the costs of a replay come from: measured here, read from a file, a GPU's data sheet, or a plain assumption."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cache_builder.evaluation.gpus import BYTES_PER_PARAMETER, GPUS, roofline
from cache_builder.replay.cost import curve_of, flat
from cache_builder.replay.step_costs import StepCosts
from ssd.errors import ConfigError, ModelError

FLAT_WIDTH = 32
"""Tokens up to which a pass costs nothing more where nobody says what it costs."""
_PROGRAM = "ssd.engine.measured_costs"
_MOST_BYTES = 1 << 20

Sample = Callable[[], Sequence[Sequence[int]]]
"""Token ids of a few prompts of the log."""


def add_cost_arguments(command: argparse.ArgumentParser) -> None:
    """What passes cost: one of ``--measure``, ``--cost`` and ``--gpu``, and what the last needs."""
    group = command.add_argument_group("costs", "what a pass of several tokens takes, in passes of one")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--measure", metavar="MODEL", help="measure it here, with this model: its directory or id")
    one.add_argument("--cost", type=Path, metavar="FILE", help="read it from what --save-cost wrote")
    one.add_argument("--gpu", metavar="NAME", help=f"estimate it from a data sheet: {', '.join(GPUS)}")
    group.add_argument("--save-cost", type=Path, metavar="FILE", help="keep what --measure measured")
    group.add_argument("--model-params", type=float, metavar="N", help="with --gpu: parameters of a dense model, 8e9")
    group.add_argument(
        "--model-dtype", default="bf16", choices=tuple(BYTES_PER_PARAMETER), help="with --gpu (default: %(default)s)"
    )
    group.add_argument(
        "--context", type=int, default=1024, metavar="TOKENS",
        help="with --gpu: tokens whose keys and values a row reads (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--kv-bytes", type=float, default=0.0, metavar="N",
        help="with --gpu: bytes of keys and values of a token, 131072 for Llama 3.1 8B (default: 0, left out)",
    )  # fmt: skip


def costs_of(options: argparse.Namespace, sample: Sample, batch: int = 1) -> StepCosts:
    """The costs that ``add_cost_arguments`` was given; where none are named, passes free up to `FLAT_WIDTH` tokens.

    ``batch`` : rows decoded together, for ``--gpu``. Raises ConfigError or ModelError with what to do.
    """
    if options.save_cost is not None and options.measure is None:
        raise ConfigError("--save-cost keeps what --measure MODEL measures: name the model")
    if options.measure is not None:
        measured = measure(options.measure, sample())
        if options.save_cost is not None:
            options.save_cost.write_text(json.dumps(measured) + "\n")
        return step_costs(measured, "--measure")
    if options.cost is not None:
        return read_step_costs(options.cost)
    if options.gpu is not None:
        if options.model_params is None:
            raise ConfigError("--gpu needs the size of the model: add --model-params 8e9")
        return roofline(
            options.gpu,
            num_params=options.model_params,
            dtype=options.model_dtype,
            batch=batch,
            context=options.context,
            kv_bytes_per_token=options.kv_bytes,
        )
    return StepCosts(
        flat(FLAT_WIDTH),
        f"an assumption: passes cost the same up to {FLAT_WIDTH} tokens and in proportion beyond, as on a device that "
        "waits for its memory; --measure, --cost or --gpu say what they cost where you serve",
    )


def measure(model: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What steps cost with ``model`` on this machine, its candidates tried on ``prompts``, see the program's own words.

    It runs in a process of its own, which loads torch; what it is doing is said on standard error. Raises ModelError.
    """
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    arguments = [sys.executable, "-m", _PROGRAM, model]
    given = json.dumps([list(map(int, prompt)) for prompt in prompts]) if prompts else ""
    if given:
        arguments += ["--prompts", "-"]
    try:
        done = subprocess.run(
            arguments, input=given, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet}, check=False
        )
    except OSError as error:
        raise ModelError(f"the measurement did not start: {error}") from error
    lines = done.stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else {}
    except ValueError:
        result = {}
    if done.returncode or not isinstance(result, dict) or "widths" not in result:
        said = result.get("error") if isinstance(result, dict) else None
        raise ModelError(f"cannot measure {model}: {said or f'its program ended with status {done.returncode}'}")
    return result


def read_step_costs(path: Path) -> StepCosts:
    """What ``--save-cost`` or the benchmark of passes wrote. Raises ConfigError where it is not usable."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path.name} is no cost curve: it has more than {_MOST_BYTES} bytes")
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"no cost curve in {path.name} ({error}); --measure MODEL --save-cost FILE makes one"
        ) from error
    return step_costs(found, path.name)


def step_costs(result: object, name: str) -> StepCosts:
    """Costs of a result's JSON, which may be anything. ``name`` : of where it is from. Raises ConfigError."""
    curve = curve_of(result, name)
    assert isinstance(result, dict)  # else there was no curve in it
    numbers = {
        key: _number(result.get(key), name, key) for key in ("step_ms", "overhead", "recycling") if key in result
    }
    facts = ", ".join(str(result[key])[:80] for key in ("model", "device", "dtype") if key in result)
    threads = f", {result['threads']} threads" if isinstance(result.get("threads"), int) else ""
    return StepCosts(
        curve,
        f"measured: {facts}{threads}, batch 1",
        step_ms=numbers.get("step_ms"),
        overhead=numbers.get("overhead"),
        recycling=numbers.get("recycling", 0.0),
    )


def _number(value: object, name: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigError(f"{key} of {name} must be a number of at least 0, got {str(value)[:40]}")
    return float(value)
