"""What drafting takes of a step, for many rows over a large index."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from transformers import PreTrainedModel

from benchmarks.decode.steps import Tokens, at_once, synchronize
from benchmarks.gpu_check.scene import Found, Scene
from ssd.config import CacheConfig, DraftConfig, SamplingParams
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, DraftRequest, ScoredPass
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache import CacheSet

_OUTPUT_TOKENS = 96
_UNTIMED_STEPS = 8


class TimedDrafter(SuffixDrafter):
    """The default drafter; notes the seconds of its calls since they were last taken."""

    seconds = 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Timed."""
        began = time.perf_counter()
        drafts = super().propose(requests)
        self.seconds += time.perf_counter() - began
        return drafts

    def observe_scores(self, scored: ScoredPass) -> None:
        """Timed."""
        began = time.perf_counter()
        super().observe_scores(scored)
        self.seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Since the last time."""
        taken, self.seconds = self.seconds, 0.0
        return taken


def propose(scene: Scene, model: PreTrainedModel) -> Found:
    """Milliseconds and share of a step: of text that is new, and of the same requests when they come again.

    A step's share is what the drafter's calls took of it, those that are skipped to keep it low among them.
    """
    sizes, draft = scene.sizes, DraftConfig()
    num_tokens, length = (_OUTPUT_TOKENS, sizes.context // 4) if scene.device != "cpu" else (16, 16)
    random = np.random.default_rng(0)
    prompts = random.integers(3, model.config.vocab_size, (sizes.propose_rows, length)).astype(np.int32)
    found: Found = {"rows": sizes.propose_rows, "index_tokens": sizes.index_tokens}
    target = open_target(
        model,
        num_slots=sizes.propose_rows,
        max_length=length + num_tokens + 8,
        max_draft_tokens=draft.num_speculative_tokens,
        keeps_top=True,
    )
    drafter = TimedDrafter()
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        _fill(caches, model.config.vocab_size, sizes.index_tokens)
        engine = Engine(target, drafter=drafter, caches=caches, config=at_once(target, list(prompts)), draft=draft)
        engine.warm_up()
        for traffic in ("new", "again"):
            steps, drafting = _steps(engine, drafter, list(prompts), num_tokens, traffic)
            caches.flush()
            found[traffic] = {
                "step_ms_p50": round(1e3 * median(steps), 4),
                "drafter_ms_mean": round(1e3 * sum(drafting) / len(drafting), 4),
                "share": round(sum(drafting) / sum(steps), 4),
                "steps": len(steps),
            }
            print(
                f"  drafting for {sizes.propose_rows} rows, {traffic}: {found[traffic]['drafter_ms_mean']} ms of "
                f"{found[traffic]['step_ms_p50']}, {found[traffic]['share']:.2%} of all steps",
                flush=True,
            )
    return found


def _fill(caches: CacheSet, vocab_size: int, num_tokens: int) -> None:
    random, namespace = np.random.default_rng(1), caches.get("default")
    for _ in range(-(-num_tokens // 2048)):
        namespace.append(random.integers(3, vocab_size, 2048).astype(np.int32), prompt_length=0)
    caches.flush()


def _steps(
    engine: Engine,
    drafter: TimedDrafter,
    prompts: Sequence[Tokens],
    num_tokens: int,
    name: str,
) -> tuple[list[float], list[float]]:
    """Seconds of steps in which every row decodes, and those of the drafter in each."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for row, prompt in enumerate(prompts):
        engine.submit(Request(request_id=f"{name}-{row}", prompt_token_ids=tuple(prompt.tolist()), sampling=sampling))
    has_begun: set[str] = set()
    steps, drafting = [], []
    while engine.has_work():
        is_full = len(has_begun) == len(prompts) == engine.metrics.num_running
        drafter.take_seconds()
        began = time.perf_counter()
        outputs = engine.step()
        synchronize(engine.target.device)
        took = time.perf_counter() - began
        has_begun |= {output.request_id for output in outputs if output.token_ids}
        if is_full:
            steps.append(took)
            drafting.append(drafter.take_seconds())
    kept = min(_UNTIMED_STEPS, len(steps) // 2)
    return steps[kept:], drafting[kept:]
