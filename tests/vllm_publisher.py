"""A program for vLLM's environment: answers prompts while it publishes KV events, and writes the messages to a file.

``python -m tests.vllm_publisher MODEL PORT FILE`` waits until a subscriber may have connected, then answers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def __init__(self", "def read_lines(path):\n    with open"]
NUM_OUTPUT, BLOCK = 100, 32


def main(model: str, port: int, path: str) -> None:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    import zmq
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig

    messages: list[list[Any]] = []

    def listen() -> None:
        socket = zmq.Context().socket(zmq.SUB)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.subscribe(b"")
        while True:
            _, number, payload = socket.recv_multipart()
            messages.append([int.from_bytes(number, "big"), payload.hex()])

    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{port}",
        replay_endpoint=f"tcp://*:{port + 1}",
        topic="kv",
    )
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        block_size=BLOCK,
        enable_prefix_caching=True,
        disable_log_stats=True,
        kv_events_config=events,
    )
    threading.Thread(target=listen, daemon=True).start()
    time.sleep(1)
    params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True)
    salted = {"prompt": PROMPTS[0], "cache_salt": "a salt"}
    texts = [
        [*output.prompt_token_ids, *output.outputs[0].token_ids]
        for output in llm.generate([*PROMPTS, salted], params, use_tqdm=False)
    ]
    time.sleep(2)
    Path(path).write_text(json.dumps({"texts": texts, "messages": messages}))
    print("published", flush=True)
    sys.stdin.read()  # past events can be fetched until the end of the input


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
