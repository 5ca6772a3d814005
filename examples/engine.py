"""The engine from Python: ``python -m examples.engine``."""

from __future__ import annotations

from ssd import Engine, SamplingParams
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec


def main() -> None:
    """Complete one prompt twice, and print how many passes of the model each took."""
    codec = TextCodec.load(str(MODEL_PATH))
    with CacheSet(CacheConfig(), codec.fingerprint) as caches:
        engine = Engine.from_pretrained(MODEL_PATH, caches=caches)
        prompt = codec.encode_prompt("def read_lines(path):\n")
        for attempt in ("first time", "second time"):
            outputs = list(engine.generate([prompt], SamplingParams(max_tokens=48, temperature=0)))
            stats = outputs[-1].stats
            print(f"{attempt}: {stats.num_output_tokens} tokens in {stats.num_verify_steps} passes")
        print("".join(output.text for output in outputs))


if __name__ == "__main__":
    main()
