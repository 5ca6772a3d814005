"""SSD: LLM inference that gets faster the more it is used and never changes a token of the output.

``import ssd`` loads neither torch nor the web framework; ``LLM`` and ``Engine`` are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssd.config import CacheConfig, DraftConfig, EngineConfig, IndexConfig, SamplingParams, StructuredOutput
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.engine import Engine, Request, RequestOutput
    from ssd.engine.llm import LLM, Completion

    __version__: str

__all__ = [
    "LLM",
    "CacheConfig",
    "Completion",
    "DraftConfig",
    "Engine",
    "EngineConfig",
    "IndexConfig",
    "Request",
    "RequestOutput",
    "SSDError",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_FROM_ENGINE = {"Engine", "Request", "RequestOutput"}
_FROM_LLM = {"LLM", "Completion"}


def __getattr__(name: str) -> Any:
    if name in _FROM_ENGINE:
        import ssd.engine

        return getattr(ssd.engine, name)
    if name in _FROM_LLM:
        import ssd.engine.llm

        return getattr(ssd.engine.llm, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("ssd-serving")
    raise AttributeError(f"module 'ssd' has no attribute {name!r}")
