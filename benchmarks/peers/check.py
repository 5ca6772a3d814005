"""Does an installed peer draft? ``python -m benchmarks.peers.check NAME``, run by the peers' own interpreter.

``make bench-peers`` ends with it, so that an environment that cannot be used is not marked as ready.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.peers.local import PEER_NAMES
from benchmarks.peers.process import Server

_PERIOD = np.arange(10, dtype=np.int32)

WAYS: dict[str, list[dict[str, Any]]] = {
    "sglang-ngram": [{"prompts": 1}, {"prompts": 1, "match_type": "PROB"}],
    "llama-cpp": [
        {"type": "lookup"},
        {"type": "ngram-cache"},
        {"type": "ngram-mod", "first": 4, "second": 0, "third": 8},
        *({"type": f"ngram-{name}", "first": 4, "second": 8, "third": 1} for name in ("simple", "map-k", "map-k4v")),
    ],
}
"""Options under which a peer drafts from a short text that repeats itself, where its defaults do not."""


def check(name: str) -> str:
    """Draft from a text that repeats itself; returns a line with versions. Raises ValueError if the draft is wrong."""
    for options in WAYS.get(name, [{}]):
        server = Server()
        answer, _ = server.answer({"op": "open", "peer": name, "options": options}, [])
        # The repetition ends after a 4, wherever it is looked for.
        text = np.concatenate([np.tile(_PERIOD, 3), _PERIOD[:5]])
        _, drafts = server.answer({"op": "propose", "max_tokens": 5, "setting": answer["full_draft"]}, [text])
        if drafts[0].tolist() != _PERIOD[5:].tolist():
            raise ValueError(f"{name} {options or ''} drafted {drafts[0].tolist()} after {text.tolist()}")
    return f"{name}: " + ", ".join(f"{package} {number}" for package, number in answer["versions"].items())


def main(arguments: list[str]) -> int:
    """Command line; returns the exit status."""
    if len(arguments) != 1 or arguments[0] not in PEER_NAMES:
        print(f"usage: python -m benchmarks.peers.check {{{','.join(PEER_NAMES)}}}", file=sys.stderr)
        return 2
    print(check(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
