"""The drafter's kernels, compiled once and kept on disk: a bare machine has none."""

from __future__ import annotations

import time

from benchmarks.gpu_check.scene import Found, Keep, Scene
from ssd.config import CacheConfig, DraftConfig, EngineConfig
from ssd.engine import Engine
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec


def kernels(scene: Scene, keep: Keep) -> Found:
    """Warm an engine up on the CPU: it compiles all that a first request could wait for."""
    began = time.perf_counter()
    codec = TextCodec.load(scene.model)
    with CacheSet(CacheConfig(), codec.fingerprint, inline=True) as caches:
        engine = Engine.from_pretrained(
            scene.model,
            device="cpu",
            caches=caches,
            codec=codec,
            config=EngineConfig(max_num_seqs=2, max_model_len=128),
            draft=DraftConfig(num_speculative_tokens=8),
        )
        engine.warm_up()
        list(engine.generate([[5, 6, 7, 8] * 8] * 2))
        caches.flush()
        list(engine.generate([[5, 6, 7, 8] * 8] * 2))
    return {"passed": True, "compiled_s": round(time.perf_counter() - began, 1)}
