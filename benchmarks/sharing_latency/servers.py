"""Two real servers: what was asked of one is asked of the other."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.processes import Server
from benchmarks.workloads import snippets

_PROMPT_CHARACTERS = 200


def measure(url: str, directory: Path, num_prompts: int, wait_s: float, max_tokens: int) -> dict[str, Any]:
    """Passes of the first server, and of the second ``wait_s`` after each answer. Raises AssertionError where answers
    differ.
    """
    options = ("--redis", url, "--namespace", "shared", "--max-num-seqs", "1")
    first, second = (Server(directory / f"{name}.log", *options) for name in ("first", "second"))
    try:
        for server in (first, second):
            server.start()
        passes = []
        for prompt in [text[:_PROMPT_CHARACTERS] for text in snippets(7)[:num_prompts]]:
            said, num_first = _ask(first, prompt, max_tokens)
            time.sleep(wait_s)
            again, num_second = _ask(second, prompt, max_tokens)
            if again != said:
                raise AssertionError(f"two servers answered differently: {said!r}, {again!r}")
            passes.append((num_first, num_second))
    finally:
        for server in (first, second):
            server.kill()
    return {
        "prompts": len(passes),
        "wait_s": wait_s,
        "max_tokens": max_tokens,
        "passes_first": sum(one for one, _ in passes),
        "passes_second": sum(other for _, other in passes),
    }


def _ask(server: Server, prompt: str, max_tokens: int) -> tuple[str, int]:
    before = _passes(server)
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    text: str = server.post(body)["choices"][0]["text"]
    return text, _passes(server) - before


def _passes(server: Server) -> int:
    metrics = server.ask("GET", "/metrics")[1].decode()
    return sum(int(float(value)) for value in re.findall(r"^ssd:verify_steps_total(?:\{.*\})? (\S+)$", metrics, re.M))
