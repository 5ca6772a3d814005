"""Two replicas that share their caches through Redis: ``python -m examples.shared_cache [URL]``."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from ssd import CacheConfig, CacheManager, Engine, SamplingParams, TextCodec
from ssd.bundled import MODEL_PATH
from ssd.replication.replication_log import ReplicationLog


def main(url: str = "redis://localhost:6379/0") -> None:
    """Send a request to one replica, wait until the other has received it, and repeat it there."""
    codec = TextCodec.load(str(MODEL_PATH))
    prompt = codec.encode_prompt("import threading\n\n\nclass Worker")
    with ExitStack() as stack:
        logs, engines = [], []
        for _ in range(2):
            log = stack.enter_context(ReplicationLog(url, fingerprint=codec.fingerprint, vocab_size=codec.vocab_size))
            caches = stack.enter_context(CacheManager(CacheConfig(), codec.fingerprint, on_open=log.attach))
            logs.append(log)
            engines.append(Engine.from_pretrained(MODEL_PATH, caches=caches, codec=codec))
        for name, engine in zip(("first", "second"), engines, strict=True):
            (*_, last) = engine.generate([prompt], SamplingParams(max_tokens=48, temperature=0))
            print(f"{name} replica: {last.stats.num_output_tokens} tokens in {last.stats.num_verify_steps} passes")
            deadline = time.monotonic() + 20
            while engine is engines[0] and not logs[1].stats().num_received:
                if time.monotonic() > deadline:
                    raise SystemExit(f"the second replica heard nothing: is there a Redis server at {url}?")
                time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
