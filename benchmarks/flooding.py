"""Does text that nobody needs push out what everybody drafts from? Traffic, a flood of random tokens, traffic again.

``python -m benchmarks.flooding [--traces TRACE...] [--tokenizer DIR] [--cache-tokens N] [--flood N...] [--small N...]``

For every policy of eviction and every trace, on an empty cache: the trace is replayed twice, which is how much a step
emits while the cache is young, and once it is known; then, for every flood, so many random tokens are stored, as
prompts that came once, and the trace is replayed again. After that, without any flood, each trace once through caches
that are too small for it. Default are all traces in $SSD_TRACES; without, the traffic is pieces of Python's library,
each half continued. Every output is checked token by token. Prints tables; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.drafters import OurDrafters, Setting, replay_stream
from benchmarks.orders import Turn, limited, stream
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
from benchmarks.workloads import snippets
from cache_builder.evaluation.log import Row
from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, EvictionPolicy, IndexConfig
from ssd.errors import ConfigError
from ssd.text.codec import TextCodec

MADE = "python"
"""What the traffic is called that needs no trace."""

POLICIES: tuple[EvictionPolicy, ...] = ("fifo", "used")


_FLOOD_PROMPT_TOKENS = 1000
_MAX_DRAFT = 64


def traffic(name: str, tokenizer: str | None, max_output_tokens: int) -> list[Turn]:
    """The requests of a trace, or made ones, in order. Raises ConfigError."""
    if name == MADE:
        return stream(limited(_made_sessions(), max_output_tokens))
    if tokenizer is None:
        raise ConfigError("a trace needs --tokenizer: a directory with tokenizer.json, or a name in $SSD_TOKENIZERS")
    sessions = read_sessions(read_records(find_trace(name)), TraceTokenizer(find_tokenizer(tokenizer)))
    return stream(limited(sessions, max_output_tokens))


def _made_sessions() -> Iterator[list[Row]]:
    codec = TextCodec.load(str(MODEL_PATH))
    for piece in snippets(0):
        text = np.array(codec.encode_prompt(piece), np.int32)
        yield [Row(text[: len(text) // 2], text[len(text) // 2 :])]


def flood(num_tokens: int, vocabulary: int, seed: int) -> Iterator[Turn]:
    """Requests of random tokens, ``num_tokens`` together: long prompts and an output of one token."""
    random = np.random.default_rng(seed)
    for start in range(0, num_tokens, _FLOOD_PROMPT_TOKENS):
        size = min(_FLOOD_PROMPT_TOKENS, num_tokens - start)
        tokens = random.integers(0, vocabulary, max(2, size)).astype(np.int32)
        yield Turn(Row(tokens[:-1], tokens[-1:]), is_scored=False)


def replayed(
    turns: Sequence[Turn], policy: EvictionPolicy, capacity: int, floods: Sequence[int], seed: int = 0
) -> list[float]:
    """Tokens a step of the traffic after each of ``floods``, one after another through one cache; 0 floods nothing.

    Raises AssertionError where an output is not the trace's, or more is stored than may be.
    """
    index = IndexConfig(capacity_tokens=capacity, eviction=policy)
    vocabulary = 1 + max(int(max(turn.row.context.max(initial=0), turn.row.output.max(initial=0))) for turn in turns)
    draft = DraftConfig(num_speculative_tokens=_MAX_DRAFT)
    figures = []
    with OurDrafters([Setting("ssd", policy, _MAX_DRAFT)], draft=draft, index=index) as contender:
        for number, size in enumerate(floods):
            for flooding in flood(size, vocabulary, seed + number):
                contender.learn("", flooding.row)
            counts = replay_stream(turns, contender)[0]
            if contender.num_cached_tokens() > capacity:
                raise AssertionError(f"{contender.num_cached_tokens()} tokens are stored, the capacity is {capacity}")
            figures.append(round(counts.num_output_tokens / max(1, counts.num_verify_steps), 4))
    return figures


OPTIONS = {
    "traces": Option(default=[], metavar="TRACE", help=f"a .jsonl.gz file, a name in $SSD_TRACES, or {MADE}"),
    "tokenizer": Option(default=None, help="of the traces: a directory, or a name in $SSD_TOKENIZERS"),
    "cache_tokens": Option(default=200_000, help="capacity"),
    "flood": Option(default=[266_000, 2_000_000], metavar="N", help="random tokens, in turn"),
    "traffic_tokens": Option(default=20_000, help="most output tokens of the traffic"),
    "small": Option(default=[8192, 32768, 131072], metavar="N", help="capacities without a flood"),
    "small_traffic_tokens": Option(default=60_000, help="most output tokens of that traffic"),
    "seed": 0,
}
COLUMNS = (("trace", "{trace}"), ("policy", "{policy}"), ("tokens a step", "{tokens_per_step}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    run = Run("flooding", __doc__, argv, OPTIONS, COLUMNS)
    args = run.args
    try:
        names = args.traces or (all_traces() if "SSD_TRACES" in os.environ else [MADE])
        known, long = (
            {trace_name(Path(name)): traffic(name, args.tokenizer, most) for name in names}
            for most in (args.traffic_tokens, args.small_traffic_tokens)
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run.parameters |= {
        "traces": list(known),
        "tokenizer": None if args.tokenizer is None else Path(args.tokenizer).name,
    }
    flooded, columns = [], ["young", "known", *(f"after {size:,}" for size in args.flood)]
    for name, turns in known.items():
        for policy in POLICIES:
            found = replayed(turns, policy, args.cache_tokens, (0, 0, *args.flood), args.seed)
            by_column = dict(zip(columns, found, strict=True))
            flooded.append(run.row({"trace": name, "policy": policy, "tokens_per_step": by_column}))
    unflooded = []
    for capacity in args.small:
        for name, turns in long.items():
            by_policy = {policy: replayed(turns, policy, capacity, (0,))[0] for policy in POLICIES}
            row = {"trace": name, "cache_tokens": capacity, "tokens_per_step": by_policy}
            unflooded.append(row)
            run.row({"policy": f"{capacity:,} tokens", **row})
    return run.end(flooded=flooded, unflooded=unflooded)


if __name__ == "__main__":
    sys.exit(main())
