"""Requests that want too much. Each is to be refused or answered, and the others are to be served meanwhile."""

from __future__ import annotations

import http.client
import json

from benchmarks.faults.scene import Scene

_PROMPT = {"prompt": "x", "max_tokens": 4}
_PATH = "/v1/completions"

_BODIES: tuple[tuple[str, bytes], ...] = (
    (_PATH, json.dumps({**_PROMPT, "top_k": 1 << 63}).encode()),
    (_PATH, json.dumps({**_PROMPT, "seed": 1 << 80}).encode()),
    (_PATH, json.dumps({**_PROMPT, "max_tokens": 1 << 70}).encode()),
    (_PATH, json.dumps({**_PROMPT, "n": 1 << 40}).encode()),
    (_PATH, json.dumps({**_PROMPT, "temperature": 1e308}).encode()),
    (_PATH, json.dumps({**_PROMPT, "logit_bias": {"9" * 5000: 1}}).encode()),
    (_PATH, json.dumps({**_PROMPT, "logit_bias": {str(token): -1 for token in range(4096)}}).encode()),
    (_PATH, json.dumps({**_PROMPT, "bad_words": ["x" * 50] * 100}).encode()),
    (_PATH, json.dumps({**_PROMPT, "stop": ["a"] * 1000}).encode()),
    (_PATH, json.dumps({**_PROMPT, "allowed_token_ids": list(range(20_000))}).encode()),
    (_PATH, json.dumps({"prompt": [[1]] * 20_000, "n": 8, "max_tokens": 1}).encode()),
    (_PATH, json.dumps({"prompt": [-1, 1 << 70], "max_tokens": 1}).encode()),
    (_PATH, json.dumps({**_PROMPT, **{f"unknown{number}": number for number in range(20_000)}}).encode()),
    (_PATH, b"[" * 100_000),
    (_PATH, b'{"prompt": "\xff\xfe"}'),
    (_PATH, b""),
    ("/tokenize", json.dumps({"prompt": "x " * 500_000}).encode()),
    ("/detokenize", json.dumps({"tokens": list(range(1000)) * 200}).encode()),
    ("/no/such/path", b"{}"),
)


def hostile(scene: Scene) -> None:
    """Each of them in turn; a 5xx or no answer counts as a failed one."""
    for path, body in _BODIES:
        try:
            status, _ = scene.server.ask("POST", path, body)
            outcome = "refused" if status < 500 else "failed"
            reason = str(status)
        except (OSError, http.client.HTTPException) as error:
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
        scene.load.counts[outcome] += 1
        if outcome == "failed":
            scene.load.failures.append(f"{path} {body[:80]!r}: {reason}")
        scene.revive_server()
