"""One cache directory used by our engine and by vLLM in turn: what one learned, the other drafts from."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm.client import VllmEngine
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, SamplingParams
from ssd.engine import Engine
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Tokens per verify step, each over the same requests."""

    num_requests: int
    vllm_empty: float
    vllm_after_ours: float
    ours_empty: float
    ours_after_vllm: float
    num_mismatches: int
    """Outputs of vLLM that depended on what was in the directory."""

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def hand_over(codec: TextCodec, prompts: Prompts, max_tokens: int, max_model_len: int) -> Handover:
    """Both engines on a directory that is empty, then each on the one that the other has filled."""
    with tempfile.TemporaryDirectory(prefix="ssd-handover-") as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        ours_empty = _our_engine(codec, ours, prompts, max_tokens)
        vllm_empty, plain = _vllm(theirs, prompts, max_tokens, max_model_len)
        ours_after_vllm = _our_engine(codec, theirs, prompts, max_tokens)
        vllm_after_ours, warm = _vllm(ours, prompts, max_tokens, max_model_len)
    return Handover(
        num_requests=len(prompts),
        vllm_empty=vllm_empty,
        vllm_after_ours=vllm_after_ours,
        ours_empty=ours_empty,
        ours_after_vllm=ours_after_vllm,
        num_mismatches=sum(a != b for a, b in zip(plain, warm, strict=True)),
    )


def _our_engine(codec: TextCodec, directory: Path, prompts: Prompts, max_tokens: int) -> float:
    with CacheSet(CacheConfig(directory=directory), codec.fingerprint) as caches:
        engine = Engine.from_pretrained(MODEL_PATH, dtype="float32", device="cpu", caches=caches, codec=codec)
        engine.warm_up()
        for prompt in prompts:  # one after the other, as vLLM does it here
            for _ in engine.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0)):
                pass
        return engine.metrics.mean_acceptance_length


def _vllm(directory: Path, prompts: Prompts, max_tokens: int, max_model_len: int) -> tuple[float, list[list[int]]]:
    settings = {"SSD_CACHE_DIR": str(directory)}
    with VllmEngine(MODEL_PATH, "ssd", batch=1, max_model_len=max_model_len, settings=settings) as engine:
        outputs, _, counters = engine.complete(prompts, max_tokens)
        return 1 + counters["num_accepted_tokens"] / counters["num_row_steps"], outputs
