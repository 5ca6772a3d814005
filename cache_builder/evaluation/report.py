"""An evaluation as text for a terminal.

Names of classes and files come from logs and may contain control characters, so they are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from cache_builder.evaluation.evaluate import LEAST_REQUESTS
from cache_builder.opened_cache import escape_control_characters

Evaluation = Mapping[str, Any]

_MAX_LINES: Final = 20
_CACHES: Final = {
    "none": "only the request's own context",
    "frozen": "also the warm directories",
    "growing": "also all earlier requests",
}
_SOURCES: Final = {
    "context": "the request's own context",
    "recent": "the newest requests",
    "cache": "earlier requests",
    "prebuilt": "prebuilt caches",
    "lookahead": "lookahead (tokens after a rejected draft token)",
}


def headline(evaluation: Evaluation) -> str:
    """Return the report's first line: the speed-up and its assumptions, or a warning.

    The line is a warning if there were too few requests, or if drafts changed a measured output, which is a bug.
    """
    measured, condition = evaluation.get("measured"), evaluation["cost"].get("condition") or "see its costs"
    if measured is None:
        if evaluation["requests"] < LEAST_REQUESTS:
            return _too_few(evaluation["requests"])
        return f"{evaluation['speedup']:.2f}x expected on {evaluation['requests']:,} requests, {condition}"
    ways = measured["temperatures"]
    if any(way["outputs_differ"] or way["bits_differ"] for way in ways):
        return f"Outputs differ with drafts ({measured['model']}): do not deploy this, and report it as a bug"
    if not (enough := [way for way in ways if way["requests"] >= LEAST_REQUESTS]):
        return _too_few(max(way["requests"] for way in ways))
    said = " and ".join(
        f"{way['speedup']:.2f}x {format_sampling(way)} on {way['requests']:,} requests" for way in enough
    )
    return f"{said}: measured in tokens per second with {measured['model']}; all outputs were bit-identical"


def _too_few(requests: int) -> str:
    return f"{requests:,} requests are too few for a speed-up: at least {LEAST_REQUESTS} are needed"


def format_sampling(way: Evaluation) -> str:
    return f"at temperature {way['temperature']:g}" if way["temperature"] else "greedy"


def summary(evaluation: Evaluation) -> str:
    lines = [headline(evaluation), *_describe_missing(evaluation)]
    if evaluation.get("measured") is not None:
        lines.append(_describe_measurement(evaluation["measured"]))
    lines += [_headline(evaluation), *_drafts(evaluation), f"costs of forward passes: {evaluation['cost']['source']}"]
    for title, columns, rows in _tables(evaluation):
        if rows:
            cells = [[_format_cell(template, row) for _, template in columns] for row in rows[:_MAX_LINES]]
            heads = [head for head, _ in columns]
            widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
            lines += ["", title]
            for line in (heads, *cells):
                padded = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
                lines.append("  ".join(["", f"{line[0]:<{widths[0]}}", *padded[1:]]))
    lines += ["", "Resources", *_describe_resources(evaluation["needs"]), "", "Limitations"]
    lines += [f"  - {sentence}" for sentence in evaluation["unknown"]]
    about = f"ssd-cache evaluate {evaluation['version']}, {evaluation['date']}, tokenizer {evaluation['tokenizer']}"
    return "\n".join(map(escape_control_characters, [*lines, "", f"{about}, inputs {', '.join(evaluation['inputs'])}"]))


def _describe_measurement(measured: Evaluation) -> str:
    too_long, replayed = measured["too_long"], measured.get("replayed")
    return (
        f"decoded with {measured['model']}, {measured['dtype']}, {measured['device']}, {measured['threads']} threads, "
        "one request at a time, each once with and once without drafts"
        + (f"; {too_long:,} prompts did not fit into its context" if too_long else "")
        + (f"; for the same greedy outputs, a replay predicts {replayed['speedup']:.2f}x" if replayed else "")
    )


def _describe_missing(evaluation: Evaluation) -> Iterator[str]:
    for what in ("prompt", "answer"):
        if count := evaluation.get(f"without_{what}_records"):
            done = "were replayed from their first token" if what == "prompt" else "were left out"
            yield f"{count:,} records had no {what} and {done}"
    if documents := evaluation["documents"]["number"]:
        yield f"{documents:,} documents were added to the cache but not replayed"


def _headline(evaluation: Evaluation) -> str:
    return (
        f"replayed: speed-up {evaluation['speedup']:.2f}x, {evaluation['tokens_per_step']:.2f} tokens per step, on "
        f"{evaluation['requests']:,} requests with {evaluation['prompt_tokens']:,} prompt tokens and "
        f"{evaluation['output_tokens']:,} output tokens"
    )


def _drafts(evaluation: Evaluation) -> Iterator[str]:
    parameters, share = evaluation["parameters"], evaluation["of_oracle"]
    yield (
        f"drafts: {evaluation['drafted_per_step']:.1f} draft tokens per step, of which "
        f"{evaluation['acceptance_rate']:.0%} were accepted; trees of at most {parameters['draft_limit']} tokens; "
        f"cache {parameters['cache']}"
        + (f"; warm directories {', '.join(parameters['warm'])}" if parameters["warm"] else "")
    )
    if share is not None:
        yield f"optimum: {share:.0%} of the tokens per step that the best drafts from all earlier text would give"


def _describe_resources(needs: Evaluation) -> list[str]:
    proposal = needs["propose_us"]
    return [
        f"  cache of {needs['cached_tokens']:,} tokens: memory {_bytes(needs['memory_bytes'])}, disk "
        f"{_bytes(needs['disk_bytes'])}",
        *([f"  CPU time per draft on this machine: {proposal:.0f} us"] if proposal is not None else []),
    ]


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


_Columns = tuple[tuple[str, str], ...]
_STEPS: Final[_Columns] = (
    ("tokens per step", "{tokens_per_step:.2f}"),
    ("of optimum", "{of_oracle:.0%}"),
    ("speed-up", "{speedup:.2f}"),
)
_WAY: Final[_Columns] = (("sampling", "{way}"),)
_REQUESTS: Final[_Columns] = (("requests", "{requests:,}"),)
_RATES: Final[_Columns] = (
    ("output tokens", "{output_tokens:,}"),
    ("passes, no drafts", "{passes_without:,}"),
    ("passes, drafts", "{passes_with:,}"),
    ("tokens/s, no drafts", "{without_per_s:.2f}"),
    ("tokens/s, drafts", "{with_per_s:.2f}"),
)
_SPEED_UP: Final[_Columns] = (("speed-up", "{speedup:.2f}"),)


def _tables(evaluation: Evaluation) -> Iterator[tuple[str, _Columns, Sequence[Evaluation]]]:
    measured = (evaluation.get("measured") or {"temperatures": ()})["temperatures"]
    ways = [{**way, "way": format_sampling(way), "num_slower": len(way["slower"])} for way in measured]
    alone: _Columns = (
        ("speed-up without prefill", "{output_speedup:.2f}"),
        ("outputs that differ", "{outputs_differ:,}"),
        ("slower requests", "{num_slower:,}"),
    )
    yield "Measured", (*_WAY, *_REQUESTS, *_RATES, *alone, *_SPEED_UP), ways
    parts = [{**part, "way": way["way"]} for way in ways for part in way["growth"]]
    yield (
        "Measured, by part of the log, with an empty cache at the start",
        (("up to request", "{up_to:,}"), *_WAY, *_REQUESTS, *_RATES, *_SPEED_UP),
        parts,
    )
    of_class: _Columns = (("class", "{name}"), *_REQUESTS, ("output tokens", "{output_tokens:,}"), *_STEPS)
    yield "Replayed, by class", of_class, evaluation["classes"]
    yield "Replayed, by part of the log", (("up to request", "{requests:,}"), *_STEPS), evaluation["growth"]
    uses = [{**use, "searched": _CACHES[use["cache"]]} for use in evaluation["by_cache"]]
    yield "Replayed, by searched text", (("searched", "{searched}"), *_STEPS), uses
    compared: _Columns = (
        ("method", "{method}"),
        ("setting", "{setting}"),
        ("tokens per step", "{tokens_per_step:.2f}"),
        ("draft tokens per step", "{drafted_per_step:.1f}"),
        *_SPEED_UP,
    )
    yield "Replayed, compared with other draft methods", compared, evaluation.get("against", ())
    sources = [{**row, "source": _SOURCES.get(row["source"], row["source"])} for row in evaluation["by_source"]]
    of_source: _Columns = (("source", "{source}"), ("drafted", "{drafted:,}"), ("accepted", "{accepted:,}"))
    yield "Draft tokens by source", of_source, sources


def _format_cell(template: str, row: Evaluation) -> str:
    try:
        return template.format_map(row)
    except TypeError:  # unknown figures are None
        return "-"
