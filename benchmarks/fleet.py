"""Do replicas with one log draft as well as one cache would?

``python -m benchmarks.fleet [--traces TRACE...] [--tokenizer DIR] [--replicas N...] [--lags S...] [--plot PNG]``

Recorded sessions of all traces arrive at a fleet in virtual time, mixed, at a rate that keeps every replica as busy as
any; a request is drafted for from what its replica knows when it arrives, and learned when it ends. What is accepted is
compared with one cache for all and with caches that share nothing. Prints a table; the last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import groupby, islice
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from benchmarks.fleet_views import (
    ROUTINGS,
    Isolated,
    Lagging,
    Load,
    OneCache,
    Request,
    Routing,
    Session,
    View,
    places_of,
    requests_of,
)
from benchmarks.run import Option, Run
from benchmarks.traces import (
    TraceTokenizer,
    all_traces,
    find_tokenizer,
    find_trace,
    read_records,
    read_sessions,
    trace_name,
)
from benchmarks.walk import Counts, Proposal, Steps, walk
from benchmarks.workloads import snippets
from cache_builder.evaluation.costs import read_curve, speed_up
from cache_builder.evaluation.log import Row
from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, IndexConfig
from ssd.drafting import Drafter, make_drafter
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.errors import ConfigError
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot
from ssd.text.codec import TextCodec

MAX_DRAFT: Final = 16


def make_ready() -> Drafter:
    """Our drafter, its kernels compiled."""
    drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=MAX_DRAFT))
    getattr(drafter, "warm_up", lambda: None)()
    return drafter


def replay(
    requests: Sequence[Request],
    places: Sequence[int],
    view: View,
    drafter: Drafter,
    judges: Sequence[LearnedState] = (),
) -> list[tuple[int, Steps]]:
    """The steps of each scored request, by its number. Requests that end are learned before others arrive.

    ``judges`` : what each replica has learned of how likely drafts are; without, all replicas learn that together.
    """
    ends = sorted(range(len(requests)), key=lambda number: requests[number].end)
    next_end, found = 0, list[tuple[int, Steps]]()
    for number, request in enumerate(requests):
        while next_end < len(ends) and requests[ends[next_end]].end <= request.arrival:
            _learn(requests[ends[next_end]], places[ends[next_end]], view)
            next_end += 1
        if request.is_scored:
            judge = judges[places[number]] if judges else None
            asker = _Asker(drafter, str(number), request, view.snapshot(places[number], request.arrival), judge)
            found.append((number, walk(request.text.tolist(), len(request.row.context), [asker])[0]))
            drafter.finish(str(number))
    for number in ends[next_end:]:
        _learn(requests[number], places[number], view)
    return found


def counted(requests: Sequence[Request], steps: Sequence[tuple[int, Steps]]) -> Counts:
    """All steps together; every output is checked to be whole."""
    counts = Counts()
    for number, one in steps:
        counts.add(one, len(requests[number].row.output))
    return counts


def _learn(request: Request, place: int, view: View) -> None:
    view.learn(place, request.end, request.text, len(request.row.context))


class _Asker:
    """The drafter on one request, with what its replica knew when it arrived."""

    def __init__(
        self, drafter: Drafter, request_id: str, asked: Request, snapshot: Snapshot, judge: LearnedState | None
    ) -> None:
        self._drafter, self._request_id, self._text = drafter, request_id, asked.text
        self._prompt_length, self._snapshot, self._judge = len(asked.row.context), snapshot, judge
        self._draft: Draft | None = None

    def ask(self, position: int) -> Proposal:
        request = DraftRequest(
            self._request_id,
            self._text[:position],
            self._prompt_length,
            self._snapshot,
            MAX_DRAFT,
            learned=self._judge,
        )
        self._draft = self._drafter.propose([request])[0]
        return Proposal(0, self._draft.token_ids.tolist())

    def tell(self, num_accepted: int) -> None:
        assert self._draft is not None
        self._drafter.observe(self._request_id, self._draft, num_accepted)


_ISOLATED = "each its own cache"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accepted tokens a step as a share of one cache's; a line for each lag, one for caches that share nothing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(1, len(ROUTINGS), figsize=(9, 3.8), sharey=True, layout="constrained")
    replicas = sorted({row["replicas"] for row in rows if row["kind"] != "one"})
    for axis, routing in zip(axes, ROUTINGS, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["kind"] == "one" or row["routing"] != routing or row["judges"] != "together":
                continue
            name = _ISOLATED if row["kind"] == "isolated" else f"log, {row['lag_s']:g} s"
            lines.setdefault(name, []).append((row["replicas"], 100 * row["share"]))
        for name, points in lines.items():  # in the order of the lags
            style = {"color": "black", "linestyle": "--"} if name == _ISOLATED else {}
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(replicas, [str(count) for count in replicas])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(f"{routing} routing", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    figure.supxlabel("replicas", fontsize=10)
    figure.supylabel("% of one cache's accepted tokens per step", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


MADE: Final = "python"
"""What the traffic is called that needs no trace."""

Kind = Literal["one", "log", "isolated"]

_CAPACITY: Final = 1 << 25
_COST: Final = Path(__file__).parent / "results" / "verify-cost.json"
"""What passes were measured to take, by `benchmarks.replay.measure_cost`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fleet. ``kind`` : one cache for all, a log that lags ``lag_s``, or each its own cache.

    ``judges`` : "together": acceptance is learned by all from all; "each": by each replica from its own requests.
    """

    kind: Kind
    replicas: int
    routing: Routing = "sticky"
    lag_s: float = 0.0
    judges: Literal["together", "each"] = "together"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Where requests come from and how. ``share`` : of the sessions of each trace, the first so many."""

    traces: tuple[str, ...]
    tokenizer: str | None
    share: float
    concurrency: float
    tokens_per_s: float
    think_s: float
    scored: float
    seed: int

    def load(self, replicas: int) -> Load:
        """What a fleet of so many is asked."""
        return Load(
            replicas=replicas,
            concurrency=self.concurrency,
            tokens_per_s=self.tokens_per_s,
            think_s=self.think_s,
            scored=self.scored,
            seed=self.seed,
        )


def cases_of(replicas: Sequence[int], lags_s: Sequence[float], judged: int) -> list[Case]:
    """The grid. ``judged`` : replicas of the fleet whose replicas also judge drafts each by itself, at 0.5 s."""
    found: list[Case] = []
    for count in replicas:
        found.append(Case(kind="one", replicas=count))
        if count == 1:
            continue
        for routing in ROUTINGS:
            found += [Case(kind="log", replicas=count, routing=routing, lag_s=lag_s) for lag_s in lags_s]
            found.append(Case(kind="isolated", replicas=count, routing=routing))
            if count == judged:
                found.append(Case(kind="log", replicas=count, routing=routing, lag_s=0.5, judges="each"))
    return found


def run(stream: Stream, case: Case) -> dict[str, Any]:
    """What a case's steps accept, over all and by trace, and what it writes to its log."""
    requests = requests_of(_sessions(stream), stream.load(case.replicas))
    places = places_of(requests, case.replicas, case.routing, stream.seed)
    view = _view(case)
    judges = [LearnedState() for _ in range(case.replicas)] if case.judges == "each" else []
    steps = replay(requests, places, view, make_ready(), judges)
    counts = counted(requests, steps)
    return {
        "kind": case.kind,
        "replicas": case.replicas,
        "routing": None if case.kind == "one" else case.routing,
        "lag_s": case.lag_s if case.kind == "log" else None,
        "judges": case.judges,
        "output_tokens": counts.num_output_tokens,
        "verify_steps": counts.num_verify_steps,
        "accepted_per_step": round(counts.num_accepted_tokens / max(1, counts.num_verify_steps), 5),
        "drafted_per_step": round(counts.num_drafted_tokens / max(1, counts.num_verify_steps), 4),
        "speed_up": round(speed_up(counts.num_output_tokens, counts.steps_by_drafted, read_curve(_COST)), 4),
        "traces": _by_trace(requests, steps),
        "requests": len(requests),
        "span_s": round(max(request.end for request in requests), 1),
        **({"entries": view.told.num_entries, "tokens": view.told.num_tokens} if isinstance(view, Lagging) else {}),
    }


def _view(case: Case) -> View:
    if case.kind == "one":
        return OneCache(_config())
    if case.kind == "isolated":
        return Isolated(case.replicas, _config())
    return Lagging(case.replicas, case.lag_s, _config())


def _config() -> IndexConfig:
    """Room for everything, without marks of what was of use: nothing is evicted, in one cache as in many."""
    return IndexConfig(capacity_tokens=_CAPACITY, eviction="fifo")


def _by_trace(requests: Sequence[Request], steps: Sequence[tuple[int, Steps]]) -> dict[str, float]:
    sums: dict[str, list[int]] = {}
    for number, one in steps:
        both = sums.setdefault(requests[number].trace, [0, 0])
        both[0] += int(one.accepted.sum())
        both[1] += len(one.accepted)
    return {trace: round(accepted / max(1, count), 5) for trace, (accepted, count) in sorted(sums.items())}


@lru_cache(maxsize=2)
def _sessions(stream: Stream) -> list[Session]:
    """Raises ConfigError."""
    if stream.traces == (MADE,):
        return _made(stream.share)
    assert stream.tokenizer is not None
    tokenizer = TraceTokenizer(find_tokenizer(stream.tokenizer))
    found: list[Session] = []
    for trace in map(find_trace, stream.traces):
        count = sum(1 for _ in groupby(read_records(trace), key=itemgetter("session")))
        sessions = islice(read_sessions(read_records(trace), tokenizer), max(1, int(stream.share * count)))
        found += [Session(trace_name(trace), rows) for rows in sessions]
    return found


def _made(share: float) -> list[Session]:
    """Pieces of Python's library, each half continued, and all of them again."""
    codec = TextCodec.load(str(MODEL_PATH))
    texts = [np.array(codec.encode_prompt(piece), np.int32) for piece in snippets(0)]
    rows = [Row(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    rows = rows[: max(1, int(share * len(rows)))]
    return [Session(MADE, [row]) for _ in range(2) for row in rows]


_MARK_REPLICAS = 64


OPTIONS: dict[str, Any] = {
    "traces": Option(default=[], metavar="TRACE", help=f"files, or names in $SSD_TRACES; {MADE} needs none"),
    "tokenizer": Option(default=None, metavar="DIR", help="with tokenizer.json, or a name in $SSD_TOKENIZERS"),
    "replicas": Option(default=[1, 2, 4, 16, 64, 256], metavar="N"),
    "lags": Option(default=[0.0, 0.1, 0.5, 2.0, 10.0], least=0, metavar="S", help="seconds"),
    "concurrency": Option(default=8.0, help="requests that a replica runs"),
    "tokens_per_s": Option(default=50.0, help="of one request"),
    "think_s": Option(default=2.0, help="mean seconds between turns"),
    "scored": Option(default=0.1, help="share of sessions that are drafted for"),
    "share": Option(default=1.0, help="of each trace's sessions, the first so many"),
    "seed": 0,
    "jobs": Option(default=2, help="processes"),
    "plot": Option(default=None, kind=Path, metavar="PNG", help="draw the shares"),
}
COLUMNS = (
    (">replicas", "{replicas}"),
    ("routing", "{routing}"),
    ("knows", "{kind} {lag_s}"),
    ("judges", "{judges}"),
    (">accepted a step", "{accepted_per_step:.4f}"),
    (">share", "{share:.1%}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 for what cannot be run."""
    bench = Run("fleet", __doc__, argv, OPTIONS, COLUMNS, unsaid=("jobs", "plot"))
    args = bench.args
    try:
        stream = _stream(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bench.parameters |= {
        **asdict(stream),
        "traces": [trace_name(Path(trace)) for trace in stream.traces],
        "tokenizer": None if stream.tokenizer is None else Path(stream.tokenizer).name,
        "lags_s": list(args.lags),
    }
    for row in _run_all(stream, cases_of(args.replicas, args.lags, _MARK_REPLICAS), args.jobs):
        ones = (each for each in bench.rows if each["kind"] == "one" and each["replicas"] == row["replicas"])
        one = next(ones, row)
        row["share"] = round(row["accepted_per_step"] / one["accepted_per_step"], 5)
        row["trace_shares"] = {
            trace: round(accepted / one["traces"][trace], 4) if one["traces"][trace] else 1.0
            for trace, accepted in row["traces"].items()
        }
        bench.row(row)
    if args.plot is not None:
        draw(bench.rows, args.plot)
    return bench.end(rows=bench.rows)


def _stream(args: argparse.Namespace) -> Stream:
    """Raises ConfigError."""
    traces = args.traces or all_traces()
    if traces != [MADE]:
        if args.tokenizer is None:
            raise ConfigError("traces need --tokenizer: a directory with tokenizer.json, or a name in $SSD_TOKENIZERS")
        find_tokenizer(args.tokenizer)
        for trace in traces:
            find_trace(trace)
    names = ("tokenizer", "share", "concurrency", "tokens_per_s", "think_s", "scored", "seed")
    return Stream(traces=tuple(traces), **{name: getattr(args, name) for name in names})


def _run_all(stream: Stream, cases: Sequence[Case], num_jobs: int) -> Iterator[dict[str, Any]]:
    """In order, as if there were one process."""
    if num_jobs == 1:
        yield from map(partial(run, stream), cases)
        return
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        yield from pool.map(partial(run, stream), cases)


if __name__ == "__main__":
    sys.exit(main())
