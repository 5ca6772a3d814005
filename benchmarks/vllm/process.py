"""One vLLM engine behind pipes: ``python -m benchmarks.vllm.process``, run by the environment of ``make bench-vllm``.

Each line of stdin is a JSON object with an "op"; one JSON line on what was stdout answers it. Ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks.vllm.engines import Engine


class Server:
    """One engine and the operations on it. The first must be ``open``."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one operation."""
        operation = request.pop("op")
        if operation == "open":
            self._engine = Engine(**request)
            return {}
        assert self._engine is not None, "the first operation must be open"
        if operation == "complete":
            outputs, seconds = self._engine.complete(**request)
            return {"outputs": outputs, "seconds": seconds, "counters": self._engine.counters()}
        if operation == "abort":
            return {"outputs": self._engine.abort(**request)}
        if operation == "learned":
            return {"texts": self._engine.learned}
        if operation == "close":
            self._engine.close()
            return {"counters": self._engine.counters()}
        raise ValueError(f"unknown operation {operation!r}")


def main() -> int:
    """Take the pipes away from everybody else, then serve."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    server = Server()
    for line in sys.stdin:
        try:
            answer = server.answer(json.loads(line))
        except Exception as error:  # a library may raise anything, and the client is who should hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
