"""What coupled sampling brings, and how many tokens its noise depends on."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from benchmarks.report.growth import measured_on
from benchmarks.report.spread import ratio_with_spread


def coupled_section(results: Sequence[dict[str, Any]]) -> str:
    """A table a model: tokens/s over speculation off and tokens a pass, with coupled noise and with a seed each."""
    lines: list[str] = []
    for result in results:
        lines += [*_table(result), ""]
    parameters = results[0]["parameters"]
    lines.append(
        "`python -m benchmarks.coupled`: one request at a time to each engine in turn, top-p "
        f"{parameters['top_p']}. Asked again: every prompt was answered once of each stream before, and comes again "
        "with a stream that is drawn. Near-variants: a word or a number changed, or a sentence added. Growth: the "
        "mixed stream of `benchmarks.growth`. Medians over groups of requests (least ... most), prompts included. By "
        "CPU time: tokens per second of it, which other programs on the machine change less. Seeds: the same requests, "
        "each with a seed of its own, as without coupling."
    )
    return "\n".join(lines)


def _table(result: dict[str, Any]) -> list[str]:
    lines = [
        "| workload | temperature | streams | coupled: tokens/s over off | by CPU time | tokens a pass "
        "| seeds: over off | tokens a pass |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        coupled, uncoupled = row["coupled"], row["uncoupled"]
        lines.append(
            f"| {row['workload']} | {row['temperature']} | {row['streams']} | {ratio_with_spread(coupled['over_off'])} "
            f"| {coupled['over_off_by_cpu_time'][0]:.2f}x | {coupled['tokens_per_pass']:.2f} "
            f"| {uncoupled['over_off'][0]:.2f}x | {uncoupled['tokens_per_pass']:.2f} |"
        )
    parameters, marks = result["parameters"], result["marks"]
    missed = [
        f"{mark['workload']} at temperature {mark['temperature']} with {mark['streams']} streams "
        f"({mark['asked']}, was {mark['measured']:.2f}x)"
        for mark in marks
        if not mark["met"]
    ]
    said = f"all but {len(missed)} met: {'; '.join(missed)}" if missed else "all met"
    lines += [
        "",
        f"{measured_on(result)}, {parameters['requests']} prompts, answers of at most {parameters['max_tokens']} "
        f"tokens, noise of the last {parameters['window']}. Of {len(marks)} marks {said}. "
        f"{result['compared_tokens']:,} tokens compared with speculation off: no difference.",
    ]
    return lines


def window_section(results: Sequence[dict[str, Any]]) -> str:
    """A table a model: how far answers to near-variants agree by how many tokens the noise depends on."""
    lines: list[str] = []
    for result in results:
        lines += [
            "| temperature | noise depends on | same token at a place | same tokens first | aligned | tokens a pass |",
            "|--:|--:|--:|--:|--:|--:|",
        ]
        for row in sorted(result["rows"], key=itemgetter("temperature", "window")):
            depends = f"last {row['window']}" if row["window"] else "a seed each"
            lines.append(
                f"| {row['temperature']} | {depends} | {_mean(row['same_place'], 3)} "
                f"| {_mean(row['common_prefix'], 1)} | {_mean(row['aligned'], 3)} | {row['tokens_per_pass']:.2f} |"
            )
        lines += [
            "",
            f"{measured_on(result)}, {result['pairs']} pairs, answers of at most "
            f"{result['parameters']['max_tokens']} tokens.",
            "",
        ]
    lines.append(
        "`python -m benchmarks.coupled --windows`: means and standard errors over pairs of a prompt and a near-variant "
        "of it. Aligned: share of tokens in common blocks of at least four. Tokens a pass: of a near-variant where the "
        "prompt was answered before, half the pairs."
    )
    return "\n".join(lines)


def _mean(values: Sequence[float], digits: int) -> str:
    mean, error = values
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
