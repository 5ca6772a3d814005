"""An evaluation as text for a terminal.

Names of classes and files come from logs and may contain control characters, so they are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from cache_builder.evaluation.evaluate import LEAST_REQUESTS
from cache_builder.opened_cache import escape_control_characters

Evaluation = Mapping[str, Any]

_MOST_LINES: Final = 20
_CACHES: Final = {
    "none": "the request's own text alone",
    "frozen": "warm directories too",
    "growing": "all that was said before too",
}
_SOURCES: Final = {
    "context": "the request's own context",
    "recent": "the newest requests",
    "cache": "earlier requests",
    "prebuilt": "prebuilt caches",
    "lookahead": "lookahead after a rejected token",
}


def headline(evaluation: Evaluation) -> str:
    """Return one line with the speed-up and its assumptions, or no speed-up if there are too few requests."""
    measured, condition = evaluation.get("measured"), evaluation["cost"].get("condition") or "see its costs"
    if measured is None:
        if evaluation["requests"] < LEAST_REQUESTS:
            return _too_few(evaluation["requests"])
        return f"{evaluation['speedup']:.2f}x expected on {evaluation['requests']:,} requests, {condition}"
    ways = measured["temperatures"]
    if any(way["outputs_differ"] or way["bits_differ"] for way in ways):
        return f"Outputs differ with drafts: do not use this, and report it with {measured['model']}"
    if not (enough := [way for way in ways if way["requests"] >= LEAST_REQUESTS]):
        return _too_few(max(way["requests"] for way in ways))
    said = " and ".join(
        f"{way['speedup']:.2f}x {format_sampling(way)} on {way['requests']:,} requests" for way in enough
    )
    return f"{said}: tokens a second, measured with {measured['model']}, every output the same to the bit"


def _too_few(requests: int) -> str:
    return f"{requests:,} requests are too few for a figure: {LEAST_REQUESTS} are needed"


def format_sampling(way: Evaluation) -> str:
    return f"at temperature {way['temperature']:g}" if way["temperature"] else "greedy"


def summary(evaluation: Evaluation) -> str:
    lines = [headline(evaluation), *_lacking(evaluation)]
    if evaluation.get("measured") is not None:
        lines.append(_measured_with(evaluation["measured"]))
    lines += [_headline(evaluation), _drafts(evaluation), f"costs: {evaluation['cost']['source']}"]
    for title, columns, rows in _tables(evaluation):
        if rows:
            cells = [[_cell(template, row) for _, template in columns] for row in rows[:_MOST_LINES]]
            heads = [head for head, _ in columns]
            widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
            lines += ["", title]
            for line in (heads, *cells):
                padded = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
                lines.append("  ".join(["", f"{line[0]:<{widths[0]}}", *padded[1:]]))
    lines += ["", "What it needs", *_needs(evaluation["needs"]), "", "What this cannot know"]
    lines += [f"  - {sentence}" for sentence in evaluation["unknown"]]
    about = f"ssd-cache evaluate {evaluation['version']}, {evaluation['date']}, tokenizer {evaluation['tokenizer']}"
    return "\n".join(map(escape_control_characters, [*lines, "", f"{about}, of {', '.join(evaluation['inputs'])}"]))


def _measured_with(measured: Evaluation) -> str:
    too_long, replayed = measured["too_long"], measured.get("replayed")
    return (
        f"decoded with {measured['model']}, {measured['dtype']}, {measured['device']}, {measured['threads']} threads, "
        "one request at a time, with drafts and without by turns"
        + (f"; {too_long:,} prompts did not fit into its context" if too_long else "")
        + (f"; of the same greedy outputs a replay predicts {replayed['speedup']:.2f}x" if replayed else "")
    )


def _lacking(evaluation: Evaluation) -> Iterator[str]:
    for what in ("prompt", "answer"):
        if count := evaluation.get(f"without_{what}_records"):
            done = "were decoded from their first token on" if what == "prompt" else "were left out"
            yield f"{count:,} records had no {what}: they {done}"
    if documents := evaluation["documents"]["number"]:
        yield f"{documents:,} documents were learned from, and not counted"


def _headline(evaluation: Evaluation) -> str:
    return (
        f"replayed: speed-up {evaluation['speedup']:.2f} {evaluation['cost'].get('condition', '')}, "
        f"{evaluation['tokens_per_step']:.2f} tokens a step, on "
        f"{evaluation['requests']:,} requests of {evaluation['prompt_tokens']:,} prompt and "
        f"{evaluation['output_tokens']:,} output tokens"
    )


def _drafts(evaluation: Evaluation) -> str:
    parameters, share = evaluation["parameters"], evaluation["of_oracle"]
    return (
        ("" if share is None else f"{share:.0%} of the tokens a step that the best drafts in hindsight would give; ")
        + f"{evaluation['drafted_per_step']:.1f} tokens drafted a step, {evaluation['acceptance_rate']:.0%} of them "
        f"accepted; trees of at most {parameters['draft_limit']}, cache {parameters['cache']}"
        + (f", warm: {', '.join(parameters['warm'])}" if parameters["warm"] else "")
    )


def _needs(needs: Evaluation) -> list[str]:
    proposal = needs["propose_us"]
    return [
        f"  memory {_bytes(needs['memory_bytes'])} for {needs['cached_tokens']:,} tokens, files "
        f"{_bytes(needs['disk_bytes'])}",
        *([f"  {proposal:.0f} us of a processor for a proposal, here"] if proposal is not None else []),
    ]


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


_Columns = tuple[tuple[str, str], ...]
_STEPS: Final[_Columns] = (
    ("tokens a step", "{tokens_per_step:.2f}"),
    ("of the best", "{of_oracle:.0%}"),
    ("speed-up", "{speedup:.2f}"),
)
_WAY: Final[_Columns] = (("sampling", "{way}"),)
_REQUESTS: Final[_Columns] = (("requests", "{requests:,}"),)
_RATES: Final[_Columns] = (
    ("tokens", "{output_tokens:,}"),
    ("passes without", "{passes_without:,}"),
    ("with", "{passes_with:,}"),
    ("tokens/s without", "{without_per_s:.2f}"),
    ("with", "{with_per_s:.2f}"),
)
_SPEED_UP: Final[_Columns] = (("speed-up", "{speedup:.2f}"),)


def _tables(evaluation: Evaluation) -> Iterator[tuple[str, _Columns, Sequence[Evaluation]]]:
    measured = (evaluation.get("measured") or {"temperatures": ()})["temperatures"]
    ways = [{**way, "way": format_sampling(way), "num_slower": len(way["slower"])} for way in measured]
    alone: _Columns = (
        ("of output", "{output_speedup:.2f}"),
        ("outputs that differ", "{outputs_differ:,}"),
        ("slower requests", "{num_slower:,}"),
    )
    yield "Measured", (*_WAY, *_REQUESTS, *_RATES, *alone, *_SPEED_UP), ways
    parts = [{**part, "way": way["way"]} for way in ways for part in way["growth"]]
    yield (
        "Measured, as it is used: parts of the requests in their order, the cache empty at first",
        (("up to request", "{up_to:,}"), *_WAY, *_REQUESTS, *_RATES, *_SPEED_UP),
        parts,
    )
    of_class: _Columns = (("class", "{name}"), *_REQUESTS, ("output tokens", "{output_tokens:,}"), *_STEPS)
    yield "By class of traffic", of_class, evaluation["classes"]
    yield "It grows with use", (("after requests", "{requests:,}"), *_STEPS), evaluation["growth"]
    uses = [{**use, "searched": _CACHES[use["cache"]]} for use in evaluation["by_cache"]]
    yield "What the cache adds to a request's own text", (("searched", "{searched}"), *_STEPS), uses
    sources = [{**row, "source": _SOURCES.get(row["source"], row["source"])} for row in evaluation["by_source"]]
    of_source: _Columns = (("source", "{source}"), ("drafted", "{drafted:,}"), ("accepted", "{accepted:,}"))
    yield "Where drafts come from", of_source, sources


def _cell(template: str, row: Evaluation) -> str:
    try:
        return template.format_map(row)
    except TypeError:  # unknown figures are None
        return "-"
