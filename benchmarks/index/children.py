"""What is measured in a process of its own: ``python -m benchmarks.index.children TASK JSON``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.index.processes import trim
from benchmarks.made_text import PERIOD, Tokens, completions, flat

_ROOT = Path(__file__).parents[2]
_EDITED = 0.001  # of near-periodic text
_IDS = 32_000

WORST_CASES = ("one token", "period 1,000", "near-periodic", "fibonacci", "60,000 ids", "200,000 ids", "20,000,000 ids")


def run(task: str, **arguments: Any) -> dict[str, Any]:
    """Do ``task`` in a fresh process; its figures. Raises AssertionError with what it said when it fails."""
    command = [sys.executable, "-m", "benchmarks.index.children", task, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    if done.returncode:
        raise AssertionError(f"{task} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def _build(text: Tokens) -> dict[str, Any]:
    """Sort ``text`` into one segment: how fast, and the largest growth of resident memory beside ``text`` itself."""
    from ssd.retrieval.suffix_array import build_segment

    build_segment(np.append(text[:2000], np.int32(-1)).astype(np.int32), start=0, segment_id="0")  # libraries loaded
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    began = time.perf_counter()
    segment = build_segment(text, start=0, segment_id="1")
    took = time.perf_counter() - began
    peak = _status_bytes("VmHWM") - before
    return {
        "tokens": len(text),
        "distinct_ids": len(np.unique(text)),
        "width_bytes": segment.width,
        "seconds": round(took, 3),
        "tokens_per_s": round(len(text) / took),
        "peak_bytes_per_token": round(peak / len(text), 2),
    }


def build(data: str, vocabulary: int, seed: int, tokens: int) -> dict[str, Any]:
    """Sort the first ``tokens`` tokens of a stream."""
    return _build(flat(completions(data, vocabulary, seed), tokens))


def worst_case_text(name: str, tokens: int, seed: int) -> Tokens:
    """int32[tokens] that a sorter or the ranks may dislike, one sequence."""
    random = np.random.default_rng(seed)
    if name == "one token":
        text = np.full(tokens, 7)
    elif name == "fibonacci":
        one, other = np.array([1]), np.array([1, 0])
        while len(other) < tokens:
            one, other = other, np.concatenate([other, one])
        text = other[:tokens]
    elif name.endswith(" ids"):
        text = random.integers(0, int(name.removesuffix(" ids").replace(",", "")), tokens)
    else:
        text = np.tile(random.integers(0, _IDS, PERIOD), tokens // PERIOD + 1)[:tokens]
        if name == "near-periodic":
            places = random.random(tokens) < _EDITED
            text[places] = random.integers(0, _IDS, int(places.sum()))
    text = text.astype(np.int32)
    text[-1] = -1
    return text


def worst_case(name: str, tokens: int, seed: int) -> dict[str, Any]:
    """Sort such a text."""
    return _build(worst_case_text(name, tokens, seed))


def reopen(directory: str, capacity: int, context: list[int], fingerprint: str) -> dict[str, Any]:
    """Open a cache directory until its first proposal, everything imported. Kernels come from numba's cache on disk."""
    from ssd.config import CacheConfig, DraftConfig, IndexConfig
    from ssd.drafting import DraftRequest, make_drafter
    from ssd.retrieval.cache import CacheSet

    tokens = np.array(context, np.int32)
    config = CacheConfig(index=IndexConfig(capacity_tokens=capacity), directory=Path(directory))
    began = time.perf_counter()
    with CacheSet(config, fingerprint) as caches:
        opened = time.perf_counter()
        drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=10))
        snapshot = caches.get().snapshot()
        draft = drafter.propose([DraftRequest("first", tokens, len(tokens), snapshot, 10)])[0]
        proposed = time.perf_counter()
    if not len(draft.token_ids):
        raise AssertionError("a context that is stored was not drafted from after reopening")
    return {
        "reopen_s": round(proposed - began, 3),
        "open_s": round(opened - began, 3),
        "tokens": snapshot.num_tokens,
    }


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {"build": build, "worst_case": worst_case, "reopen": reopen}

if __name__ == "__main__":
    print(json.dumps(_TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))
