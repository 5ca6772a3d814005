"""The table of sources, of a result that is easy to read."""

from __future__ import annotations

from typing import Any

from benchmarks.report.sources import sources_section


def result(model: str) -> dict[str, Any]:
    def row(source: str, over: float) -> dict[str, Any]:
        spread = [over, over - 0.1, over + 0.1]
        return {
            "source": source, "tokens_per_pass": [1.5, 1.4, 1.6], "over_off": spread, "over_off_by_cpu_time": spread,
            "drafted_per_pass": [3.25, 3.0, 3.5],
        }  # fmt: skip

    run = {
        "sampling": "sampled", "compared_tokens": 4000, "ties": 1, "mismatches": 0,
        "rows": [row("off", 1.0), row("retrieval", 1.2), row("all together", 1.3)],
        "all_over_best": {"best": "retrieval", "ratio": [1.08, 1, 1.1], "ratio_by_cpu_time": [1.07, 1, 1.1]},
    }  # fmt: skip
    return {
        "model": model, "date": "2026-11-22", "dtype": "torch.float32", "environment": {"cpu": "A CPU", "cores": 2},
        "parameters": {
            "requests": 16, "rounds": 3, "prompt_tokens": 320, "max_tokens": 64, "temperature": 0.7, "top_p": 0.9
        },
        "runs": [run],
    }  # fmt: skip


def test_each_source_has_a_row_and_each_model_a_table() -> None:
    text = sources_section([result("bundled model"), result("Another")])
    assert text.count("| sampled | retrieval | 1.50 | 1.20x (1.10 ... 1.30) | 1.20x (1.10 ... 1.30) | 3.2 |") == 2
    assert "| off |" not in text
    assert "over the best alone: sampled 1.08x retrieval, 1.07x by CPU time. 4,000 tokens compared" in text
    assert "bundled model" in text and "Another" in text
