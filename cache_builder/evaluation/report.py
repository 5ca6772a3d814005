"""An evaluation for people, as lines for a terminal.

Names of classes and files come from logs, and may have been written by anybody: they are shown escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from cache_builder.evaluation.evaluate import LEAST_REQUESTS
from cache_builder.held import plain

Evaluation = Mapping[str, Any]

_MOST_LINES: Final = 20
_CACHES: Final = {
    "none": "the request's own text alone",
    "frozen": "warm directories too",
    "growing": "all that was said before too",
}
_SOURCES: Final = {
    "own": "the request's own text",
    "tail": "the newest requests",
    "segment": "requests before",
    "warm": "warm directories",
    "guess": "guesses behind a wrong token",
}


def headline(evaluation: Evaluation) -> str:
    """One line with what its figure assumes; without a figure where it would come from too few requests."""
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
    said = " and ".join(f"{way['speedup']:.2f}x {_way(way)} on {way['requests']:,} requests" for way in enough)
    return f"{said}: tokens a second, measured with {measured['model']}, every output the same to the bit"


def _too_few(requests: int) -> str:
    return f"{requests:,} requests are too few for a figure: {LEAST_REQUESTS} are needed"


def _way(way: Evaluation) -> str:
    return f"at temperature {way['temperature']:g}" if way["temperature"] else "greedy"


def summary(evaluation: Evaluation) -> str:
    """All of it in lines; of long tables the beginning."""
    lines = [headline(evaluation), *_lacking(evaluation)]
    if evaluation.get("measured") is not None:
        lines.append(_measured_with(evaluation["measured"]))
    lines += [_headline(evaluation), _drafts(evaluation), f"costs: {evaluation['cost']['source']}"]
    for table in _MEASURED + _TABLES:
        if rows := table.rows(evaluation):
            cells = [[write(row[key]) for _, key, write in table.columns] for row in rows[:_MOST_LINES]]
            heads = [head for head, _, _ in table.columns]
            widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
            lines += ["", table.title]
            for line in (heads, *cells):
                padded = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
                lines.append("  ".join(["", f"{line[0]:<{widths[0]}}", *padded[1:]]))
    lines += ["", "What it needs", *_needs(evaluation["needs"]), "", "What this cannot know"]
    lines += [f"  - {sentence}" for sentence in evaluation["unknown"]]
    about = f"ssd-cache evaluate {evaluation['version']}, {evaluation['date']}, tokenizer {evaluation['tokenizer']}"
    return "\n".join(map(plain, [*lines, "", f"{about}, of {', '.join(evaluation['inputs'])}"]))


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


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number_of(values: Sequence[int]) -> str:
    return _count(len(values))


_Columns = tuple[tuple[str, str, Callable[[Any], str]], ...]
_STEPS: Final[_Columns] = (
    ("tokens a step", "tokens_per_step", _two), ("of the best", "of_oracle", _share), ("speed-up", "speedup", _two),
)  # fmt: skip


class _Table(NamedTuple):
    """``rows`` : of an evaluation. ``columns`` : their names, keys and how a value is written."""

    title: str
    rows: Callable[[Evaluation], Sequence[Evaluation]]
    columns: _Columns


def _ways(key: str) -> Callable[[Evaluation], Sequence[Evaluation]]:
    """Rows of every temperature that was measured, each with its name; ``key`` "": of all of it."""

    def rows(evaluation: Evaluation) -> list[Evaluation]:
        ways = (evaluation.get("measured") or {"temperatures": ()})["temperatures"]
        return [{**row, "way": _way(way)} for way in ways for row in ([way] if not key else way[key])]

    return rows


_WAY: Final[_Columns] = (("sampling", "way", str),)
_RATES: Final[_Columns] = (
    ("tokens", "output_tokens", _count), ("passes without", "passes_without", _count), ("with", "passes_with", _count),
    ("tokens/s without", "without_per_s", _two), ("with", "with_per_s", _two), ("speed-up", "speedup", _two),
)  # fmt: skip
_REQUESTS: Final[_Columns] = (("requests", "requests", _count),)
_MEASURED: Final = (
    _Table(
        "Measured", _ways(""),
        (
            *_WAY, *_REQUESTS, *_RATES[:-1], ("of output", "output_speedup", _two),
            ("outputs that differ", "outputs_differ", _count), ("slower requests", "slower", _number_of), _RATES[-1],
        ),
    ),
    _Table(
        "Measured, as it is used: parts of the requests in their order, the cache empty at first", _ways("growth"),
        (("up to request", "up_to", _count), *_WAY, *_REQUESTS, *_RATES),
    ),
)  # fmt: skip
_TABLES: Final = (
    _Table(
        "By class of traffic", itemgetter("classes"),
        (("class", "name", str), *_REQUESTS, ("output tokens", "output_tokens", _count), *_STEPS),
    ),
    _Table("It grows with use", itemgetter("growth"), (("after requests", "requests", _count), *_STEPS)),
    _Table(
        "What the cache adds to a request's own text", itemgetter("by_cache"),
        (("searched", "cache", lambda use: _CACHES[use]), *_STEPS),
    ),
    _Table(
        "Where drafts come from", itemgetter("by_source"),
        (
            ("source", "source", lambda name: str(_SOURCES.get(name, name))), ("drafted", "drafted", _count),
            ("accepted", "accepted", _count),
        ),
    ),
)  # fmt: skip
