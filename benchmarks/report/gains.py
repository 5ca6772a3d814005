"""The one table of the README: where speculation gains, where it does not, and beside others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report.replay import speed_ups

_STREAMS = {"mixed": "requests of which some recur", "no repeats": "requests that never recur"}


_COUPLED_STREAMS = 4


def gains_section(
    growth: dict[str, Any],
    coupled: dict[str, Any],
    overhead: dict[str, Any],
    vllm: dict[str, Any],
    curve: dict[str, Any],
    others: Sequence[dict[str, Any]],
) -> str:
    """A line a question, each with one ratio; above 1 is good for us.

    others : replays beside all drafters, as paths and as trees; none where they are not there.
    """
    again = growth["repeated_requests"]
    lines = ["| what | against | |", "|---|---|--:|"]

    def add(what: str, against: str, ratio: float) -> None:
        lines.append(f"| {what} | {against} | {ratio:.2f}x |")

    add(f"the same {again['requests']} greedy requests again, tokens/s", "speculation off", again["speedup_second"])
    for run in growth["runs"]:
        add(f"{_STREAMS[run['stream']]}, {run['sampling']}, last fifth", "speculation off", run["speedup_last"])
    for row in coupled["rows"]:
        if row["streams"] == _COUPLED_STREAMS and row["workload"] in ("asked again", "near-variants"):
            what = f"coupled, {_COUPLED_STREAMS} streams, temperature {row['temperature']}: {row['workload']}"
            add(what, "speculation off", row["coupled"]["over_off"][0])
    for row in overhead["rows"]:
        if row["traffic"] == "cold" and row["batch"] in (1, 8):
            add(f"nothing to gain, batch {row['batch']}, temperature 1", "speculation off", row["tokens_ratio_p50"])
    rows = {(row["batch"], row["method"]): row["against_none"] for row in vllm["results"]}
    for batch in (1, 8):
        add(f"our drafter inside vLLM, batch {batch}", "vLLM's suffix", rows[batch, "ssd"] / rows[batch, "suffix"])
    ours, theirs = speed_ups(curve["results"], "arctic", "measured", None)
    num_traces = len({row["trace"] for row in curve["results"]})
    add(f"{num_traces} recorded traces, at the measured cost of a pass", "plain decoding", ours)
    add("the same", "Arctic Inference at its best setting", ours / theirs)
    for result, drafter, against in zip(
        others, ("llama-cpp", "sglang"), ("llama.cpp's", "SGLang's trie"), strict=False
    ):
        ours, theirs = speed_ups(result["results"], drafter, "measured", None)
        what = f"their first {result['parameters']['max_output_tokens']:,} output tokens"
        add(what, f"{against} at the best setting", ours / theirs)
    environment = growth["environment"]
    dates = sorted({result["date"] for result in (growth, coupled, overhead, vllm, curve, *others)})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    lines += [
        "",
        f"Bundled model, float32, {environment['cpu']}, {environment['cores']} cores, {when}; ratios of "
        "rates, so above 1 is good for us. The traces are other models' outputs, replayed; no GPU was measured.",
    ]
    return "\n".join(lines)
