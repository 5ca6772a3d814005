"""SSD: LLM inference that gets faster the more it is used and never changes a token of the output.

``import ssd`` loads neither torch nor the web framework; each submodule is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssd.config import CacheConfig, DraftConfig, EngineConfig, IndexConfig, SamplingParams, StructuredOutput
from ssd.errors import RequestError, SSDError

if TYPE_CHECKING:
    from ssd.engine import Engine, Request, RequestOutput
    from ssd.engine.llm import LLM, Choice, Completion
    from ssd.integrations.retrieval_cache import RetrievalCache
    from ssd.retrieval.cache_manager import CacheManager
    from ssd.text.codec import TextCodec

    __version__: str

__all__ = [
    "LLM",
    "CacheConfig",
    "CacheManager",
    "Choice",
    "Completion",
    "DraftConfig",
    "Engine",
    "EngineConfig",
    "IndexConfig",
    "Request",
    "RequestError",
    "RequestOutput",
    "RetrievalCache",
    "SSDError",
    "SamplingParams",
    "StructuredOutput",
    "TextCodec",
    "__version__",
]

_FROM = {
    **dict.fromkeys(("Engine", "Request", "RequestOutput"), "ssd.engine"),
    **dict.fromkeys(("LLM", "Choice", "Completion"), "ssd.engine.llm"),
    "CacheManager": "ssd.retrieval.cache_manager",
    "RetrievalCache": "ssd.integrations.retrieval_cache",
    "TextCodec": "ssd.text.codec",
}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(_FROM[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("ssd-serving")
    raise AttributeError(f"module 'ssd' has no attribute {name!r}")
