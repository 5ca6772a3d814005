"""How much of a smaller cache's use does `ssd-cache prune --logs` keep, beside keeping the newest or any text?

``python -m benchmarks.pruning [TRACE...] --tokenizer DIR [--share X...] [--out FILE] [--json]``

Of every trace the sessions are shuffled; three fifths become a cache, one fifth the logs that prune it, and one fifth
is held out and decoded over what is left, which learns nothing. Default are all traces in $SSD_TRACES. "used" keeps
what the logs draft from, "newest" what is left without logs, "random" blocks drawn at random. Every cache is checked to
keep within its budget. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks.environment import head
from benchmarks.replay.stream import limited, shuffled
from benchmarks.traces import (
    TraceTokenizer,
    all_traces,
    find_tokenizer,
    find_trace,
    read_records,
    read_sessions,
    trace_name,
)
from cache_builder.commands.prune import Budget, Said, prune, said_from
from cache_builder.evaluation.costs import flat
from cache_builder.evaluation.log import Log, Row
from cache_builder.evaluation.runs import Run, execute
from cache_builder.held import open_held
from ssd.config import DraftConfig, IndexConfig
from ssd.retrieval.packed import Tokens
from ssd.retrieval.prefixes import PrefixFilter
from ssd.retrieval.static import StaticWriter

FINGERPRINT = "0" * 32
WAYS = ("used", "newest", "random")


class AnyText(Said):
    """Credits drawn at random, in the place of what was said."""

    def __init__(self, seed: int) -> None:
        super().__init__([])
        self._random = np.random.default_rng(seed)

    def place(self, tokens: Tokens, start: int, credits: Any) -> None:
        """All blocks anew: only the last call counts."""
        credits[:] = self._random.permutation(len(credits))


def log_of(rows: Sequence[Row]) -> Log:
    """The rows as a log."""
    texts = [row.text() for row in rows]
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    return Log(np.concatenate(texts), starts, np.array([len(row.context) for row in rows], np.int64))


def write_cache(directory: Path, rows: Sequence[Row]) -> None:
    """What a server would have learned of the rows."""
    index = IndexConfig()
    known = PrefixFilter(index.dedup_block_tokens, index.lead_in_tokens)
    with StaticWriter(directory, fingerprint=FINGERPRINT) as writer:
        for row in rows:
            for piece in known.pieces(row.text(), len(row.context), writer.num_tokens):
                writer.append(piece)


def tokens_per_step(directory: Path | None, log: Log) -> float:
    """Of the log, decoded over a cache that learns nothing; None: over none."""
    run = Run(
        curve=flat(32), draft=DraftConfig(), index=IndexConfig(), fingerprint=FINGERPRINT,
        cache="none" if directory is None else "frozen", warm=() if directory is None else (directory,),
    )  # fmt: skip
    found = execute(run, log)
    return int(log.output_lengths[found.requests].sum()) / max(1, int(found.num_steps.sum()))


def measure(trace: str, options: argparse.Namespace) -> dict[str, Any]:
    """One trace: its figures by share and way of keeping."""
    path = find_trace(trace)
    tokenizer = TraceTokenizer(find_tokenizer(options.tokenizer))
    sessions = list(
        limited(shuffled(read_sessions(read_records(path), tokenizer), options.seed), options.output_tokens)
    )
    cuts = [len(sessions) * fifths // 5 for fifths in (0, 3, 4, 5)]
    stored, logged, held_out = (
        [row for session in sessions[begin:end] for row in session] for begin, end in pairwise(cuts)
    )
    log, judged = log_of(logged), log_of(held_out)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        write_cache(whole, stored)
        size = open_held([whole])[0].num_tokens
        ways: dict[str, Callable[[], Said] | None] = {
            "used": lambda: said_from(whole, log, FINGERPRINT), "newest": None, "random": lambda: AnyText(options.seed),
        }  # fmt: skip
        result: dict[str, Any] = {
            "trace": trace_name(path), "cache_tokens": size, "held_out_tokens": int(judged.output_lengths.sum()),
            "none": round(tokens_per_step(None, judged), 4), "whole": round(tokens_per_step(whole, judged), 4),
            "shares": {},
        }  # fmt: skip
        for share in options.share:
            figures = {}
            for way, find_said in ways.items():
                out = Path(folder) / f"{way}-{share}"
                pruned = prune(whole, out, Budget(int(share * size), is_bytes=False), find_said=find_said)
                if not pruned.num_tokens == open_held([out])[0].num_tokens <= share * size:
                    raise AssertionError(f"{trace}: {pruned.num_tokens} tokens are kept of {size}, at most {share}")
                figures[way] = round(tokens_per_step(out, judged), 4)
            result["shares"][str(share)] = figures
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--tokenizer", required=True, metavar="DIR")
    parser.add_argument("--share", nargs="+", type=float, default=[0.5, 0.25], metavar="X", help="of the cache kept")
    parser.add_argument("--output-tokens", type=int, default=200_000, metavar="N", help="of a trace at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="no table")
    options = parser.parse_args(arguments)
    rows = []
    for trace in options.traces or all_traces():
        rows.append(measure(trace, options))
        if not options.json:
            print(line(rows[-1]), flush=True)
    kept = {
        str(share): {
            way: round(geometric_mean(row["shares"][str(share)][way] / row["whole"] for row in rows), 4) for way in WAYS
        }
        for share in options.share
    }
    none = round(geometric_mean(row["none"] / row["whole"] for row in rows), 4)
    parameters = {
        "tokenizer": Path(options.tokenizer).name,
        "output_tokens": options.output_tokens,
        "seed": options.seed,
    }
    result = {**head("pruning"), "parameters": parameters, "kept": kept, "none": none, "rows": rows}
    if not options.json:
        print(f"tokens a step as a share of the whole cache's, geometric means: {kept}, no cache {none}")
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 0


def line(row: dict[str, Any]) -> str:
    """A trace as a line of text."""
    shares = "; ".join(
        f"{share}: " + ", ".join(f"{way} {figure:.3f}" for way, figure in found.items())
        for share, found in row["shares"].items()
    )
    ends = f"none {row['none']:.3f}, whole {row['whole']:.3f}"
    return f"{row['trace']:<18} {row['cache_tokens']:>9,} tokens, {ends}; {shares}"
