"""Does a server stay right and small for hours? Every kind of request from many clients, every answer compared.

``python -m benchmarks.soak [--seconds S] [--clients N] [--questions N] [--out FILE] [--json]``

A real server (bundled model, float32) with three keys, a small cache that fills and turns over, and clients that ask
for completions and chats, greedy and sampled, with several choices, stops, penalties and grammars, whole or streamed,
some with a ``cache_salt``; 15 % of the answers are left before they end. Every other answer is compared, tokens, text
and reason, with the engine called directly without drafts. Meanwhile
the server's memory is read. At the end the server must have ended all requests and close in order.

Ends with a table and, with --json, one JSON line. Exit status 1 where an answer was changed, a request failed,
something was left behind, or the memory of the last quarter was more than 5 % (``--most-growth``) above that of the
second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.environment import head
from benchmarks.faults.processes import Server
from benchmarks.soak.clients import Client, Tally
from benchmarks.soak.questions import Reference

_KEYS = ("first", "second", "third")
_SERVER = (
    *("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "--max-model-len", "512"),
    *("--cache-tokens", "131072", "--generation-config", "vllm", "--exact", "on"),
)
_MUST_BE_ZERO = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "ssd:drafter_failures_total", "ssd:failed_passes_total",
    "ssd:integrity_violations_total",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, print. Returns the exit status."""
    args = _parser().parse_args(argv)
    reference = Reference()
    questions = reference.questions(args.questions, args.max_tokens)
    print(f"{len(questions)} questions answered by the engine called directly", flush=True)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        keys = Path(home) / "keys"
        keys.write_text("\n".join(_KEYS) + "\n")
        keys.chmod(0o600)
        server = Server(Path(home) / "server.log", *_SERVER, "--api-key-file", str(keys), *args.server_option)
        try:
            server.start()
            clients = [Client(server.port, _KEYS, questions, tally, seed) for seed in range(args.clients)]
            memory = _soak(server, clients, tally, args.seconds)
            left_behind = _left_behind(server)
            closed_in_order = server.terminate()
        finally:
            server.kill()
        log = (Path(home) / "server.log").read_text()
    reference.close()
    result: dict[str, Any] = {
        **head("soak"),
        "parameters": {name: getattr(args, name) for name in ("seconds", "clients", "questions", "max_tokens")},
        "answers": tally.counts["right"] + tally.counts["different"],
        "tokens": tally.num_tokens,
        "changed": len(tally.different),
        "left": tally.counts["left"],
        "failed": tally.counts["failed"],
        "kinds": {kind: tally.counts[kind] for kind in dict.fromkeys(question.kind for question in questions)},
        "left_behind": left_behind,
        "closed_in_order": closed_in_order,
        "tracebacks": log.count("Traceback"),
        "memory_mib": memory,
        "growth": round(_growth(memory), 4),
    }
    changed = [
        f"{one.question.kind}: {one.text!r}, expected {one.question.answers[one.index]}" for one in tally.different
    ]
    _print(result, changed)
    for failure in tally.failures:
        print(f"  failed: {failure}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
    is_good = closed_in_order and not (changed or result["failed"] or left_behind or result["tracebacks"])
    return int(not is_good or result["growth"] > args.most_growth)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=1800, help="(default: 1800)")
    add("--clients", type=int, default=32, help="at once (default: 32)")
    add("--questions", type=int, default=180, help="different ones (default: 180)")
    add("--max-tokens", type=int, default=32, help="of each answer (default: 32)")
    add("--most-growth", type=float, default=1.05, metavar="RATIO", help="of memory (default: 1.05)")
    add("--server-option", action="append", default=[], metavar="OPTION", help="one more of the server's; repeatable")
    add("--out", type=Path, metavar="FILE", help="write the result there as well")
    add("--json", action="store_true", help="end stdout with one JSON line")
    return parser


def _soak(server: Server, clients: Sequence[Client], tally: Tally, seconds: float) -> list[tuple[int, float]]:
    """(second, MiB) while the clients ask, about 120 times."""
    stopping = threading.Event()
    threads = [threading.Thread(target=client.run, args=(stopping,)) for client in clients]
    began, memory, printed = time.monotonic(), [], 0.0
    for thread in threads:
        thread.start()
    try:
        while (passed := time.monotonic() - began) < seconds:
            memory.append((round(passed), round(server.memory_mib(), 1)))
            if passed - printed >= 60:
                printed = passed
                print(f"{passed:6.0f} s {tally.counts['right']:7,} right {memory[-1][1]:8.1f} MiB", flush=True)
            time.sleep(min(seconds - passed, max(1.0, seconds / 120)))
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    return memory


def _growth(memory: Sequence[tuple[int, float]]) -> float:
    """Memory of the last quarter over that of the second, when all has been at work once."""
    quarter = max(1, len(memory) // 4)
    second, last = (
        median(mib for _, mib in part) for part in (memory[quarter : 2 * quarter] or memory, memory[-quarter:])
    )
    return last / second


def _left_behind(server: Server) -> list[str]:
    """Counts that should be 0 when nobody asks any more; what was left early may take a moment to end."""
    found: list[str] = []
    for _ in range(50):
        _, text = server.ask("GET", "/metrics")
        samples = [one for family in text_string_to_metric_families(text.decode()) for one in family.samples]
        found = [f"{one.name} {one.value:g}" for one in samples if one.name in _MUST_BE_ZERO and one.value]
        if not found:
            break
        time.sleep(0.2)
    return found


def _print(result: dict[str, Any], changed: Sequence[str]) -> None:
    print()
    for kind, number in result["kinds"].items():
        print(f"{kind:<24} {number:>8,}")
    for name in ("answers", "tokens", "changed", "left", "failed", "tracebacks"):
        print(f"{name:<24} {result[name]:>8,}")
    first, last = result["memory_mib"][0][1], result["memory_mib"][-1][1]
    print(
        f"memory {first:.0f} MiB at the start, {last:.0f} at the end; last quarter over second {result['growth']:.3f}"
    )
    print(f"left behind: {', '.join(result['left_behind']) or 'nothing'}; closed in order: {result['closed_in_order']}")
    for line in changed[:5]:
        print(f"  changed: {line}"[:600])
