"""An evaluation as one HTML file that needs nothing else: no script, no font, no host.

Whatever comes from logs, names of classes and of files above all, may have been written by anybody: every text is
escaped, and the page's own policy forbids it to load or run anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from cache_builder.evaluation.cards import cards, section
from cache_builder.evaluation.plots import table
from cache_builder.evaluation.values import TIMES, Row, count, number, percent, plain, rows_of, times, two

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_MOST_CLASSES = 60


def page(evaluation: Mapping[str, Any]) -> str:
    """The page. ``evaluation`` : what ``ssd-cache evaluate --json`` prints; what it lacks is left out. O(its size)."""
    found = cards(evaluation)
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(_speed(evaluation, 'expected '))} on your logs</title>",
            f"<style>{_style()}</style></head><body><main>",
            *_hero(evaluation),
            *_facts(evaluation),
            *_classes(evaluation),
            '<div class="cards">' + "".join(found) + "</div>" if found else "",
            *_unknown(evaluation),
            *_foot(evaluation),
            "</main></body></html>\n",
        ]
    )


@cache
def _style() -> str:
    return (Path(__file__).parent / "page.css").read_text("utf-8")


def _hero(evaluation: Row) -> Iterator[str]:
    speedup, steps = number(evaluation, "speedup"), number(evaluation, "tokens_per_step")
    if not speedup:
        yield '<header class="hero"><h1>What the cache would bring on these logs</h1></header>'
        return
    said = []
    if steps is not None:
        said.append(f"A pass of the model gives {steps:.2f} tokens instead of one")
    if (requests := number(evaluation, "requests")) is not None:
        output = number(evaluation, "output_tokens")
        of_tokens = "" if output is None else f" with {count(output)} output tokens"
        said.append(f"replayed were {count(requests)} requests{of_tokens}, nothing seen before its time")
    word = "faster" if speedup >= 1 else "as fast: drafts cost more than they bring"
    yield (
        '<header class="hero"><div><h1>Expected on your logs</h1>'
        f'<p class="figure">{speedup:.2f}<span>{TIMES}</span></p><p class="say"><strong>{word}.</strong> '
        f"{escape('; '.join(said))}{'.' if said else ''}</p></div>"
    )
    longest = max(1.0, 1.0 / speedup)
    bars = [("One token a pass", 1.0, "plain"), ("With drafts from this cache", 1.0 / speedup, "accent")]
    yield '<div class="race" role="img" aria-label="Time for the same output, without drafts and with them">'
    for name, share, colour in bars:
        yield (
            f"<div><span>{name}</span><b>{share:.0%} of the time</b>"
            f'<i style="--colour: var(--{colour}); --share: {100 * share / longest:.1f}%"></i></div>'
        )
    yield "</div></header>"


def _facts(evaluation: Row) -> Iterator[str]:
    facts = [
        ("tokens a step", "tokens_per_step", two),
        ("drafted a step", "drafted_per_step", two),
        ("of the drafts accepted", "acceptance_rate", percent),
        ("requests", "requests", count),
        ("output tokens", "output_tokens", count),
        ("prompt tokens", "prompt_tokens", count),
    ]
    found = [(name, write(value)) for name, key, write in facts if (value := number(evaluation, key)) is not None]
    if found:
        cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in found)
        yield f'<dl class="facts">{cells}</dl>'


def _classes(evaluation: Row) -> Iterator[str]:
    rows = [row for row in rows_of(evaluation, "classes", ("speedup",)) if isinstance(row.get("name"), str)]
    if not rows:
        return
    rows.sort(key=lambda row: -float(row.get("output_tokens") or 0))
    longest = max(1.0, *(float(row["speedup"]) for row in rows))
    definitions = evaluation.get("class_definitions")
    items = []
    for row in rows[:_MOST_CLASSES]:
        speedup = float(row["speedup"])
        about = [
            write(value) + " " + name
            for name, key, write in (
                ("requests", "requests", count),
                ("tokens", "output_tokens", count),
                ("a step", "tokens_per_step", two),
            )
            if (value := number(row, key)) is not None
        ]
        sentence = definitions.get(row["name"]) if isinstance(definitions, Mapping) else None
        note = f'<div class="soft">{escape(sentence)}</div>' if isinstance(sentence, str) else ""
        items.append(
            f'<li{" class=is-slow" if speedup < 1 else ""}><div class="what"><b>{escape(row["name"])}</b>'
            f'{note}<div class="soft">{escape(", ".join(about))}</div></div>'
            f'<div class="bar" aria-hidden="true"><i style="--share: {100 * speedup / longest:.1f}%"></i>'
            f'<u style="--one: {100 * min(1.0, speedup) / longest:.1f}%"></u></div><em>{times(speedup)}</em></li>'
        )
    more = len(rows) - len(items)
    rest = f'<p class="soft">and {more} smaller classes, which the JSON holds</p>' if more else ""
    yield section(
        "By class of traffic",
        "Speed-up of each class, the largest first. Grey is plain decoding, colour is what drafts add.",
        f'<ul class="classes">{"".join(items)}</ul>{rest}',
        is_wide=True,
    )


def _unknown(evaluation: Row) -> Iterator[str]:
    said = evaluation.get("unknown")
    sentences = [one for one in said if isinstance(one, str)] if isinstance(said, list | tuple) else []
    if sentences:
        items = "".join(f"<li>{escape(one)}</li>" for one in sentences)
        yield section("What a replay cannot know", "", f'<ul class="unknown">{items}</ul>', is_wide=True)


def _foot(evaluation: Row) -> Iterator[str]:
    version, date, tokenizer = (evaluation.get(key) for key in ("version", "date", "tokenizer"))
    about = [
        f"ssd-cache evaluate {version}" if version else "ssd-cache evaluate",
        str(date) if date else "",
        f"tokenizer {tokenizer}" if tokenizer else "",
    ]
    inputs = evaluation.get("inputs")
    if isinstance(inputs, list | tuple) and inputs:
        shown = [str(name) for name in inputs[:8]]
        about.append("of " + ", ".join(shown) + (f" and {len(inputs) - 8} more" if len(inputs) > 8 else ""))
    yield f"<footer>{escape(' · '.join(filter(None, about)))}"
    parameters = evaluation.get("parameters")
    if isinstance(parameters, Mapping) and parameters:
        rows = table(("parameter", "value"), [(str(key), plain(value)) for key, value in parameters.items()])
        yield f'<details><summary>Parameters</summary><div class="scroll">{rows}</div></details>'
    yield "</footer>"


def _speed(evaluation: Row, before: str) -> str:
    speedup = number(evaluation, "speedup")
    return "The cache" if not speedup else f"{before}{speedup:.2f}{TIMES}".capitalize()
