"""Replays of recorded outputs, a table a question; and the one table of the README: where speculation gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.replay.job import ARCTIC_DEFAULT, DEFAULT, OURS, PRICED_BY
from benchmarks.report.figures import origins
from benchmarks.run import table

MEASURED = "measured"
_STRONGEST = "arctic"
"""Whose curve is laid beside ours trace by trace."""
_NAMES = {
    OURS: "ours",
    "vllm-ngram": "vLLM n-gram",
    "prompt-lookup-hf": "prompt lookup",
    "sglang": "SGLang",
    "llama-cpp": "llama.cpp",
}


def curve_section(path: dict[str, Any], tree: dict[str, Any] | None) -> str:
    """Against another drafter at the best of its settings: what passes cost and give."""
    drafter, kinds = _STRONGEST, {"path": path, **({} if tree is None else {"tree": tree})}
    traces = list(dict.fromkeys(row["trace"] for row in path["results"]))
    rows = []
    for trace in [*traces, None]:
        row: dict[str, Any] = {"trace": trace or "**all**"}
        for kind, result in kinds.items():
            row[kind] = speed_ups(result["results"], drafter, MEASURED, trace)
        rows.append(row)
    columns = [("trace", "{trace}")]
    for kind in kinds:
        columns += [(f">{kind}s, ours", f"{{{kind}[0]:.2f}}x"), (f">{drafter}'s", f"{{{kind}[1]:.2f}}x")]
    parameters = path["parameters"]
    return "\n".join(
        [
            f"Ours beside {drafter}, path against path and tree against tree: speed-up over plain decoding at the "
            f"measured cost of a pass, of {drafter} the best of its settings in hindsight. Geometric means over "
            "tokenizers.",
            "",
            *table(columns, rows),
            "",
            f"`make bench`: {len(traces)} traces, tokenizers {', '.join(parameters['tokenizers'])}, the first "
            f"{parameters['max_output_tokens']:,} output tokens of each, draft limit "
            f"{parameters['draft']['num_speculative_tokens']}. The cost was measured on this engine with the bundled "
            "model on a CPU; the time of proposals is left out.",
        ]
    )


def others_section(path: dict[str, Any], tree: dict[str, Any]) -> str:
    """All drafters beside each other, at their best; then each as its makers set it."""
    contenders = [
        (kind, result["results"], drafter)
        for kind, result in (("path", path), ("tree", tree))
        for drafter in dict.fromkeys(row["drafter"] for row in result["results"])
    ]
    traces = list(dict.fromkeys(row["trace"] for row in path["results"]))
    best = {
        (kind, drafter, trace): best_speed_up(results, drafter, MEASURED, trace)
        for kind, results, drafter in contenders
        for trace in (None, *traces)
    }
    ahead = []
    for kind, _, drafter in contenders:
        over = {trace: best[kind, drafter, trace] / best[kind, OURS, trace] for trace in traces}
        if those := [f"{trace} ({ratio:.2f}x)" for trace, ratio in over.items() if ratio > 1]:
            ahead.append(f"{_NAMES.get(drafter, drafter)} with {kind}s on {', '.join(those)}")
    shown = (
        f"{_NAMES.get(drafter, drafter)}, {kind}s, {best[kind, drafter, None]:.2f}x" for kind, _, drafter in contenders
    )
    rows = []
    for kind, results, drafter in contenders:
        of_it = [row for row in results if row["drafter"] == drafter and _is_default(drafter, row["setting"])]
        for setting in dict.fromkeys(row["setting"] for row in of_it):
            some = [row for row in of_it if row["setting"] == setting]
            rows.append(
                {
                    "drafter": f"{_NAMES.get(drafter, drafter)}, {kind}s",
                    "setting": setting,
                    "up": _mean(row["speed_up"][MEASURED] for row in some),
                    "tokens": _mean(row["mean_acceptance_length"] for row in some),
                    "drafted": np.mean([row["drafted_per_step"] for row in some]),
                    "us": np.median([row["propose_us_p50"] for row in some]),
                }
            )
    columns = [("drafter", "{drafter}"), ("setting", "{setting}")]
    columns += [
        (">speed-up", "{up:.2f}x"),
        (">tokens a step", "{tokens:.2f}"),
        (">drafted a step", "{drafted:.1f}"),
        (">us", "{us:.1f}"),
    ]
    parameters = path["parameters"]
    return "\n".join(
        [
            "Speed-up over plain decoding at the measured cost of a pass, each but ours at the best of its settings "
            f"in hindsight for each trace, geometric means: {'; '.join(shown)}.",
            "",
            f"Ahead of ours: {'; '.join(ahead) or 'none'}.",
            "",
            "Each as its makers set it; microseconds of a proposal are the drafter's own call, the median of the "
            "middle trace.",
            "",
            *table(columns, rows),
            "",
            f"`make bench` where `make bench-peers` installed them: {', '.join(parameters['tokenizers'])}, the first "
            f"{parameters['max_output_tokens']:,} output tokens of each trace, so less was said before than above; "
            f"draft limit {parameters['draft']['num_speculative_tokens']}.",
        ]
    )


def _is_default(drafter: str, setting: str) -> bool:
    if drafter == "arctic":
        return setting == ARCTIC_DEFAULT
    if drafter == OURS:
        return setting == f"{PRICED_BY}{MEASURED}"
    return setting.startswith(DEFAULT)


def best_speed_up(rows: Sequence[dict[str, Any]], drafter: str, cost: str, trace: str | None) -> float:
    """Over plain decoding under one cost curve, ours priced by it, another's the best; ``trace`` : None for all."""
    some = [row for row in rows if row["drafter"] == drafter and trace in (None, row["trace"])]
    if drafter == OURS:
        some = [row for row in some if row["setting"] == f"{PRICED_BY}{cost}"]
    best: dict[tuple[str, str], float] = {}
    for row in some:
        key = row["trace"], row["tokenizer"]
        best[key] = max(best.get(key, 0.0), row["speed_up"][cost])
    return _mean(best.values())


def _mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def speed_ups(rows: list[dict[str, Any]], drafter: str, cost: str, trace: str | None) -> tuple[float, float]:
    """Ours and the best of ``drafter`` over plain decoding under one cost curve; ``trace`` : None for all."""
    ours, theirs = [], []
    for key in dict.fromkeys((row["trace"], row["tokenizer"]) for row in rows):
        here = [row for row in rows if (row["trace"], row["tokenizer"]) == key and trace in (None, key[0])]
        ours += [row["speed_up"][cost] for row in here if row["setting"] == f"{PRICED_BY}{cost}"]
        theirs += [max(row["speed_up"][cost] for row in here if row["drafter"] == drafter)] if here else []
    return _mean(ours), _mean(theirs)


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

    for run in sorted(growth["runs"], key=lambda run: bool(run["sampling"] == "greedy")):  # as most people ask, first
        add(f"{_STREAMS[run['stream']]}, {run['sampling']}, last fifth", "speculation off", run["speedup_last"])
    for row in overhead["rows"]:
        if row["traffic"] == "cold" and row["batch"] in (1, 8):
            add(f"nothing to gain, batch {row['batch']}, temperature 1", "speculation off", row["tokens_ratio_p50"])
    add(f"the same {again['requests']} greedy requests again, tokens/s", "speculation off", again["speedup_second"])
    for row in coupled["rows"]:
        if row["streams"] == _COUPLED_STREAMS and row["workload"] in ("asked again", "near-variants"):
            what = f"`--coupled-sampling {_COUPLED_STREAMS}`, temperature {row['temperature']}: {row['workload']}"
            add(what, "speculation off", row["coupled"]["over_off"][0])
    of_v1 = [row for row in vllm["results"] if row.get("runner", "v1") == "v1"]
    rows = {(row["batch"], row["method"]): row["against_none"] for row in of_v1}
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
    environment, when = growth["environment"], origins((growth, coupled, overhead, vllm, curve, *others))
    lines += [
        "",
        f"Bundled model, float32, {environment['cpu']}, {environment['cores']} cores; ratios of rates, so above 1 is "
        "good for us. The traces are other models' outputs, replayed; no GPU was measured. Commits (+: with changes "
        f"that were not committed): {when}.",
    ]
    return "\n".join(lines)
