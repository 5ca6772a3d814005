"""A cache from text that exists already, before the first request: ``python -m examples.warm_start``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from cache_builder.__main__ import main as ssd_cache
from ssd import Engine, SamplingParams
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

PROMPTS = ["import os\n\ndef main(", "class Node:\n    def __init__(self", "def parse_args(argv):\n    parser = "]


def main() -> None:
    """Log what a cold engine says, build a cache from the log, and ask an engine that starts from it."""
    codec = TextCodec.load(str(MODEL_PATH))
    with tempfile.TemporaryDirectory() as scratch:
        logs, warm = Path(scratch) / "logs.jsonl", Path(scratch) / "warm"
        with CacheSet(CacheConfig(), codec.fingerprint) as caches:
            answers = ask(codec, caches, "cold")
        lines = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in answers.items()]
        logs.write_text("\n".join(lines) + "\n")
        ssd_cache(["build", str(logs), "--tokenizer", str(MODEL_PATH), "--out", str(warm)])
        with CacheSet(CacheConfig(), codec.fingerprint) as caches:
            caches.get().add_static_directory(warm)
            ask(codec, caches, "warm")


def ask(codec: TextCodec, caches: CacheSet, name: str) -> dict[str, str]:
    """Each prompt's completion; prints the tokens per step over all of them."""
    engine = Engine.from_pretrained(MODEL_PATH, caches=caches, codec=codec)
    answers = {}
    for prompt in PROMPTS:
        outputs = engine.generate([codec.encode_prompt(prompt)], SamplingParams(max_tokens=48, temperature=0))
        answers[prompt] = "".join(output.text for output in outputs)
    print(f"{name}: {engine.metrics.mean_acceptance_length:.2f} tokens per step")
    return answers


if __name__ == "__main__":
    main()
