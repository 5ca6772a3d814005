"""What a server that is ready says of itself, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.base.settings import ServerSettings
from server.command.arguments import Options
from server.command.sizes import spelled
from ssd.sharing.connection import address_of
from ssd.sharing.noise_root import NoiseRoot

if TYPE_CHECKING:
    from ssd.engine import Engine


def summary_of(
    engine: Engine, options: Options, settings: ServerSettings, num_tenants: int, noise_root: NoiseRoot | None
) -> str:
    """Model, device, slots, noise, cache, store and tenants, as ``name=value`` words."""
    target = engine.target
    facts: dict[str, object] = {
        "model": settings.model,
        "adapters": len(settings.adapters) or "none",
        "class": type(target.model).__name__,
        "way": target.way.replace(" ", "-"),
        "device": target.device,
        "dtype": str(target.dtype).removeprefix("torch."),
        "slots": target.num_slots,
        "context": engine.max_model_len,
        "coupled_streams": engine.config.coupled_streams or "none",
        **({} if noise_root is None else {"noise": noise_root.source}),
        **_drafting(engine, options),
        "tenants": num_tenants or "none",
    }
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _drafting(engine: Engine, options: Options) -> dict[str, object]:
    draft, cache = options.speculation, options.cache.config
    if engine.caches is None or not engine.target.can_roll_back:
        return {"drafts": "none"}
    return {
        "drafts": draft.draft.num_speculative_tokens,
        "draft_model": draft.draft_model or "none",
        "draft_head": draft.draft_head or "none",
        "namespace": options.cache.namespace,
        "cache_tokens": spelled(cache.index.capacity_tokens),
        "cached": engine.caches.get().stats().num_tokens,
        "warm": len(options.cache.warm_directories) or "none",
        "cache_dir": cache.directory or "none",
        "redis": "none" if cache.redis_url is None else address_of(cache.redis_url),
    }
