"""The line of log that every finished request leaves at level DEBUG: where its tokens came from, in counts alone."""

from __future__ import annotations

import logging

from ssd.engine.request import FinishReason, Request, RequestStats

log = logging.getLogger("ssd.engine")


def log_finished(request: Request, stats: RequestStats, reason: FinishReason | None) -> None:
    """Write the line where somebody reads it. No text and no token of the request is in it."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    sources = ",".join(f"{source}:{accepted}" for source, accepted in sorted(stats.accepted_by_source.items()))
    log.debug(
        "finished request=%s namespace=%s reason=%s prompt=%d cached=%d output=%d steps=%d drafted=%d accepted=%d "
        "from=%s",
        request.request_id,
        request.namespace or "-",
        reason,
        stats.num_prompt_tokens,
        stats.num_cached_tokens,
        stats.num_output_tokens,
        stats.num_verify_steps,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        sources or "-",
    )
