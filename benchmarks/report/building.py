"""What it takes to build a cache: a line a format and number of processes."""

from __future__ import annotations

from typing import Any

_KINDS = {
    "npy": "token ids, `.npy`",
    "parquet": "token ids, `.parquet`",
    "jsonl": "token ids, `.jsonl`",
    "text": "text, `.jsonl`, tokenised",
}


def building_section(result: dict[str, Any]) -> str:
    """Rates end to end, from the start of the process to the directory."""
    lines = [
        "| input | processes | tokens | seconds | tokens/s | tokens/s a core | peak, bytes a token |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {_KINDS[row['kind']]} | {row['jobs']} | {row['tokens']:,} | {row['seconds']:,.0f} | "
        f"{row['tokens_per_s']:,} | {row['tokens_per_core_s']:,} | {row['peak_bytes_per_token']:.1f} |"
        for row in result["rows"]
    ]
    checked = sum(row["lookups_checked"] for row in result["rows"])
    where = result["environment"]
    lines += [
        "",
        f"`python -m benchmarks.building` on {result['date']}, {where['cpu']}, {where['cores']} cores: from the start "
        "of the command to the finished directory; a core's rate by processor time; the peak of the process with the "
        "most private memory, less what a build of a few tokens takes, over its largest segment. "
        f"{checked} lookups were compared with a slow count.",
    ]
    return "\n".join(lines)
