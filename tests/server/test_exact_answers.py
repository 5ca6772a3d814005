"""Answers are equal byte by byte, with drafts and without, alone and among others: text, log-probabilities, counts."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.server.bundled_engine import load_bundled
from tests.server.client import get, post
from tests.server.failing_engine import RunningServer, serving

PROMPT = "def read_lines(path, encoding):\n    with open(path, encoding=encoding) as file:\n"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 5},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 7, "logprobs": 3},
    "choices": {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": 1},
    "penalised": {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": 2},
    "echoed": {"temperature": 0, "max_tokens": 8, "echo": False, "logprobs": 0},
    "held to a pattern": {"temperature": 0.7, "seed": 5, "structured_outputs": {"regex": "[a-z_ ]{10,40}"}},
}


def answer(server: RunningServer, **fields: Any) -> str:
    """The body of an answer without what differs by design: ids, times, and what was computed before."""
    body = {"model": "test-model", "prompt": PROMPT, "max_tokens": 40, **fields}
    found = post(server.port, "/v1/completions", body)
    assert found.status == 200, found.content
    return re.sub(r'"(id|created|cached_tokens)":\s*("[^"]*"|\d+)', "", found.content.decode())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_is_the_same_bytes_whatever_is_drafted_and_decoded_beside_it(dtype: str) -> None:
    with serving(partial(load_bundled, dtype=dtype, max_num_seqs=16, prefill_chunk_tokens=48)) as server:
        health = get(server.port, "/health").json
        assert (health["status"], health["batch_invariant"]) == ("ok", True)
        plain = {kind: answer(server, num_speculative_tokens=0, **fields) for kind, fields in KINDS.items()}
        for _ in range(2):  # the second time what the first said is drafted
            assert {kind: answer(server, **fields) for kind, fields in KINDS.items()} == plain
        with ThreadPoolExecutor(17) as clients:
            others = [
                clients.submit(
                    answer, server, prompt=PROMPT[i:] + f"    # {i}\n", max_tokens=60, temperature=i % 2, seed=i
                )
                for i in range(11)
            ]
            among = {kind: clients.submit(answer, server, **fields) for kind, fields in KINDS.items()}
            assert {kind: found.result() for kind, found in among.items()} == plain
            for other in others:
                other.result()
