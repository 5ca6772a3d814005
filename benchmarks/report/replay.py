"""The tables of documentation that compare drafters on replayed outputs."""

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
_COST_NAMES: Final = {_MEASURED: "measured on a CPU", _FREE: f"flat up to {FLAT_WIDTH} tokens"}
_NAMES: Final = {
    OURS: "SSD",
    "arctic": "Arctic Inference",
    "vllm-ngram": "vLLM n-gram",
    "prompt-lookup-hf": "transformers prompt lookup",
    "sglang": "SGLang",
    "llama-cpp": "llama.cpp",
}


def best_speed_up(rows: Rows, drafter: str, cost: str = _MEASURED, trace: str | None = None) -> float:
    """Return the geometric mean of a drafter's speed-up over decoding without drafts, at a given cost of passes.

    SSD limits drafts by this cost; other drafters use their best setting for each trace. ``trace`` None means all.
    """
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
    """Return the comparison of SSD with Arctic Inference, the strongest other drafter, at its best settings."""
    rows = []
    for (kind, found), cost in product((("chain", path["rows"]), ("tree", tree["rows"])), (_MEASURED, _FREE)):
        ours, theirs = (best_speed_up(found, drafter, cost) for drafter in (OURS, "arctic"))
        over = {
            trace: best_speed_up(found, OURS, cost, trace) / best_speed_up(found, "arctic", cost, trace)
            for trace in _traces(path)
        }
        (worst, least), *_, (best, most) = sorted(over.items(), key=lambda item: item[1])
        row = {"kind": kind, "cost": _COST_NAMES[cost], "ours": ours, "theirs": theirs}
        row["ends"] = f"{least:.2f}x ({worst}) ... {most:.2f}x ({best})"
        if cost == _FREE:
            shares = [each["of_oracle"] for each in found if each["setting"] == f"{PRICED_BY}{cost}"]
            row |= {"least_share": min(shares), "most_share": max(shares)}
        rows.append(row)
    columns: Columns = (
        ("draft shape", "{kind}"),
        ("verification cost", "{cost}"),
        (">speed-up, SSD", "{ours:.2f}x"),
        (">speed-up, Arctic Inference", "{theirs:.2f}x"),
        (">SSD relative to Arctic, range over traces", "{ends}"),
        (
            ">tokens per step, relative to the best possible draft, range over traces",
            "{least_share:.0%} ... {most_share:.0%}",
        ),
    )
    parameters = path["parameters"]
    note = (
        f"Speed-ups are relative to decoding without drafts; the time of drafting is left out. {_COSTS} SSD takes "
        "this cost into account when it chooses the length of a draft. Arctic Inference uses its best settings for "
        "each trace, selected after the replay. The "
        f"best possible draft has the {FLAT_WIDTH - 1} tokens from earlier text that yield the most accepted tokens. "
        f"Speed-ups are geometric means over {len(_traces(path))} traces with the tokenizers "
        f"{' and '.join(parameters['tokenizers'])}. The replay used at most {parameters['max_output_tokens']:,} output "
        f"tokens per trace and at most {parameters['draft']['num_speculative_tokens']} tokens per draft. Measured on "
        f"{_origins((path, tree))}."
    )
    return "\n".join([*table(columns, rows), "", note])


_COSTS: Final = (
    f"The verification cost `{_COST_NAMES[_MEASURED]}` is that of the bundled model (5.4M parameters) on two cores. "
    f"With `{_COST_NAMES[_FREE]}`, a forward pass of up to {FLAT_WIDTH} tokens costs as much as a pass of one token, "
    "as on a GPU whose memory bandwidth is the limit."
)


def others_section(path: Result, tree: Result) -> str:
    """Return the comparison of all drafters, with their best settings and with their default settings."""
    ahead, rows = [], []
    for kind, result in (("chain", path), ("tree", tree)):
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
                row |= {"up": up, "tokens": tokens}
            rows.append(row)
            for cost in (_MEASURED, _FREE):
                over = {
                    trace: best_speed_up(result["rows"], drafter, cost, trace)
                    / best_speed_up(result["rows"], OURS, cost, trace)
                    for trace in _traces(path)
                }
                if those := [trace for trace, ratio in over.items() if ratio > 1]:
                    ahead.append(f"{name} ({_COST_NAMES[cost]}): up to {max(over.values()):.2f}x, {', '.join(those)}")
    columns: Columns = (
        ("drafter, draft shape", "{drafter}"),
        (f">speed-up, best settings, cost {_COST_NAMES[_MEASURED]}", "{measured:.2f}x"),
        (f">speed-up, best settings, cost {_COST_NAMES[_FREE]}", f"{{{_FREE}:.2f}}x"),
        (f">speed-up, default settings, cost {_COST_NAMES[_MEASURED]}", "{up:.2f}x"),
        (">tokens per forward pass, default settings", "{tokens:.2f}"),
    )
    note = (
        f"{_COSTS} For the columns with the best settings, the best of many settings was selected for each trace after "
        "the replay. Default settings are those of the vendor. vLLM and transformers have no default draft length. SSD "
        "searches the prompts and answers of other requests. Arctic Inference searches only the answers. SGLang "
        "searches the answers, and in some settings the prompts. Traces on which another drafter was faster than SSD: "
        f"{'; '.join(ahead) or 'none'}. The replay used the first {path['parameters']['max_output_tokens']:,} output "
        f"tokens of each trace with the tokenizer {' and '.join(path['parameters']['tokenizers'])}. Measured on "
        f"{_origins((path, tree))}."
    )
    return "\n".join([*table(columns, rows), "", note])


def _is_default(drafter: str, setting: str) -> bool:
    if drafter == "arctic":
        return setting == ARCTIC_DEFAULT
    return setting == f"{PRICED_BY}{_MEASURED}" if drafter == OURS else setting.startswith(DEFAULT)


def _origins(results: Iterable[Result]) -> str:
    by_date: dict[str, dict[str, None]] = {}
    for result in sorted(results, key=lambda each: str(each["date"])):
        by_date.setdefault(result["date"], {})[f"`{result['environment']['commit']}`"] = None
    return "; ".join(f"{date} at {', '.join(commits)}" for date, commits in by_date.items())
