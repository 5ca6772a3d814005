"""A plan on paper for caches larger than the machine that figures were measured on."""

from __future__ import annotations

from typing import Any, Final

SIZES: Final = (10**9, 10**11)

_SEGMENT_TOKENS: Final = 1 << 24
_CORES: Final = 16
"""Of a machine."""

_CORE_HOUR: Final = 0.05
"""US dollars, as clouds ask for one of a machine with 4 GB for each core; an assumption."""

_DISK_MONTH: Final = 0.08
"""US dollars for 10^9 bytes of network SSD; an assumption."""


def plan_section(index: dict[str, Any], building: dict[str, Any] | None) -> str:
    """Machines, hours, memory, disk and cost, from the rates of one core."""
    sort_rate = float(index["build_tokens_per_s"])
    memory, at_rest = float(index["bulk_peak_bytes_per_token"]), float(index["segment_bytes_per_token"])
    rates = {"token ids": sort_rate}
    source = "`python -m benchmarks.index` (sorting and writing alone)"
    if building is not None:
        by_kind = {row["kind"]: row for row in building["rows"] if row["jobs"] == 1}
        if "npy" in by_kind:
            rates["token ids"] = float(by_kind["npy"]["tokens_per_core_s"])
            memory = max(memory, float(by_kind["npy"]["peak_bytes_per_token"]))
        if "text" in by_kind:
            rates["text"] = float(by_kind["text"]["tokens_per_core_s"])
        source = "`python -m benchmarks.building` (end to end)"
    per_segment_us = float(index["propose_us_p50"]) / float(index["segments"])
    lines = [
        "| tokens | from | core hours | machines | hours | memory each | disk | once | a month |",
        "|--:|---|" + "--:|" * 7,
    ]
    for size in SIZES:
        disk_gb = at_rest * size / 1e9
        machines = max(1, size // 10**10)
        for kind, rate in rates.items():
            core_hours = size / rate / 3600
            lines.append(
                f"| {size:.0e} | {kind} | {core_hours:,.2f} | {machines} | {core_hours / machines / _CORES:,.3f} "
                f"| {_CORES * memory * _SEGMENT_TOKENS / 1e9:.1f} GB | {disk_gb:,.0f} GB | "
                f"${core_hours * _CORE_HOUR:,.2f} "
                f"| ${disk_gb * _DISK_MONTH:,.2f} |"
            )
    num_segments = SIZES[-1] // _SEGMENT_TOKENS
    lines += [
        "",
        f"Rates: {source}, {', '.join(f'{rate:,.0f} tokens/s a core from {kind}' for kind, rate in rates.items())}; "
        f"{at_rest:.2f} bytes a token at rest, {memory:.1f} while a segment of {_SEGMENT_TOKENS / 1e6:.1f} M tokens is "
        f"sorted, one on each of a machine's {_CORES} cores. Segments are independent, so machines share "
        "nothing but the "
        "manifest at the end; reading the corpus is not counted. Assumed: "
        f"${_CORE_HOUR:.2f} a core hour, ${_DISK_MONTH:.2f} a month for a GB of SSD. A lookup asks every segment "
        f"({per_segment_us:.1f} us each on {index['segments']} of them): {SIZES[0] // _SEGMENT_TOKENS} "
        "segments are fine, "
        f"{num_segments:,} would take {num_segments * per_segment_us / 1000:.0f} ms. So 10^11 tokens are to "
        "be built as "
        "segments of the most there may be (2^29 tokens, 32 times as much memory while sorted) or, better, as a "
        "namespace for each domain, tenant or language that asks only its own.",
    ]
    return "\n".join(lines)
