"""One fleet on one stream of requests: the unit of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final, Literal

import numpy as np

from benchmarks.fleet.drafts import counted, make_ready, replay
from benchmarks.fleet.full import Fleet
from benchmarks.fleet.told import guesses
from benchmarks.fleet.traffic import ROUTINGS, Load, Request, Routing, Session, places_of, requests_of
from benchmarks.fleet.views import Isolated, Lagging, OneCache, View
from benchmarks.peers.walk import Steps
from benchmarks.replay.settings import MEASURED_PATH
from benchmarks.traces import TraceTokenizer, find_tokenizer, find_trace, read_records, read_sessions, trace_name
from benchmarks.workloads import snippets
from cache_builder.evaluation.costs import read_curve, speed_up
from cache_builder.evaluation.log import Row
from ssd.bundled import MODEL_PATH
from ssd.config import IndexConfig
from ssd.retrieval.segment_store import LearnedState
from ssd.text.codec import TextCodec

MADE: Final = "python"
"""What the traffic is called that needs no trace."""

Kind = Literal["one", "log", "isolated"]

_CAPACITY: Final = 1 << 25
_LARGEST_ID: Final = 1 << 20


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
        "speed_up": round(speed_up(counts.num_output_tokens, counts.steps_by_drafted, read_curve(MEASURED_PATH)), 4),
        "traces": _by_trace(requests, steps),
        "requests": len(requests),
        "span_s": round(max(request.end for request in requests), 1),
        **({"entries": view.told.num_entries, "tokens": view.told.num_tokens} if isinstance(view, Lagging) else {}),
    }


def compare_with_whole(stream: Stream, replicas: int, lag_s: float) -> dict[str, Any]:
    """The shortcut beside replicas that store everything: equal steps, and what their connections carried.

    Its "entries" are those of whole replicas, and of the shortcut where each replica has a filter of its own, to be
    equal; "one_filter" says how the one filter for all that the shortcut has differs from those, see ``told.guesses``.
    """
    requests = requests_of(_sessions(stream), stream.load(replicas))
    places = places_of(requests, replicas, "random", stream.seed)
    whole = Fleet(replicas, lag_s, _config(), vocab_size=_LARGEST_ID, max_tokens=_CAPACITY)
    shortcut = Lagging(replicas, lag_s, _config())
    found, same = [], 0
    for view in (whole, shortcut):
        found.append(replay(requests, places, view, make_ready()))
    for (_, one), (_, other) in zip(*found, strict=True):
        same += np.array_equal(one.accepted, other.accepted) and np.array_equal(one.drafted, other.drafted)
    accepted = [
        (counts := counted(requests, steps)).num_accepted_tokens / max(1, counts.num_verify_steps) for steps in found
    ]
    written = sum(replica.written.commands["XADD"] for replica in whole.replicas)
    read = sum(replica.reader.num_received + replica.reader.num_known for replica in whole.replicas)
    guessed = guesses(requests, places, replicas, lag_s, _config())
    return {
        "replicas": replicas,
        "lag_s": lag_s,
        "requests": len(requests),
        "accepted_per_step": [round(value, 5) for value in accepted],
        "same_steps": round(same / max(1, len(found[0])), 4),
        "entries": [written, guessed.pop("entries")],
        "one_filter": {"entries": shortcut.told.num_entries, **guessed},
        "sent_bytes": round(_bytes(replica.written for replica in whole.replicas) / written, 1),
        "read_bytes": round(_bytes(replica.read for replica in whole.replicas) / read, 1),
        "receive_us": round(1e6 * sum(replica.receive_s for replica in whole.replicas) / read, 1),
        "tokens_of_an_entry": round(shortcut.told.num_tokens / shortcut.told.num_entries, 1),
    }


def requests_per_s(stream: Stream) -> float:
    """Of one replica that is as busy as it is asked to be."""
    rows = [row for session in _sessions(stream) for row in session.rows]
    return stream.concurrency * stream.tokens_per_s * len(rows) / sum(len(row.output) for row in rows)


def _bytes(traffic: Iterator[Any]) -> int:
    return sum(each.sent_bytes + each.received_bytes for each in traffic)


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
