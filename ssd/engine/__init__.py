"""The inference engine: it schedules requests, runs forward passes with speculative decoding, and returns outputs."""

from ssd.engine.engine import Engine
from ssd.engine.metrics import EngineMetrics
from ssd.engine.request import FinishReason, Request, RequestOutput, RequestStats, VerifiedDraft
from ssd.model.sampling.sampler import TokenLogprobs

__all__ = [
    "Engine",
    "EngineMetrics",
    "FinishReason",
    "Request",
    "RequestOutput",
    "RequestStats",
    "TokenLogprobs",
    "VerifiedDraft",
]
