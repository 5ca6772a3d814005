"""guidellm: a benchmark of synthetic prompts, two streams at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.clients.checks import KEY, Checks, arguments

NUM_REQUESTS = 10
OUTPUT_TOKENS = 16


def main() -> int:
    """Returns the exit status."""
    url, model = arguments()
    checks = Checks("guidellm")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url.removesuffix('/v1')},api_key={KEY}",
            "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
            "--tokenizer", f"kind=huggingface_auto,model={model}", "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=sys.stderr)
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    checks.see("all requests succeed", totals["successful"] == totals["total"] == NUM_REQUESTS, totals)
    tokens = metrics["output_token_count"]["successful"]
    checks.see("each has the tokens that were asked for", tokens["mean"] == OUTPUT_TOKENS, tokens)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
