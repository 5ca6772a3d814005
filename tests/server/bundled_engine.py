"""The bundled model with a cache, as tests of the service have it loaded."""

from __future__ import annotations

from contextlib import ExitStack

from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, EngineConfig
from ssd.engine import Engine
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec


def load_bundled(resources: ExitStack) -> Engine:
    """Four slots of 512 tokens, float32, on the CPU; what is to be closed goes to ``resources``."""
    codec = TextCodec.load(str(MODEL_PATH))
    caches = CacheSet(CacheConfig(), codec.fingerprint)
    resources.callback(caches.close)
    config = EngineConfig(max_num_seqs=4, max_model_len=512)
    return Engine.from_pretrained(MODEL_PATH, device="cpu", dtype="float32", codec=codec, caches=caches, config=config)
