"""What choosing sampled tokens takes on a CPU, compiled and by torch's operations.

``python -m benchmarks.sampling``

Logits as language models give them, Zipf's law with a random exponent and noise, for 1 to 65 positions and vocabularies
of 2,048 to 262,144 tokens. "torch" is what runs on a GPU, on this CPU: scores are cut by its operations, and the noise
of every token is added to them. One thread, and its time on the processor; tokens are compared.

Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.environment import head
from ssd.config import SamplingParams
from ssd.model.sampling.sampler import device_argmax, host_tokens
from ssd.model.sampling.target_tokens import truncated_scores

VOCABULARIES = (2048, 32_768, 131_072, 262_144)
POSITIONS = (1, 16, 65)
KINDS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top-k 50": SamplingParams(temperature=0.7, top_k=50),
    "min-p 0.05": SamplingParams(temperature=0.7, min_p=0.05),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a token differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--most-tokens", type=int, default=VOCABULARIES[-1], help="(default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # as many as the compiled code has
    print(f"{'kind':>20} {'vocabulary':>10} {'positions':>9} {'torch us':>9} {'compiled us':>11} {'ratio':>6}")
    rows = []
    for vocab_size in (each for each in VOCABULARIES if each <= args.most_tokens):
        for positions in POSITIONS:
            logits, keys = problem(vocab_size, positions)
            for kind, params in KINDS.items():
                row: dict[str, Any] = {"kind": kind, "vocabulary": vocab_size, "positions": positions}
                row |= measure(logits, keys, params, args.rounds)
                rows.append(row)
                print(
                    f"{kind:>20} {vocab_size:>10} {positions:>9} {row['torch_us']:>9} {row['compiled_us']:>11} "
                    f"{row['ratio']:>6}",
                    flush=True,
                )
    differing = sum(row["differing"] for row in rows)
    facts = {**head("sampling"), "threads": torch.get_num_threads(), "rounds": args.rounds}
    print(json.dumps({**facts, "differing": differing, "rows": rows}))
    return int(differing > 0)


def problem(vocab_size: int, positions: int) -> tuple[torch.Tensor, npt.NDArray[np.uint64]]:
    """Logits, float32[positions, V], and keys."""
    random = np.random.default_rng(0)
    ranked = -np.log(np.arange(1, vocab_size + 1)) * random.uniform(0.8, 2.8, (positions, 1))
    logits = random.permuted(ranked + random.normal(0, 1, (positions, vocab_size)), axis=1)
    return torch.from_numpy(logits.astype(np.float32)), random.integers(0, 2**64, positions, np.uint64)


@torch.inference_mode()
def measure(logits: torch.Tensor, keys: npt.NDArray[np.uint64], params: SamplingParams, rounds: int) -> dict[str, Any]:
    """Microseconds a position both ways, medians of rounds by turns; and how many tokens differ."""
    positions = len(logits)
    bits = torch.from_numpy(keys.view(np.int64))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: device_argmax(truncated_scores(logits, [params] * positions), bits, None),
        lambda: host_tokens(logits[None], [0], [positions], [params], keys),
    )
    differing = int((calls[0]().numpy() != calls[1]()).sum())
    seconds: tuple[list[float], ...] = ([], [])
    for _ in range(rounds):
        for call, found in zip(calls, seconds, strict=True):
            began = time.thread_time()
            call()
            found.append(time.thread_time() - began)
    before, after = (median(found) / positions * 1e6 for found in seconds)
    return {
        "torch_us": round(before, 1),
        "compiled_us": round(after, 1),
        "ratio": round(before / after, 1),
        "differing": differing,
    }


if __name__ == "__main__":
    sys.exit(main())
