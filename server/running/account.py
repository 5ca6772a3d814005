"""What a generation came to, added up over its choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.base.record import Record

if TYPE_CHECKING:
    from ssd.engine import Request as EngineRequest
    from ssd.engine import RequestStats


def note_submitted(record: Record, request: EngineRequest, num_choices: int) -> None:
    """What was asked of the engine; ``request`` : that of the first choice."""
    record.sampling = request.sampling
    record.namespace = request.namespace
    record.num_choices = num_choices


def note_counts(
    record: Record,
    choices: Sequence[tuple[RequestStats | None, str | None]],
    *,
    num_prompt_tokens: int,
    num_cached_tokens: int,
) -> None:
    """The counts so far; of each choice the engine's statistics, None before its first output, and the finish reason.

    O(choices).
    """
    known = [stats for stats, _ in choices if stats is not None]
    record.finish_reasons = tuple(reason for _, reason in choices if reason is not None)
    record.num_prompt_tokens = num_prompt_tokens
    record.num_cached_tokens = num_cached_tokens
    record.num_output_tokens = sum(stats.num_output_tokens for stats in known)
    record.num_steps = sum(stats.num_verify_steps for stats in known)
    record.num_draft_tokens = sum(stats.num_draft_tokens for stats in known)
    record.num_accepted_tokens = sum(stats.num_accepted_tokens for stats in known)
    by_source: dict[str, int] = {}
    for stats in known:
        for source, accepted in stats.accepted_by_source.copy().items():  # the engine's thread may be adding
            by_source[source] = by_source.get(source, 0) + accepted
    record.accepted_by_source = by_source
    record.is_coupled = any(stats.is_coupled for stats in known)
    record.submitted_s = min((stats.submitted_s for stats in known), default=0.0)
    record.started_s = min((stats.started_s for stats in known if stats.started_s), default=0.0)
    record.first_token_s = min((stats.first_token_s for stats in known if stats.first_token_s), default=0.0)
    record.last_token_s = max((stats.last_token_s for stats in known), default=0.0)
