"""The tables of the replays of recorded outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np

from benchmarks.replay.job import ARCTIC_DEFAULT, DEFAULT, FLAT_WIDTH, OURS, PRICED_BY
from benchmarks.run import Columns, table

Result = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

_MEASURED: Final = "measured"
_FREE: Final = f"flat {FLAT_WIDTH}"
_NAMES: Final = {
    OURS: "ours",
    "vllm-ngram": "vLLM n-gram",
    "prompt-lookup-hf": "prompt lookup",
    "sglang": "SGLang",
    "llama-cpp": "llama.cpp",
}


def best_speed_up(rows: Rows, drafter: str, cost: str = _MEASURED, trace: str | None = None) -> float:
    """Over plain decoding at a cost, ours priced by it, another's the best; ``trace`` : None for all."""
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


def _traces(result: Result) -> list[str]:
    return list(dict.fromkeys(row["trace"] for row in result["rows"]))


def curve_section(path: Result, tree: Result) -> str:
    """Against the strongest other drafter at the best of its settings."""
    rows = []
    for (kind, found), cost in product((("paths", path["rows"]), ("trees", tree["rows"])), (_MEASURED, _FREE)):
        ours, theirs = (best_speed_up(found, drafter, cost) for drafter in (OURS, "arctic"))
        over = {
            trace: best_speed_up(found, OURS, cost, trace) / best_speed_up(found, "arctic", cost, trace)
            for trace in _traces(path)
        }
        (worst, least), *_, (best, most) = sorted(over.items(), key=lambda item: item[1])
        row = {"kind": kind, "cost": cost, "ours": ours, "theirs": theirs}
        row["ends"] = f"{least:.2f}x ({worst}) ... {most:.2f}x ({best})"
        if cost == _FREE:
            shares = [each["of_oracle"] for each in found if each["setting"] == f"{PRICED_BY}{cost}"]
            row |= {"least_share": min(shares), "most_share": max(shares)}
        rows.append(row)
    columns: Columns = (
        ("", "{kind}"), ("cost of a pass", "{cost}"), (">ours", "{ours:.2f}x"), (">arctic's", "{theirs:.2f}x"),
        (">ratio by trace", "{ends}"), (">of the best choice", "{least_share:.0%} ... {most_share:.0%}"),
    )  # fmt: skip
    parameters = path["parameters"]
    note = (
        f"Speed-up over plain decoding, proposals left out. {_COSTS} Ours knows the cost of a pass and drafts by it; "
        "arctic is at the best of its settings for each, in hindsight. Of the best choice: tokens a step over those "
        f"of the best {FLAT_WIDTH - 1} tokens among all earlier text, in hindsight. Geometric means: "
        f"{len(_traces(path))} traces, {', '.join(parameters['tokenizers'])}, {parameters['max_output_tokens']:,} "
        f"output tokens, drafts of at most {parameters['draft']['num_speculative_tokens']}. {_origins((path, tree))}."
    )
    return "\n".join([*table(columns, rows), "", note])


_COSTS: Final = (
    f"Cost measured: of the bundled model, 5.4M parameters, on two cores; {_FREE}: a pass of up to {FLAT_WIDTH} "
    "positions costs what a plain one does, as on a device that waits for memory."
)


def others_section(path: Result, tree: Result) -> str:
    """All drafters beside each other, at the best of their settings and as their makers set them."""
    ahead, rows = [], []
    for kind, result in (("paths", path), ("trees", tree)):
        for drafter in dict.fromkeys(row["drafter"] for row in result["rows"]):
            name = f"{_NAMES.get(drafter, drafter)}, {kind}"
            of_it = [
                row for row in result["rows"] if row["drafter"] == drafter and _is_default(drafter, row["setting"])
            ]
            by_setting = [
                [r for r in of_it if r["setting"] == each] for each in dict.fromkeys(r["setting"] for r in of_it)
            ]
            ups = [(_mean(row["speed_up"][_MEASURED] for row in some), some) for some in by_setting]
            row: dict[str, Any] = {"drafter": name}
            row |= {cost: best_speed_up(result["rows"], drafter, cost) for cost in (_MEASURED, _FREE)}
            if ups:
                up, some = max(ups, key=lambda each: each[0])
                tokens = _mean(each["mean_acceptance_length"] for each in some)
                row |= {"setting": some[0]["setting"], "up": up, "tokens": tokens}
            rows.append(row)
            for cost in (_MEASURED, _FREE):
                over = {
                    trace: best_speed_up(result["rows"], drafter, cost, trace)
                    / best_speed_up(result["rows"], OURS, cost, trace)
                    for trace in _traces(path)
                }
                if those := [trace for trace, ratio in over.items() if ratio > 1]:
                    ahead.append(f"{name}, {cost}, by up to {max(over.values()):.2f}x on {', '.join(those)}")
    columns: Columns = (
        ("drafter", "{drafter}"),
        (">speed-up, best settings in hindsight", "{measured:.2f}x"),
        (f">at {_FREE}", f"{{{_FREE}:.2f}}x"),
        ("default", "{setting}"),
        (">speed-up", "{up:.2f}x"),
        (">tokens a step", "{tokens:.2f}"),
    )
    note = (
        f"{_COSTS} Where nothing is said it is the measured one. Default: as its makers set it, of several the best; "
        "vLLM and transformers set no length of drafts. Other settings are the best of many tried on some of these "
        "traces. Ours looks up other requests' prompts, SGLang's too in some settings, Arctic's answers. "
        f"Ahead of ours: {'; '.join(ahead) or 'none'}. {', '.join(path['parameters']['tokenizers'])}, the first "
        f"{path['parameters']['max_output_tokens']:,} output tokens of each trace. {_origins((path, tree))}."
    )
    return "\n".join([*table(columns, rows), "", note])


def _is_default(drafter: str, setting: str) -> bool:
    if drafter == "arctic":
        return setting == ARCTIC_DEFAULT
    return setting == f"{PRICED_BY}{_MEASURED}" if drafter == OURS else setting.startswith(DEFAULT)


def _origins(results: Iterable[Result]) -> str:
    """Dates and commits of what was measured, for people."""
    by_date: dict[str, dict[str, None]] = {}
    for result in sorted(results, key=lambda each: str(each["date"])):
        by_date.setdefault(result["date"], {})[f"`{result['environment']['commit']}`"] = None
    return "; ".join(f"{date} at {', '.join(commits)}" for date, commits in by_date.items())
