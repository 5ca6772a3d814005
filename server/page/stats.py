"""What the charts of the page are drawn from: the counters of /metrics, as JSON."""

from __future__ import annotations

import time
from typing import Any

from server.base.settings import ServerSettings
from server.running.engine_thread import Worker
from server.tenants.account import Account
from server.tenants.registry import Tenants


def page_stats(worker: Worker, settings: ServerSettings, tenants: Tenants, account: Account | None) -> dict[str, Any]:
    """Counters that only grow, but for what runs and waits and the sizes of caches; without an engine the state alone.

    ``account`` : who asks. A tenant sees the sizes of its own cache alone, the operator all of them, as metrics do.
    "time_s" is of a clock that never goes back, to divide differences by; "since_s" is the age of the service, "pass_s"
    the mean time between two passes of a request. O(sources + segments of all namespaces).
    """
    found: dict[str, Any] = {
        "state": worker.state.value, "model": settings.model_name, "time_s": time.monotonic(), "namespaces": {},
    }  # fmt: skip
    engine = worker.loaded_engine
    if engine is None:
        return found
    counts = engine.metrics
    waited = counts.histograms.inter_token
    found |= {
        "since_s": max(0.0, time.time() - settings.created),
        "pass_s": waited.total / num_waits if (num_waits := sum(waited.counts)) else None,
        "has_chat": engine.codec is not None and engine.codec.chat_template() is not None,
        "max_model_len": engine.max_model_len,
        "is_drafting": engine.is_drafting,
        "running": counts.num_running,
        "waiting": counts.num_waiting,
        "tokens": counts.generation_tokens,
        "passes": counts.num_verify_steps,
        "drafted": counts.num_draft_tokens,
        "accepted": counts.num_accepted_tokens,
        "sources": {
            source: {"drafted": each.num_draft_tokens, "accepted": each.num_accepted_tokens}
            for source, each in dict(counts.by_source).items()
        },
    }
    if engine.caches is not None:
        labels = tenants.labels()
        own = None
        if account is not None and not account.tenant.is_operator:
            own = tenants.cache_use(account, settings.namespace, None).namespace
        found["namespaces"] = {
            labels.get(name, name): {
                "tail": cache.num_tail_tokens,
                "segments": cache.num_tokens - cache.num_tail_tokens - cache.num_kept_tokens,
                "kept": cache.num_kept_tokens,
                "warm": cache.num_static_tokens,
            }
            for name, cache in engine.caches.stats().items()
            if own is None or name == own
        }
    return found
