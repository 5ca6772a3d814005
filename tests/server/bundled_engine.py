"""The bundled model, as tests of the service have it loaded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig, IndexConfig
from ssd.engine import Engine
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec


def load_bundled(
    resources: ExitStack, *, dtype: str = "float32", index: IndexConfig | None = None, **config: Any
) -> Engine:
    """With a cache, on the CPU; else four slots of 512 tokens. What is to be closed goes to ``resources``."""
    codec = TextCodec.load(str(MODEL_PATH))
    caches = CacheManager(CacheConfig(index=index or IndexConfig()), codec.fingerprint)
    resources.callback(caches.close)
    settings = EngineConfig(**{"max_num_seqs": 4, "max_model_len": 512, **config})
    return Engine.from_pretrained(MODEL_PATH, device="cpu", dtype=dtype, codec=codec, caches=caches, config=settings)


def load_plain(_resources: ExitStack, **config: Any) -> Engine:
    """Three slots of 256 tokens, nothing drafted."""
    settings = EngineConfig(**{"max_num_seqs": 3, "max_model_len": 256, **config})
    draft = DraftConfig(num_speculative_tokens=0)
    return Engine.from_pretrained(MODEL_PATH, device="cpu", dtype="float32", config=settings, draft=draft)
