"""Does a healthy Redis make the engine's steps longer?"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.faults.questions import PROMPTS
from benchmarks.faults.scene import server
from benchmarks.processes import Redis, Server
from benchmarks.run import bootstrap
from ssd.bundled import MODEL_PATH
from ssd.sharing.append import FIELD
from ssd.sharing.connection import connect
from ssd.sharing.entry import Entry, pack_entry
from ssd.sharing.keys import stream_key
from ssd.text.codec import TextCodec

OTHERS_TOKENS: Final = 1000
"""What other replicas write in a second meanwhile."""

_NAMESPACE = "steps"
_ENTRY_TOKENS = 100
_WARM_UP = 2


def compare(home: Path, num_pairs: int, num_tokens: int) -> dict[str, Any]:
    """Asks a server that shares and one that does not in turn, the order changing from pair to pair.

    Both are asked the same: greedy answers of ``num_tokens``. Returns "ratio", the median over pairs of the time of an
    answer with Redis over that without, its 95 % "interval", and both medians in ms a token.
    """
    with ExitStack() as stack:
        store = Redis(home)
        stack.callback(store.kill)
        store.start()
        pair = (_start(home, stack, "with", "--redis", store.url), _start(home, stack, "without"))
        for one in pair:
            one.wait_ready()
        over = threading.Event()
        others = threading.Thread(target=_write, args=(store.url, over))
        others.start()
        stack.callback(others.join)
        stack.callback(over.set)
        times: list[list[float]] = [[], []]
        for number in range(-_WARM_UP * len(PROMPTS), num_pairs):
            body = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": num_tokens, "temperature": 0}
            for side in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                pair[side].post({**body, "ignore_eos": True})
                times[side].append(time.perf_counter() - begin)
    shared, alone = (np.array(side[-num_pairs:]) for side in times)
    ratios = shared / alone
    return {
        "ratio": round(float(np.median(ratios)), 4),
        "interval": bootstrap(ratios.tolist()),
        "ms_a_token": [round(float(np.median(side)) * 1000 / num_tokens, 4) for side in (shared, alone)],
        "pairs": num_pairs,
        "others_tokens_per_s": OTHERS_TOKENS,
    }


def _start(home: Path, stack: ExitStack, name: str, *options: str) -> Server:
    made = server(home / f"{name}.log", "--namespace", _NAMESPACE, *options)
    stack.callback(made.kill)
    made.start(wait=False)
    return made


def _write(url: str, over: threading.Event) -> None:
    """Text of random tokens, which nothing is drafted from."""
    codec, rng = TextCodec.load(str(MODEL_PATH)), np.random.default_rng(0)
    key = stream_key(codec.fingerprint, _NAMESPACE)
    with closing(connect(url)) as client:
        while not over.wait(_ENTRY_TOKENS / OTHERS_TOKENS):
            tokens = rng.integers(0, codec.vocab_size, _ENTRY_TOKENS).astype(np.int32)
            client.xadd(key, {FIELD: pack_entry(Entry(b"another.", rng.bytes(16), tokens), key)})
