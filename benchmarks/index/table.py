"""The figures of a run for people."""

from __future__ import annotations

from typing import Any

_ROWS = (
    ("bytes a token, at rest", "bytes_per_token", ".2f"),
    ("bytes a token, peak of ingest", "peak_bytes_per_token", ".2f"),
    ("bytes a token, peak of one sort", "bulk_peak_bytes_per_token", ".2f"),
    ("one sort, tokens/s", "build_tokens_per_s", ",.0f"),
    ("ingest, tokens/s", "ingest_tokens_per_s", ",.0f"),
    ("propose, us p50", "propose_us_p50", ".1f"),
    ("propose, us p99", "propose_us_p99", ".1f"),
    ("propose 64 rows, us p50", "propose64_us_p50", ".1f"),
    ("64 rows over 1 row", "propose64_over_propose", ".1f"),
    ("propose while merging, us p99", "propose_us_p99_merging", ".1f"),
    ("propose between merges, us p99", "propose_us_p99_not_merging", ".1f"),
    ("freshness, ms p99", "freshness_ms_p99", ".2f"),
    ("maintenance, share of a core", "maintenance_core_share", ".3f"),
    ("stall of a thread, ms max", "stall_ms_max", ".2f"),
    ("the same without traffic", "stall_ms_max_no_traffic", ".2f"),
    ("reopen, s", "reopen_s", ".3f"),
)


def table(result: dict[str, Any]) -> str:
    """One line a figure, then one line a peer and one a worst case where there are any."""
    lines = [f"{'figure':<34} {'value':>14}"]
    lines += [f"{label:<34} {_format(result[key], form):>14}" for label, key, form in _ROWS]
    if result["peers"]:
        lines.append(f"\n{'peer':<20} {'B/token':>9} {'present us':>11} {'gain':>7} {'broken us':>10} {'gain':>7}")
        lines += [_peer(name, figures) for name, figures in result["peers"].items()]
    if result.get("worst_cases"):
        lines.append(f"\n{'worst case':<20} {'width':>6} {'seconds':>9} {'peak B/token':>13}")
        lines += [
            f"{name:<20} {f['width_bytes']:>6} {f['seconds']:>9.2f} {f['peak_bytes_per_token']:>13.1f}"
            for name, f in result["worst_cases"].items()
        ]
    return "\n".join(lines)


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _peer(name: str, figures: dict[str, Any]) -> str:
    if "unavailable" in figures:
        return f"{name:<20} {figures['unavailable']}"
    return (
        f"{name:<20} {_format(figures.get('bytes_per_token'), '.1f'):>9} "
        f"{figures['propose_us_present_p50']:>11.1f} {figures['propose_present_times_ours']:>7.2f} "
        f"{figures['propose_us_broken_p50']:>10.1f} {figures['propose_broken_times_ours']:>7.2f}"
    )
