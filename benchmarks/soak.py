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

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load import SERVER_OPTIONS, Load, Traffic, questions
from benchmarks.processes import Server
from benchmarks.run import Option, Run

_KEYS = ("first", "second", "third")
_SERVER = (
    *SERVER_OPTIONS,
    *("--max-num-seqs", "16", "--max-model-len", "512", "--cache-tokens", "131072", "--generation-config", "vllm"),
)
_MUST_BE_ZERO = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "ssd:drafter_failures_total", "ssd:failed_passes_total",
    "ssd:integrity_violations_total",
)  # fmt: skip


OPTIONS = {
    "seconds": Option(default=1800.0, least=0),
    "clients": Option(default=32, help="at once"),
    "questions": Option(default=180, help="different ones"),
    "max_tokens": Option(default=32, help="of each answer"),
    "most_growth": Option(default=1.05, metavar="RATIO", help="of memory"),
    "server_option": Option(default=[], metavar="OPTION", help="more of the server's"),
}


COLUMNS: tuple[tuple[str, str], ...] = ()
NOTE = (
    "`python -m benchmarks.soak` on {date}, {environment[cpu]}, {environment[cores]} cores: {parameters[seconds]:.0f} "
    "seconds, {parameters[clients]} clients under three keys. {answers:,} answers ({tokens:,} tokens) were compared "
    "with the engine called directly without drafts: {changed} changed, {failed} failed; {left:,} were left before "
    "they ended. Memory of the last quarter was {growth:.2f} of the second's."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, print. Returns the exit status."""
    run = Run("soak", __doc__, argv, OPTIONS, unsaid=("most_growth", "server_option"), under=("ssd", "server"))
    args = run.args
    asked = questions(args.questions, args.max_tokens)
    run.say(f"{len(asked)} questions answered by the engine called directly")
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        keys = Path(home) / "keys"
        keys.write_text("\n".join(_KEYS) + "\n")
        keys.chmod(0o600)
        server = Server(Path(home) / "server.log", *_SERVER, "--api-key-file", str(keys), *args.server_option)
        load = Load(server, asked, Traffic(keys=_KEYS, salts=("a", "b")))
        try:
            server.start()
            memory = _soak(load, args, run)
            left_behind = _left_behind(server)
            closed_in_order = server.terminate()
        finally:
            server.kill()
        log = (Path(home) / "server.log").read_text()
    result: dict[str, Any] = {
        "answers": load.counts["right"] + load.counts["changed"],
        "tokens": load.num_tokens,
        "changed": load.counts["changed"],
        "left": load.counts["cancelled"],
        "failed": load.counts["failed"],
        "kinds": {kind: load.kinds[kind] for kind in dict.fromkeys(question.kind for question in asked)},
        "left_behind": left_behind,
        "closed_in_order": closed_in_order,
        "tracebacks": log.count("Traceback"),
        "memory_mib": memory,
        "growth": round(_growth(memory), 4),
    }
    for name, value in result.items():
        run.say(f"{name:<16} {value if name != 'memory_mib' else (memory[0], memory[-1])}")
    for failure in load.failures:
        run.say(failure)
    failed = result["changed"] or result["failed"] or left_behind or result["tracebacks"] or not closed_in_order
    return run.end(**result, is_wrong=bool(failed) or result["growth"] > args.most_growth)


def _soak(load: Load, args: Any, run: Run) -> list[tuple[int, float]]:
    """(second, MiB) while the clients ask, about 120 times."""
    began, memory, printed = time.monotonic(), [], 0.0
    with load.running(args.clients, seed=0):
        while (passed := time.monotonic() - began) < args.seconds:
            memory.append((round(passed), round(load.server.memory_mib(), 1)))
            if passed - printed >= 60:
                printed = passed
                run.say(f"{passed:6.0f} s {load.counts['right']:7,} right {memory[-1][1]:8.1f} MiB")
            time.sleep(min(args.seconds - passed, max(1.0, args.seconds / 120)))
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


if __name__ == "__main__":
    sys.exit(main())
