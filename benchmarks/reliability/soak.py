"""Test whether a server gives correct answers and does not leak memory for hours under load from many clients.

``python -m benchmarks.reliability --question soak [--seconds S] [--clients N] [--questions N] [--out FILE]``

A real server (bundled model, float32) has three API keys and a small cache, whose text is replaced again and again.
Clients request completions and chats, greedy and sampled, with several choices, stop strings, penalties and grammars,
whole or streamed, some with a ``cache_salt``, and cancel 15 % of them. All other answers are compared (tokens, text and
finish reason) with the answer that the server gave before without drafts. Meanwhile the server's memory is measured. At
the end, no request may be left, and the server must shut down regularly. The last line of stdout is one JSON object.

The exit status is 1 if an answer was changed, a request failed or was left behind, or the median memory of the last
quarter was more than ``--most-growth`` times that of the second quarter.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.reliability.clients import SERVER_OPTIONS, Load, questions
from benchmarks.run import Option, Run
from benchmarks.servers import Server

_KEYS = ("first", "second", "third")
_SERVER = (
    *SERVER_OPTIONS,
    *("--max-num-seqs", "16", "--max-model-len", "512", "--cache-tokens", "131072", "--generation-config", "vllm"),
)
_MUST_BE_ZERO = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "ssd:drafter_failures_total",
    "ssd:failed_passes_total",
    "ssd:integrity_violations_total",
)
OPTIONS = {
    "seconds": Option(default=1800.0, least=0),
    "clients": Option(default=32, help="number of concurrent clients"),
    "questions": Option(default=180, help="number of different requests"),
    "max_tokens": Option(default=32, help="maximum number of tokens per answer"),
    "most_growth": Option(default=1.05, metavar="RATIO", help="maximum memory growth after the second quarter"),
}
COLUMNS: tuple[tuple[str, str], ...] = ()
NOTE = (
    "{parameters[clients]} clients with three API keys sent requests for {parameters[seconds]:.0f} seconds. "
    "{answers:,} answers ({tokens:,} tokens) were compared with plain decoding: {changed} answers differed, and "
    "{failed} requests failed. Clients cancelled {left:,} further requests. In the last quarter of the run, the server "
    "used {growth:.2f} times the memory of the second quarter. The command is `python -m benchmarks.reliability "
    "--question soak`. Measured on {date} on {environment[cpu]}, {environment[cores]} cores."
)


def main(argv: Sequence[str] | None = None) -> int:
    program, under = "reliability --question soak", ("ssd", "server")
    run = Run("soak", __doc__, argv, OPTIONS, unsaid=("most_growth",), program=program, under=under)
    args, memory = run.args, list[tuple[int, float]]()
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        keys = Path(home) / "keys"
        keys.write_text("\n".join(_KEYS) + "\n")
        keys.chmod(0o600)
        server = Server(Path(home) / "server.log", *_SERVER, "--api-key-file", str(keys))
        load = Load(server, keys=_KEYS, salts=("a", "b"))
        try:
            server.start()
            load.questions = questions(server, args.questions, args.max_tokens, _KEYS[0])
            run.say(f"{len(load.questions)} questions answered without drafts")
            began = time.monotonic()
            with load.running(args.clients, seed=0):
                while (passed := time.monotonic() - began) < args.seconds:
                    memory.append((round(passed), round(server.memory_mib(), 1)))
                    time.sleep(min(args.seconds - passed, max(1.0, args.seconds / 120)))
            left_behind, closed_in_order = _left_behind(server), server.terminate()
        finally:
            server.kill()
        num_tracebacks = server.new_log().count("Traceback")
    found = {
        "answers": load.counts["right"] + load.counts["changed"],
        "tokens": load.num_tokens,
        "changed": load.counts["changed"],
        "left": load.counts["cancelled"],
        "failed": load.counts["failed"] + num_tracebacks,
        "left_behind": left_behind,
        "closed_in_order": closed_in_order,
        "growth": _growth([mib for _, mib in memory]),
    }
    run.say("\n".join([*load.failures[:20], *(f"{name:<16} {value}" for name, value in found.items())]))
    is_wrong = bool(found["changed"] or found["failed"] or left_behind) or not closed_in_order
    return run.end(**found, memory_mib=memory, is_wrong=is_wrong or found["growth"] > args.most_growth)


def _growth(memory: Sequence[float]) -> float:
    """Return the server's median memory in the last quarter of the run divided by that in the second quarter.

    The first quarter does not count, because the server has not used all its parts then.
    """
    quarter = max(1, len(memory) // 4)
    second, last = (median(part) for part in (memory[quarter : 2 * quarter] or memory, memory[-quarter:]))
    return round(last / second, 4) if second else 1.0


def _left_behind(server: Server) -> list[str]:
    """Return the metrics that are not 0 although no request runs, after up to 10 s for cancelled requests to end."""
    found: list[str] = []
    for _ in range(50):
        _, text = server.ask("GET", "/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith(_MUST_BE_ZERO)]
        found = [line for line in lines if float(line.rpartition(" ")[2])]
        if not found:
            break
        time.sleep(0.2)
    return found
