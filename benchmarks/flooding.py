"""Does text that nobody needs push out what everybody drafts from? Traffic, a flood of random tokens, traffic again.

``python -m benchmarks.flooding [TRACE...] [--tokenizer DIR] [--cache-tokens N] [--flood N...] [--policy NAME...]``

For every policy of eviction and every trace, on an empty cache: the trace is replayed twice, which is how much a step
emits while the cache is young, and once it is known; then, for every flood, so many random tokens are stored, as
prompts that came once, and the trace is replayed again. Without $SSD_TRACES the traffic is pieces of Python's library,
each half continued. Every output is checked token by token. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import head
from benchmarks.replay.contenders import OurDrafters
from benchmarks.replay.replaying import replay_stream
from benchmarks.replay.settings import Setting
from benchmarks.replay.stream import Turn, limited, stream
from benchmarks.traces import Row, TraceTokenizer, find_tokenizer, find_trace, read_records, read_sessions
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import EVICTION_POLICIES, DraftConfig, EvictionPolicy, IndexConfig
from ssd.errors import ConfigError
from ssd.text.codec import TextCodec

MADE = "python"
"""What the traffic is called that needs no trace."""

_TRACES = ("agent_react", "agent_tools", "code", "structured_json")
_FLOOD_PROMPT_TOKENS = 1000
_MAX_DRAFT = 64


def traffic(name: str, tokenizer: str | None, max_output_tokens: int) -> list[Turn]:
    """The requests of a trace, or made ones, in order. Raises ConfigError."""
    if name == MADE:
        return stream(limited([_made_rows()], max_output_tokens))
    if tokenizer is None:
        raise ConfigError("a trace needs --tokenizer: a directory with tokenizer.json, or a name in $SSD_TOKENIZERS")
    sessions = read_sessions(read_records(find_trace(name)), TraceTokenizer(find_tokenizer(tokenizer)))
    return stream(limited(sessions, max_output_tokens))


def _made_rows() -> list[Row]:
    codec = TextCodec.load(str(MODEL_PATH))
    texts = [np.array(codec.encode_prompt(text), np.int32) for text in snippets(0)]
    return [Row(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts if len(text) >= 2]


def flood(num_tokens: int, vocabulary: int, seed: int) -> Iterator[Turn]:
    """Requests of random tokens, ``num_tokens`` together: long prompts and an output of one token."""
    random = np.random.default_rng(seed)
    for start in range(0, num_tokens, _FLOOD_PROMPT_TOKENS):
        size = min(_FLOOD_PROMPT_TOKENS, num_tokens - start)
        tokens = random.integers(0, vocabulary, max(2, size)).astype(np.int32)
        yield Turn(Row(tokens[:-1], tokens[-1:]), is_scored=False)


def run(turns: Sequence[Turn], policy: EvictionPolicy, capacity: int, floods: Sequence[int], seed: int) -> list[float]:
    """Tokens a step: young, known, and after every flood. Raises AssertionError where an output is not the trace's."""
    index = IndexConfig(capacity_tokens=capacity, eviction=policy)
    vocabulary = 1 + max(int(max(turn.row.context.max(initial=0), turn.row.output.max(initial=0))) for turn in turns)
    draft = DraftConfig(num_speculative_tokens=_MAX_DRAFT)
    figures = []
    with OurDrafters([Setting("ssd", policy, _MAX_DRAFT)], draft=draft, index=index) as contender:
        for number, size in enumerate((0, 0, *floods)):
            for flooding in flood(size, vocabulary, seed + number):
                contender.learn("", flooding.row)
            counts = replay_stream(turns, contender)[0]
            if contender.num_cached_tokens() > capacity:
                raise AssertionError(f"{contender.num_cached_tokens()} tokens are stored, the capacity is {capacity}")
            figures.append(counts.num_output_tokens / max(1, counts.num_verify_steps))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flooding", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("traces", nargs="*", metavar="TRACE", help=f"a .jsonl.gz file, a name in $SSD_TRACES, or {MADE}")
    add("--tokenizer", help="of the traces: directory with tokenizer.json, or a name in $SSD_TOKENIZERS")
    add("--cache-tokens", type=int, default=200_000, metavar="N", help="capacity (default: %(default)s)")
    add("--flood", type=int, nargs="+", default=[266_000, 2_000_000], metavar="N", help="random tokens, in turn")
    add("--traffic-tokens", type=int, default=20_000, metavar="N", help="most output tokens of the traffic")
    add("--policy", nargs="+", choices=EVICTION_POLICIES, default=EVICTION_POLICIES[::-1])
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args(arguments)
    names = options.traces or (list(_TRACES) if "SSD_TRACES" in os.environ else [MADE])
    parameters = {
        "traces": names,
        "tokenizer": options.tokenizer,
        "cache_tokens": options.cache_tokens,
        "floods": options.flood,
        "traffic_tokens": options.traffic_tokens,
        "policies": list(options.policy),
        "seed": options.seed,
    }
    print(f"flooding: {json.dumps(parameters)}")
    columns = ["young", "known", *(f"after {size:,}" for size in options.flood)]
    print(f"{'tokens a step':<18} {'policy':<8}" + "".join(f" {column:>16}" for column in columns), flush=True)
    rows: list[dict[str, Any]] = []
    try:
        for name in names:
            turns = traffic(name, options.tokenizer, options.traffic_tokens)
            for policy in options.policy:
                found = run(turns, policy, options.cache_tokens, options.flood, options.seed)
                print(f"{name:<18} {policy:<8}" + "".join(f" {figure:>16.3f}" for figure in found), flush=True)
                rows.append(
                    {"trace": name, "policy": policy, "tokens_per_step": dict(zip(columns, found, strict=True))}
                )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    line = json.dumps({**head("flooding"), "parameters": parameters, "rows": rows})
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
