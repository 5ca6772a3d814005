"""How the drafts of one answer fared, in vLLM's field ``metrics.speculative_decoding``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd.engine import RequestStats


def draft_counts(stats: RequestStats | None, *, is_detailed: bool) -> dict[str, Any] | None:
    """Counts over the passes that had a draft; None where nothing was kept. O(passes).

    ``is_detailed`` : also of each draft, in order, how long it was and how much was accepted.
    """
    if stats is None or stats.steps is None:
        return None
    drafted = [length for length, _ in stats.steps]
    accepted = [length for _, length in stats.steps]
    histogram = [0] * (max(accepted, default=0) + 1)
    for length in accepted:
        histogram[length] += 1
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else None,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if drafted else None,
        "acceptance_histogram": histogram if accepted else [],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
    }
    if is_detailed:
        found |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return found
