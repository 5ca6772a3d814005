"""How much longer an engine's step takes while a log brings what others learn.

In both halves of a pair the other replicas say as much and Redis takes as much; in one they say it in the namespace
that the engine's process follows, in the other in one that it does not. So the machine is as busy in both, and the
difference is what following costs: the reader's thread beside the one that steps, and a cache that grows.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.overhead import bootstrap
from benchmarks.sharing_latency.replicas import Replicas
from benchmarks.sharing_latency.texts import FINGERPRINT, LOOKED_UP, VOCABULARY
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import load_model, open_target
from ssd.retrieval.cache import CacheSet
from ssd.sharing.redis_log import RedisLog
from ssd.text.codec import TextCodec

_ELSEWHERE = "elsewhere"
_BATCH = 4
_PROMPT_TOKENS = 96
_SETTLE_S = 0.3


def measure(url: str, replicas: int, tokens_per_s: float, num_pairs: int, max_tokens: int) -> dict[str, Any]:
    """Ratios of mean step times, followed over not followed, by the clock and by CPU time of the whole process, which
    others on the machine change less. Raises AssertionError where outputs differ.
    """
    codec = TextCodec.load(str(MODEL_PATH))
    draft = DraftConfig()
    target = open_target(
        load_model(MODEL_PATH, dtype="float32", device="cpu"),
        num_slots=_BATCH,
        max_length=_PROMPT_TOKENS + max_tokens + 8,
        max_draft_tokens=draft.num_speculative_tokens,
    )
    config = EngineConfig(max_num_seqs=_BATCH, enable_prefix_caching=False)
    # Nothing drafts: text that nobody asks about must not change how many steps there are.
    engine = Engine(target, drafter=make_drafter("none", draft), codec=codec, config=config, draft=draft)
    engine.warm_up()
    prompts = [codec.encode_prompt(text)[-_PROMPT_TOKENS:] for text in snippets(0)]
    ratios, by_cpu_time, received, taken = list[float](), list[float](), 0, list[float]()
    with (
        Replicas(url, replicas, tokens_per_s, look_up=False) as others,
        RedisLog(url, fingerprint=FINGERPRINT, vocab_size=VOCABULARY) as log,
        CacheSet(CacheConfig(), FINGERPRINT, namespace=LOOKED_UP, on_open=log.attach) as caches,
    ):
        engine.caches = caches
        for pair in range(num_pairs + 1):
            asked = [prompts[(pair * _BATCH + row) % len(prompts)] for row in range(_BATCH)]
            halves: dict[str, tuple[list[float], list[list[int]], float]] = {}
            for namespace in (LOOKED_UP, _ELSEWHERE)[:: 1 if pair % 2 else -1]:
                others.say(namespace)
                time.sleep(_SETTLE_S)
                before = log.stats().num_received
                halves[namespace] = _run(engine, asked, max_tokens, seed=pair * _BATCH)
                received += (log.stats().num_received - before) * (namespace == LOOKED_UP)
            (followed, said, cpu_s), (alone, other, other_cpu_s) = halves[LOOKED_UP], halves[_ELSEWHERE]
            if said != other or len(followed) != len(alone):
                raise AssertionError(f"pair {pair}: following the log changed an output")
            if pair:  # the first one warms up
                ratios.append(float(np.mean(followed) / np.mean(alone)))
                by_cpu_time.append(cpu_s / other_cpu_s)
                taken += alone
        engine.caches = None
    if not received:
        raise AssertionError("nothing was received while the engine stepped")
    return {
        "replicas": replicas + 1,
        "tokens_per_s": tokens_per_s,
        "pairs": num_pairs,
        "batch": _BATCH,
        "step_ms": round(1e3 * float(np.median(taken)), 3),
        "received": received,
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_95": bootstrap(ratios),
        "ratio_by_cpu_time": round(float(np.median(by_cpu_time)), 4),
        "ratio_by_cpu_time_95": bootstrap(by_cpu_time),
    }


def _run(
    engine: Engine, prompts: list[list[int]], max_tokens: int, *, seed: int
) -> tuple[list[float], list[list[int]], float]:
    """Seconds of each step, what was said, and CPU seconds of all threads."""
    outputs: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        name = f"{time.monotonic_ns()}-{row}"
        outputs[name] = []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed + row, ignore_eos=True)
        engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
    times = []
    cpu_began = time.process_time()
    while engine.has_work():
        began = time.perf_counter()
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
        times.append(time.perf_counter() - began)
    return times, list(outputs.values()), time.process_time() - cpu_began
