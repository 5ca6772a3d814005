"""Engines over tiny models, what they are asked, and by whom they are told what to draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from ssd.config import DraftConfig, DraftShape, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests.models import VOCAB, tiny_model

EOS, ROOT, FINGERPRINT = 2, b"of all", "0" * 32
_OF_REQUESTS = {each.name for each in fields(Request)}


@cache
def target_of(name: str = "Llama", **changes: Any) -> Any:
    """A target of a tiny model, opened once and exact. ``changes`` : to what it is opened with."""
    usual = {"num_slots": 4, "max_length": 96, "max_draft_tokens": 8, "batch_invariant": "on"}
    return open_target(tiny_model(name), **{**usual, **changes})


def make_engine(
    drafter: Drafter | str = "ssd",
    target: Target | None = None,
    *,
    limit: int = 4,
    shape: DraftShape = "auto",
    caches: CacheManager | None = None,
    codec: TextCodec | None = None,
    eos: Sequence[int] = (EOS,),
    root: Callable[[], bytes] = lambda: ROOT,
    draw_seed: Callable[[], int] | None = None,
    is_asynchronous: bool = False,
    **config: Any,
) -> Engine:
    """A fresh one, over a target whose slots are emptied.

    ``limit`` : tokens of a draft. ``eos`` : where there is no codec. ``config`` : of the engine, whose requests without
    a seed share a stream of noise that is always the same.
    """
    target = target or target_of()
    target.is_asynchronous = is_asynchronous
    for slot in range(target.num_slots):
        target.rollback(slot, 0)
    draft = DraftConfig(num_speculative_tokens=limit, draft_shape=shape)
    return Engine(
        target,
        drafter=make_drafter(drafter, draft) if isinstance(drafter, str) else drafter,
        codec=codec,
        caches=caches,
        config=EngineConfig(**{"coupled_streams": 1, "coupled_window": 2, **config}),
        draft=draft,
        eos_token_ids=None if codec else eos,
        noise_root=root,
        draw_seed=draw_seed,
    )


def ask(name: str, prompt: Sequence[int], sampling: SamplingParams | None = None, **more: Any) -> Request:
    """A request, of twelve tokens and greedy where nothing is said. ``more`` : its fields, or those of its sampling."""
    own = {field: more.pop(field) for field in _OF_REQUESTS & more.keys()}
    sampling = sampling or SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **more})
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **own)


def prompt_of(seed: int, length: int = 9) -> tuple[int, ...]:
    """Random tokens, the same for a seed."""
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())
