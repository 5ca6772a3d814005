"""Does a server stay right and small for hours? Every kind of request from many clients, every answer compared.

``python -m benchmarks.soak [--seconds S] [--clients N] [--questions N] [--out FILE] [--json]``

A real server (bundled model, float32) with three keys, a small cache that fills and turns over, and clients that ask
for completions and chats, greedy and sampled, with several choices, stops, penalties and grammars, whole or streamed,
some with a ``cache_salt``; 15 % of the answers are left before they end. Every other answer is compared, tokens, text
and reason, with what the server said before, asked alone and without drafts. Meanwhile the server's memory is read. At
the end it must have ended all requests and close in order.

Exit status 1 where an answer was changed, a request failed, something was left behind, or memory grew: of the last
quarter by more than 5 % (``--most-growth``) above that of the second.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load import SERVER_OPTIONS, Load, questions
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
}
COLUMNS: tuple[tuple[str, str], ...] = ()
NOTE = (
    "{parameters[clients]} clients with three API keys sent requests for {parameters[seconds]:.0f} seconds. "
    "{answers:,} answers ({tokens:,} tokens) were compared with plain decoding: {changed} answers differed, and "
    "{failed} requests failed. Clients cancelled {left:,} further requests. In the last quarter of the run, the server "
    "used {growth:.2f} times the memory of the second quarter. The command is `python -m benchmarks.soak`. Measured on "
    "{date} on {environment[cpu]}, {environment[cores]} cores."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, print. Returns the exit status."""
    run = Run("soak", __doc__, argv, OPTIONS, unsaid=("most_growth",), under=("benchmarks/load.py", "ssd", "server"))
    found = soak(run)
    for name, value in found.items():
        run.say(f"{name:<16} {value if name != 'memory_mib' else (value[0], value[-1])}")
    is_wrong = found["changed"] or found["failed"] or found["left_behind"] or not found["closed_in_order"]
    return run.end(**found, is_wrong=bool(is_wrong) or found["growth"] > run.args.most_growth)


def soak(run: Run) -> dict[str, Any]:
    """What clients got of a server."""
    args, memory = run.args, list[tuple[int, float]]()
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        keys = Path(home) / "keys"
        keys.write_text("\n".join(_KEYS) + "\n")
        keys.chmod(0o600)
        server = Server(Path(home) / "server.log", *_SERVER, "--api-key-file", str(keys))
        load = Load(server, keys=_KEYS, salts=("a", "b"))
        try:
            server.start()
            load.questions = asked = questions(server, args.questions, args.max_tokens, _KEYS[0])
            run.say(f"{len(asked)} questions answered without drafts")
            began = time.monotonic()
            with load.running(args.clients, seed=0):
                while (passed := time.monotonic() - began) < args.seconds:
                    memory.append((round(passed), round(server.memory_mib(), 1)))
                    time.sleep(min(args.seconds - passed, max(1.0, args.seconds / 120)))
            left_behind = _left_behind(server)
            closed_in_order = server.terminate()
        finally:
            server.kill()
        log = (Path(home) / "server.log").read_text()
    for failure in load.failures:
        run.say(failure)
    return {
        "answers": load.counts["right"] + load.counts["changed"],
        "tokens": load.num_tokens,
        "changed": load.counts["changed"],
        "left": load.counts["cancelled"],
        "failed": load.counts["failed"] + log.count("Traceback"),
        "left_behind": left_behind,
        "closed_in_order": closed_in_order,
        "memory_mib": memory,
        "growth": _growth([mib for _, mib in memory]),
    }


def _growth(memory: Sequence[float]) -> float:
    """Memory of the last quarter over that of the second, when all has been at work once."""
    quarter = max(1, len(memory) // 4)
    second, last = (median(part) for part in (memory[quarter : 2 * quarter] or memory, memory[-quarter:]))
    return round(last / second, 4) if second else 1.0


def _left_behind(server: Server) -> list[str]:
    """Counts that should be 0 when nobody asks any more; what was left early may take a moment to end."""
    found: list[str] = []
    for _ in range(50):
        _, text = server.ask("GET", "/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith(_MUST_BE_ZERO)]
        found = [line for line in lines if float(line.rpartition(" ")[2])]
        if not found:
            break
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    sys.exit(main())
