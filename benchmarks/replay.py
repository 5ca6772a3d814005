"""How many tokens does a verify step emit? Drafters replayed on recorded outputs, no model needed.

``python -m benchmarks.replay TRACE... --tokenizer DIR [--drafter NAME]... [--max-draft K] [--json]``

The recorded output is what the target says. Drafting starts at the end of the prompt; a step emits the accepted part
of the draft and one token more. After a row its tokens enter the index, which does its upkeep at once, so nothing is
seen ahead and the counts are the same every time. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe
from benchmarks.traces import Row, TokenIds, TraceTokenizer, find_tokenizer, find_trace, read_records, read_rows
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.drafting import DRAFTER_NAMES, Drafter, DraftRequest, make_drafter
from ssd.errors import ConfigError
from ssd.retrieval.cache import CacheSet, SuffixCache

_NO_FINGERPRINT = "0" * 32


@dataclass(slots=True)
class Counts:
    """What a replay adds up. ``num_accepted_tokens`` leaves out the target's own token of each step."""

    num_output_tokens: int = 0
    num_verify_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    propose_s: list[float] = field(default_factory=list)


def num_agreeing(draft: TokenIds, truth: TokenIds) -> int:
    """Length of the common prefix of ``draft`` and ``truth``."""
    length = min(len(draft), len(truth))
    different = np.flatnonzero(draft[:length] != truth[:length])
    return int(different[0]) if len(different) else length


def replay_row(drafter: Drafter, cache: SuffixCache, row: Row, request_id: str, max_draft: int, counts: Counts) -> None:
    """Decode one recorded output step by step."""
    text = np.concatenate([row.context, row.output])
    position, prompt_length, end = len(row.context), len(row.context), len(text)
    snapshot = cache.snapshot()
    while position < end:
        request = DraftRequest(request_id, text[:position], prompt_length, snapshot, max_draft)
        began = time.perf_counter()
        draft = drafter.propose([request])[0]
        counts.propose_s.append(time.perf_counter() - began)
        # The last token is the target's own: a step always emits one that no draft gave.
        accepted = num_agreeing(draft.token_ids, text[position : end - 1])
        drafter.observe(request_id, draft, accepted)
        counts.num_verify_steps += 1
        counts.num_drafted_tokens += len(draft.token_ids)
        counts.num_accepted_tokens += accepted
        position += accepted + 1
    counts.num_output_tokens += len(row.output)
    drafter.finish(request_id)


def replay(
    rows: Iterable[Row],
    drafter: Drafter,
    *,
    max_draft: int,
    max_output_tokens: int | None = None,
    index: IndexConfig | None = None,
) -> Counts:
    """Replay ``rows`` in order with a fresh index; stops before the row that would exceed ``max_output_tokens``."""
    counts = Counts()
    with CacheSet(CacheConfig(index=index or IndexConfig()), _NO_FINGERPRINT, inline=True) as caches:
        cache = caches.get()
        for number, row in enumerate(rows):
            if max_output_tokens is not None and counts.num_output_tokens + len(row.output) > max_output_tokens:
                break
            replay_row(drafter, cache, row, str(number), max_draft, counts)
            cache.append(np.concatenate([row.context, row.output]), prompt_length=len(row.context))
            cache.maintain()
        counts.num_cached_tokens = cache.snapshot().num_tokens
    if counts.num_output_tokens != counts.num_accepted_tokens + counts.num_verify_steps:
        raise AssertionError(f"tokens do not add up: {counts}")
    return counts


def summary(counts: Counts) -> dict[str, Any]:
    """The figures of one replay, as they stand in the JSON."""
    times_us = np.array(counts.propose_s or [0.0]) * 1e6
    return {
        "output_tokens": counts.num_output_tokens,
        "verify_steps": counts.num_verify_steps,
        "drafted_tokens": counts.num_drafted_tokens,
        "accepted_tokens": counts.num_accepted_tokens,
        "mean_acceptance_length": counts.num_output_tokens / max(1, counts.num_verify_steps),
        "acceptance_rate": counts.num_accepted_tokens / max(1, counts.num_drafted_tokens),
        "propose_us_p50": round(float(np.percentile(times_us, 50)), 1),
        "propose_us_p99": round(float(np.percentile(times_us, 99)), 1),
        "cached_tokens": counts.num_cached_tokens,
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a .jsonl.gz file, or a name in $SSD_TRACES")
    parser.add_argument(
        "--tokenizer", required=True, help="directory with tokenizer.json, or a name in $SSD_TOKENIZERS"
    )
    parser.add_argument("--drafter", action="append", choices=DRAFTER_NAMES, help="may be repeated; default: ssd")
    parser.add_argument("--max-draft", type=int, default=16, metavar="K", help="draft limit in tokens")
    parser.add_argument("--max-output-tokens", type=int, metavar="N", help="stop before the row that would exceed it")
    parser.add_argument("--cache-tokens", type=int, metavar="N", help="capacity of the index")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone, no table")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parse(arguments)
    names = options.drafter or ["ssd"]
    try:
        config = DraftConfig(num_speculative_tokens=options.max_draft)
        index = IndexConfig() if options.cache_tokens is None else IndexConfig(capacity_tokens=options.cache_tokens)
        paths = [find_trace(name) for name in options.traces]
        tokenizer = TraceTokenizer(find_tokenizer(options.tokenizer))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    setting = {"draft": asdict(config), "index": asdict(index), "max_output_tokens": options.max_output_tokens}
    if not options.json:
        print(f"replay: tokenizer {Path(options.tokenizer).name}, {json.dumps(setting)}")
        heads = ("output", "tokens/step", "drafted/step", "accepted", "us p50")
        print(f"{'trace':<20} {'drafter':<14}" + "".join(f" {head:>12}" for head in heads))
    results = []
    for path in paths:
        for name in names:
            drafter = make_drafter(name, config)
            warm_up = getattr(drafter, "warm_up", None)
            if warm_up is not None:
                warm_up()
            rows = read_rows(read_records(path), tokenizer)
            counts = replay(
                rows, drafter, max_draft=options.max_draft, max_output_tokens=options.max_output_tokens, index=index
            )
            figures = summary(counts)
            results.append(
                {
                    "trace": path.name.removesuffix(".jsonl.gz"),
                    "tokenizer": Path(options.tokenizer).name,
                    "drafter": name,
                    "setting": setting,
                    "max_draft": options.max_draft,
                    **figures,
                }
            )
            if not options.json:
                drafted = figures["drafted_tokens"] / max(1, figures["verify_steps"])
                print(
                    f"{results[-1]['trace']:<20} {name:<14} {figures['output_tokens']:>12} "
                    f"{figures['mean_acceptance_length']:>12.3f} {drafted:>12.2f} "
                    f"{figures['acceptance_rate']:>12.3f} {figures['propose_us_p50']:>12}",
                    flush=True,
                )
    print(json.dumps({"benchmark": "replay", "environment": describe(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
