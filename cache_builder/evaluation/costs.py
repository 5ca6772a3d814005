"""The costs of forward passes and decoding steps: measured, read from a file, or assumed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.errors import ConfigError, ModelError

Floats = npt.NDArray[np.float64]

_MAX_POINTS = 10_000
_HOW = "`ssd-cache evaluate --measure MODEL --save-cost FILE` writes one"


@dataclass(frozen=True, slots=True)
class CostCurve:
    """The cost of a forward pass as a function of its number of tokens, interpolated linearly between measured points.

    Attributes:
        widths: float64[n], the numbers of tokens of the measured passes, increasing from 1.
        costs: float64[n], relative to a pass of one token; the first is 1.
    """

    name: str
    widths: Floats
    costs: Floats

    def costs_up_to(self, width: int) -> Floats:
        """Return the costs of passes of 0, 1, ... ``width`` tokens: float64[width + 1]. 0 tokens cost nothing."""
        asked = np.arange(width + 1, dtype=np.float64)
        slope = (self.costs[-1] - self.costs[-2]) / (self.widths[-1] - self.widths[-2])
        beyond = np.maximum(0.0, asked - self.widths[-1])
        costs: Floats = np.interp(asked, self.widths, self.costs) + slope * beyond
        costs[0] = 0.0
        return costs


def flat_curve(width: int) -> CostCurve:
    """Return a cost curve that is constant up to ``width`` tokens, and proportional to the number of tokens beyond.

    Passes on a GPU are similar: a pass of few tokens mostly takes the time to read the weights.
    """
    return CostCurve(f"flat {width}", np.array([1.0, width, 2.0 * width]), np.array([1.0, 1.0, 2.0]))


def _parse_curve(result: object, name: str) -> CostCurve:
    try:
        widths, costs = (np.array(result[key], np.float64) for key in ("widths", "costs"))  # type: ignore[index]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ConfigError(f"{name} contains no cost curve ({error}); {_HOW}") from error
    is_curve = widths.ndim == 1 and 2 <= len(widths) <= _MAX_POINTS and widths.shape == costs.shape
    rising = is_curve and bool(widths[0] == 1 and (np.diff(widths) > 0).all() and np.isfinite(widths).all())
    if not rising or costs[0] != 1 or not np.isfinite(costs).all() or (costs <= 0).any():
        raise ConfigError(
            f'{name} must contain lists of equal length, "widths" (ascending from 1) and "costs" (positive, the first '
            f"is 1); {_HOW}"
        )
    return CostCurve("measured", widths, costs)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of decoding steps, in units of the cost of a step that decodes one token without drafting.

    Attributes:
        curve: The cost of forward passes.
        source: A sentence for the report that tells how the costs were obtained.
        step_ms: The duration of a step without drafting in milliseconds. None: unknown.
        overhead: The additional cost of each step if drafting is on (search, verification, learning). None: unknown.
        recycling: The measured increase of the speed-up by token recycling, which is added to the estimate. A replay
            cannot determine it, because token recycling drafts from the model's earlier candidates.
    """

    curve: CostCurve
    source: str
    step_ms: float | None = None
    overhead: float | None = None
    recycling: float = 0.0
    condition: str = ""
    """The assumption on which the estimated speed-up is based, shown next to the speed-up in the report."""

    def speed_up(
        self, num_output_tokens: int, steps_by_drafted: npt.NDArray[np.int64], propose_s: float = 0.0
    ) -> float:
        """Return the estimated speed-up: the time of decoding without drafts divided by the time with drafts.

        ``steps_by_drafted`` (int64[k + 1]) are the numbers of steps with 0, 1, ... k draft tokens. ``propose_s`` is the
        total time of drafting in seconds, used only if ``overhead``, which includes this time, was not measured.
        """
        passes = self.curve.costs_up_to(len(steps_by_drafted))[1:]
        times = steps_by_drafted * (passes + (self.overhead or 0.0))
        time = float(times.sum())
        if self.overhead is None and self.step_ms:
            time += propose_s * 1e3 / self.step_ms
        return num_output_tokens / time + self.recycling if time else 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.curve.name,
            "source": self.source,
            "condition": self.condition,
            "widths": [round(float(width), 3) for width in self.curve.widths],
            "costs": [round(float(cost), 4) for cost in self.curve.costs],
            "step_ms": None if self.step_ms is None else round(self.step_ms, 4),
            "overhead": None if self.overhead is None else round(self.overhead, 4),
            "recycling": round(self.recycling, 4),
        }


FLAT_WIDTH = 32
"""The number of tokens up to which a forward pass is assumed to be as fast as for one token, unless costs are measured.
"""
_PROGRAM = "ssd.engine.profile_cli"
_MAX_BYTES = 1 << 20

Sample = Callable[[], Sequence[Sequence[int]]]


def add_cost_arguments(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("costs", "Cost of a forward pass of n tokens relative to a pass of one token")
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--measure",
        metavar="MODEL",
        help="Measure the costs on this machine with this model (directory or hub id). Then answer requests of the "
        "log, each once with and once without drafts, and compare both outputs",
    )
    one.add_argument("--cost", type=Path, metavar="FILE", help="Read the costs from a file that --save-cost wrote")
    group.add_argument("--save-cost", type=Path, metavar="FILE", help="Write the measured costs to a file")


def costs_from_options(options: argparse.Namespace, sample: Sample) -> StepCosts:
    """Return the decoding costs: measured with ``--measure``, read from the file of ``--cost``, or else assumed.

    Raises ConfigError if the options contradict each other or the file is invalid, and ModelError if the measurement
    fails.
    """
    if options.save_cost is not None and options.measure is None:
        raise ConfigError("--save-cost saves the costs that --measure MODEL measures: add --measure MODEL")
    if options.measure is not None:
        measured = measure_costs(options.measure, sample())
        if options.save_cost is not None:
            options.save_cost.write_text(json.dumps(measured) + "\n")
        return parse_step_costs(measured, "--measure")
    if options.cost is not None:
        return read_step_costs(options.cost)
    return StepCosts(
        flat_curve(FLAT_WIDTH),
        f"assumed to be constant up to {FLAT_WIDTH} tokens, and proportional to the number of tokens beyond. Use "
        "--measure or --cost for the costs on your machine",
        condition=f"assuming that a forward pass of {FLAT_WIDTH} tokens takes as long as a pass of 1 token",
    )


def measure_costs(model: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    return run_measurement("costs", model, {"prompts": [list(map(int, prompt)) for prompt in prompts] or None})


def run_measurement(what: str, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Measure with a real model in a new process, and return the result. Raises ModelError if the measurement fails.

    This process cannot import torch, so it cannot run the model. ``what`` is the kind of measurement: "costs" of
    forward passes, or "log" to decode logged requests. ``asked`` are the parameters of the measurement.
    """
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAM, what, model],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
            check=False,
        )
    except OSError as error:
        raise ModelError(f"the measurement did not start: {error}") from error
    lines = done.stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else {}
    except ValueError:
        result = {}
    if done.returncode or not isinstance(result, dict) or not result:
        said = result.get("error") if isinstance(result, dict) else None
        raise ModelError(f"cannot measure {model}: {said or f'its process ended with status {done.returncode}'}")
    return result


def read_step_costs(path: Path) -> StepCosts:
    """Read decoding costs from a file that ``--save-cost`` or the benchmark of passes wrote.

    Raises ConfigError if the file cannot be read or contains something else.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path.name} is not a cost curve: it has more than {_MAX_BYTES} bytes")
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} contains no cost curve ({error}); {_HOW}") from error
    return parse_step_costs(found, path.name)


def parse_step_costs(result: object, name: str) -> StepCosts:
    """Parse decoding costs from a measurement's JSON object. Errors (ConfigError) mention the file ``name``."""
    curve = _parse_curve(result, name)
    assert isinstance(result, dict)  # `_parse_curve` has checked it
    numbers = {
        key: _number(result.get(key), name, key) for key in ("step_ms", "overhead", "recycling") if key in result
    }
    facts = ", ".join(str(result[key])[:80] for key in ("model", "device", "dtype") if key in result)
    threads = f", {result['threads']} threads" if isinstance(result.get("threads"), int) else ""
    return StepCosts(
        curve,
        f"measured: {facts}{threads}, batch size 1",
        step_ms=numbers.get("step_ms"),
        overhead=numbers.get("overhead"),
        recycling=numbers.get("recycling", 0.0),
        condition=f"with the measured costs of forward passes ({facts})",
    )


def _number(value: object, name: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigError(f"{key} of {name} must be a number of at least 0, got {str(value)[:40]}")
    return float(value)
