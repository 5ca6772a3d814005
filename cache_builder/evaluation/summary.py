"""An evaluation for people who read it in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Evaluation = Mapping[str, Any]


def summary(evaluation: Evaluation) -> str:
    """All that it says but the cost curve, in lines of at most 110 characters or so."""
    lines = [_headline(evaluation), _drafts(evaluation), f"costs: {evaluation['cost']['source']}"]
    without = evaluation["without_prompt"]
    if without["requests"]:
        lines.append(f"{without['requests']:,} outputs without a prompt were learned from, and not counted")
    lines += _table("by class", evaluation["classes"], "name", ("requests", "output_tokens"))
    definitions = evaluation["class_definitions"]
    lines += [f"  {row['name']}: {definitions[row['name']]}" for row in evaluation["classes"] if definitions]
    lines += _table("in the order they came", evaluation["growth"], "requests", (), "up to request {:,}")
    lines += _table("by what is searched", _named_caches(evaluation["by_cache"]), "cache", ())
    lines += _table("by draft limit", evaluation["by_draft_limit"], "limit", (), "{:,} tokens")
    lines += _table("by capacity", evaluation["by_capacity"], "capacity_tokens", (), "{:,} tokens")
    lines += _table("by replicas", _named_sharing(evaluation["sharing"]), "name", ())
    lines += ["", "what it needs", *_needs(evaluation["needs"]), "", "what this cannot know"]
    return "\n".join([*lines, *(f"  - {sentence}" for sentence in evaluation["unknown"])])


def _headline(evaluation: Evaluation) -> str:
    return (
        f"expected speed-up {evaluation['speedup']:.2f}, {evaluation['tokens_per_step']:.2f} tokens a step, on "
        f"{evaluation['requests']:,} requests of {evaluation['prompt_tokens']:,} prompt and "
        f"{evaluation['output_tokens']:,} output tokens"
    )


def _drafts(evaluation: Evaluation) -> str:
    parameters = evaluation["parameters"]
    return (
        f"{evaluation['drafted_per_step']:.1f} tokens drafted a step, {evaluation['acceptance_rate']:.0%} of them "
        f"accepted; {parameters['shape']}s of at most {parameters['draft_limit']}, cache {parameters['cache']}"
        + (f", warm: {', '.join(parameters['warm'])}" if parameters["warm"] else "")
        + (f", {parameters['batch']} rows a pass" if parameters["batch"] > 1 else "")
    )


def _table(title: str, rows: Iterable[Evaluation], name: str, more: Iterable[str], shown: str = "{}") -> list[str]:
    """The rows' names, then ``more``, tokens a step and speed-up; nothing where there are no rows."""
    found, columns = list(rows), list(more)
    if not found:
        return []
    head = "".join(f"{column.replace('_', ' '):>16}" for column in [*columns, "tokens a step", "speed-up"])
    lines = ["", f"{title:<32}{head}"]
    for row in found:
        cells = [*(f"{row[column]:,}" for column in columns), f"{row['tokens_per_step']:.2f}", f"{row['speedup']:.2f}"]
        lines.append(f"  {shown.format(row[name]):<30.30}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def _named_caches(rows: Iterable[Evaluation]) -> list[Evaluation]:
    names = {
        "none": "the request's own text alone",
        "frozen": "warm directories too",
        "growing": "all that was said before too",
    }
    return [{**row, "cache": names[row["cache"]]} for row in rows]


def _named_sharing(rows: Iterable[Evaluation]) -> list[Evaluation]:
    return [
        {**row, "name": f"{row['replicas']} replicas, {'one cache' if row['is_shared'] else 'each its own'}"}
        for row in rows
    ]


def _needs(needs: Evaluation) -> list[str]:
    proposal = needs["propose_us"]
    return [
        f"  memory {_bytes(needs['memory_bytes'])} for {needs['cached_tokens']:,} tokens, files "
        f"{_bytes(needs['disk_bytes'])}",
        f"  sharing {_bytes(needs['redis_bytes'])} through Redis, {needs['redis_bytes_per_request']:,.0f} a request",
        *([f"  {proposal:.0f} us of a processor for a proposal, here"] if proposal is not None else []),
    ]


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
