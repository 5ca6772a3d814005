"""Build a cache from existing logs before the first request: ``python -m examples.warm_start``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from cache_builder.__main__ import main as ssd_cache
from ssd import LLM, SamplingParams

PROMPTS = ["import os\n\ndef main(", "class Node:\n    def __init__(self", "def parse_args(argv):\n    parser = "]


def main() -> None:
    """Log the outputs of a cold model, build a cache from the log, and repeat the requests with that cache."""
    with tempfile.TemporaryDirectory() as scratch:
        logs, warm = Path(scratch) / "logs.jsonl", Path(scratch) / "warm"
        with LLM() as llm:
            answers = ask(llm, "cold")
        lines = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in answers.items()]
        logs.write_text("\n".join(lines) + "\n")
        ssd_cache(["build", str(logs), "--out", str(warm)])
        with LLM(warm=[warm]) as llm:
            ask(llm, "warm")


def ask(llm: LLM, name: str) -> dict[str, str]:
    """Return each prompt's completion, and print the tokens per step over all of them."""
    answers = {prompt: llm.generate(prompt, SamplingParams(max_tokens=48, temperature=0))[0] for prompt in PROMPTS}
    print(f"{name}: {llm.engine.metrics.mean_acceptance_length:.2f} tokens per step")
    return {prompt: answer.text for prompt, answer in answers.items()}


if __name__ == "__main__":
    main()
