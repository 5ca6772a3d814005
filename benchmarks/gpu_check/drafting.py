"""What drafting takes of a step where many rows decode, over an index of a million tokens.

``python -m benchmarks.gpu_check.drafting [MODEL] [--shape tiny|1b|8b] [--rows N] [--index-tokens N] [--out FILE]``

Requests of new text, and then the same requests when they come again. A step's share is what the drafter's calls took
of it, those that are skipped to keep it low among them. Steps in which every row decodes are counted, but for the
first. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np

from benchmarks.run import Option, Run
from benchmarks.steps import Rows, Tokens, at_once, synchronize, watch
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.drafter import SuffixDrafter
from ssd.engine import Engine
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet

_UNTIMED_STEPS = 8
_CALLS = {name: name for name in ("propose", "observe_scores", "learn_scores")}

OPTIONS = {
    "rows": Option(default=64, help="that are drafted for in one step"),
    "index_tokens": Option(default=1_000_000, help="that the index holds"),
    "prompt_tokens": 256,
    "max_tokens": Option(default=96, help="of each request"),
}
COLUMNS = (
    ("traffic", "{traffic}"),
    (">step ms", "{step_ms_p50:.3f}"),
    (">drafter ms", "{drafter_ms_mean:.3f}"),
    (">share", "{share:.2%}"),
)


class _Clock:
    """Seconds of a drafter's calls since they were last taken."""

    def __init__(self, drafter: SuffixDrafter) -> None:
        self._seconds = 0.0
        watch(drafter, _CALLS, self._timed)

    def take(self) -> float:
        taken, self._seconds = self._seconds, 0.0
        return taken

    @contextmanager
    def _timed(self, _: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status, 0."""
    run = Run(
        "drafting", __doc__, argv, OPTIONS, COLUMNS, has_model=True, has_shapes=True, program="gpu_check.drafting"
    )
    args, draft = run.args, DraftConfig()
    _, model = run.load(speaks=True)
    vocab_size, random = model.config.get_text_config().vocab_size, np.random.default_rng(0)
    prompts: list[Tokens] = list(random.integers(3, vocab_size, (args.rows, args.prompt_tokens)).astype(np.int32))
    target = open_target(
        model,
        num_slots=args.rows,
        max_length=args.prompt_tokens + args.max_tokens + 8,
        max_draft_tokens=draft.num_speculative_tokens,
        keeps_top=True,
    )
    drafter = SuffixDrafter()
    clock = _Clock(drafter)
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        namespace = caches.get("default")
        for _ in range(-(-args.index_tokens // 2048)):
            namespace.append(random.integers(3, vocab_size, 2048).astype(np.int32), prompt_length=0)
        caches.flush()
        engine = Engine(target, drafter=drafter, caches=caches, config=at_once(target, prompts), draft=draft)
        engine.warm_up()
        for traffic in ("new", "again"):
            steps, drafting = _timed_steps(engine, clock, prompts, args.max_tokens)
            caches.flush()
            run.row(
                {
                    "traffic": traffic,
                    "step_ms_p50": round(1e3 * median(steps), 4),
                    "drafter_ms_mean": round(1e3 * sum(drafting) / len(drafting), 4),
                    "share": round(sum(drafting) / sum(steps), 4),
                    "steps": len(steps),
                }
            )
    return run.end(rows=run.rows)


def _timed_steps(
    engine: Engine, clock: _Clock, prompts: Sequence[Tokens], num_tokens: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps in which every row decodes, and those of the drafter in each."""
    rows = Rows(engine, prompts, num_tokens)
    steps, drafting = [], []
    while engine.has_work():
        is_full = all(rows.outputs) and engine.metrics.num_running == len(prompts)
        clock.take()
        began = time.perf_counter()
        rows.step()
        synchronize(engine.target.device)
        took = time.perf_counter() - began
        if is_full:
            steps.append(took)
            drafting.append(clock.take())
    kept = min(_UNTIMED_STEPS, len(steps) // 2)
    return steps[kept:], drafting[kept:]


if __name__ == "__main__":
    sys.exit(main())
