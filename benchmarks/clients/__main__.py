"""Test published OpenAI-compatible clients against a server: ``python -m benchmarks.clients``

Starts ``ssd-serve`` with the bundled model and an API key. Each client library (LangChain, LiteLLM and others) then
sends requests to this server from its own process, without other network access. The libraries are installed in the
environment that ``make bench-clients`` creates. Prints the number of passed checks for each client; the last line of
stdout is one JSON object. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT
from benchmarks.clients.others import CLIENTS, KEY, MODEL
from benchmarks.run import Option, Run
from benchmarks.servers import Server
from ssd.bundled import MODEL_PATH

_LONGEST_S = 600.0


def use(name: str, url: str) -> dict[str, Any]:
    """Run all checks of one client in a process, and return its result row; a crash counts as one failed check."""
    print(name, file=sys.stderr)
    python = Path(os.environ.get("SSD_CLIENTS") or ROOT / ".venv-clients").absolute() / "bin" / "python"
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    done = subprocess.run(
        [python, "-m", "benchmarks.clients.others", name, url, MODEL_PATH],
        cwd=ROOT,
        env={**os.environ, **offline, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=_LONGEST_S,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {"versions": "", "held": 0, "claims": 1, "failed": f"ended with status {done.returncode}", "got": {}}
    return json.loads(lines[-1])  # type: ignore[no-any-return]


COLUMNS = (
    ("client", "{client}"),
    ("versions", "{versions}"),
    (">checks that passed", "{held} of {claims}"),
    ("failed checks", "{failed}"),
)
NOTE = (
    "`make bench-clients` ran these checks on {date} ({environment[cpu]}, {environment[cores]} cores). The published "
    "clients sent requests to a server with the bundled model and an API key."
)
OPTIONS = {"names": Option(default=list(CLIENTS), choices=list(CLIENTS), metavar="NAME")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a check failed, else 0."""
    run = Run("clients", __doc__, argv, OPTIONS, COLUMNS, unsaid=("names",), under=("ssd", "server"))
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory, "log"), "--served-model-name", MODEL, "--api-key", KEY)
        server.start()
        try:
            for name in run.args.names:
                row = run.row({"client": name, **use(name, f"http://127.0.0.1:{server.port}/v1")})
                for claim, got in row["got"].items():
                    run.say(f"  {claim}: {got}")
        finally:
            server.terminate()
    return run.end(is_wrong=any(row["failed"] for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
