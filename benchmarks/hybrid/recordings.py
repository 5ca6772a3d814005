"""Recorded requests, each with the tokens that another drafter's step emits at every position.

A file has one JSON object a line, and may be compressed by gzip: ``prompt_token_ids`` and ``output_token_ids``, lists
of token ids; ``emitted``, by the drafter's name int[len(output)]: at index i, i output tokens being known besides the
first, how many tokens a step emits with an unbounded draft of it, the target's own among them.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.errors import ConfigError

MOST_TOKEN = 2**29
"""Token ids are smaller."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One request. ``prompt``, ``output`` : int32. ``emitted`` : int64[len(output)], >= 1."""

    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    emitted: npt.NDArray[np.int64]


def read_recordings(path: Path, other: str, max_requests: int | None = None) -> list[Recording]:
    """The first ``max_requests`` of a file, None for all. Raises ConfigError with the line where it is not as above."""
    recordings: list[Recording] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if max_requests is not None and len(recordings) == max_requests:
                    break
                try:
                    recordings.append(_recording(json.loads(line), other))
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path.name}, line {number}: {error}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a .jsonl or .jsonl.gz file of recordings") from error
    if not recordings:
        raise ConfigError(f"{path.name}: there is no request in it")
    return recordings


def _recording(record: Any, other: str) -> Recording:
    """Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError("expected a JSON object")
    emitted = record.get("emitted")
    if not isinstance(emitted, dict):
        raise ValueError('"emitted" must be an object of lists by drafter')
    if other not in emitted:
        raise ValueError(
            f'"emitted" says nothing of {other!r}; name another with --other: {", ".join(sorted(emitted))}'
        )
    prompt, output = (_integers(record.get(key), key, 0) for key in ("prompt_token_ids", "output_token_ids"))
    lengths = _integers(emitted[other], f'emitted["{other}"]', 1)
    if not len(prompt) or len(output) != len(lengths):
        raise ValueError(
            f'a prompt, and one number in emitted["{other}"] for each output token, are needed; there are '
            f"{len(prompt)} prompt tokens, {len(output)} output tokens and {len(lengths)} numbers"
        )
    return Recording(prompt.astype(np.int32), output.astype(np.int32), lengths)


def _integers(values: Any, name: str, least: int) -> npt.NDArray[np.int64]:
    """Raises ValueError unless they are a list of integers from ``least`` on."""
    is_list = isinstance(values, list) and all(type(value) is int and least <= value < MOST_TOKEN for value in values)
    if not is_list:
        raise ValueError(f'"{name}" must be a list of integers from {least} to {MOST_TOKEN - 1}')
    return np.array(values, np.int64)
