"""Plain counters of an engine; the server exports them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssd.engine.histograms import EngineHistograms
from ssd.engine.request import RequestStats


@dataclass(slots=True)
class SourceCounts:
    """Drafted and emitted tokens of one source of drafts."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class EngineMetrics:
    """Written by the thread that steps the engine, read by any; every count only grows, except the last three.

    ``num_drafts`` counts drafts that were not empty. ``num_accepted_tokens`` and ``accepted_per_position`` count
    draft tokens that were emitted; entry i is token i of the draft, or of a tree's path.
    """

    num_verify_steps: int = 0
    """Rows verified: one per running sequence and forward pass, with or without a draft."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    """By ``Draft.source``."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafter_failures: int = 0
    """Times the drafter or the cache failed and the step went on without."""
    prefix_cache_queries: int = 0
    """Prompt tokens of requests that may use what was computed for others, counted once the prompt is computed."""
    prefix_cache_hits: int = 0
    """How many of them did not have to be computed."""
    num_preemptions: int = 0
    """Times a running sequence made room for a more urgent one."""
    num_failed_passes: int = 0
    """Forward passes that failed; the requests in them were computed again, each alone."""
    integrity_violations: int = 0
    """What ``Engine.check`` found while the engine was idle; 0 unless this program has a fault."""
    num_requests_finished: dict[str, int] = field(default_factory=dict)
    """By finish reason."""
    num_coupled_requests: int = 0
    """How many of them were drawn with noise that others share."""
    histograms: EngineHistograms = field(default_factory=EngineHistograms)

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV cache's positions in use, 0..1."""

    def count_draft(self, num_draft_tokens: int, num_accepted: int, source: str) -> None:
        """One verified row: how many tokens were drafted for it, how many of those were emitted, and by whom."""
        self.num_verify_steps += 1
        if num_draft_tokens:
            self.num_drafts += 1
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted
            counts = self.by_source.setdefault(source, SourceCounts())
            counts.num_draft_tokens += num_draft_tokens
            counts.num_accepted_tokens += num_accepted
            missing = num_accepted - len(self.accepted_per_position)
            self.accepted_per_position.extend([0] * missing)
            for position in range(num_accepted):
                self.accepted_per_position[position] += 1

    def count_prompt(self, stats: RequestStats, *, queried: bool) -> None:
        """One prompt that has been computed; ``queried`` : where reuse was possible."""
        self.prompt_tokens += stats.num_prompt_tokens
        if queried:
            self.prefix_cache_queries += stats.num_prompt_tokens
            self.prefix_cache_hits += stats.num_cached_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens per verify step, steps without a draft included."""
        return self.generation_tokens / self.num_verify_steps if self.num_verify_steps else 0.0
