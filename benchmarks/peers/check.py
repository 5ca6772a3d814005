"""Does an installed peer draft? ``python -m benchmarks.peers.check NAME``, run by the peers' own interpreter.

``make bench-peers`` ends with it, so that an environment that cannot be used is not marked as ready.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.peers.names import PEER_NAMES
from benchmarks.peers.process import Server

_PERIOD = np.arange(10, dtype=np.int32)


def check(name: str) -> str:
    """Draft from a text that repeats itself; returns a line with versions. Raises ValueError if the draft is wrong."""
    server = Server()
    answer, _ = server.answer({"op": "open", "peer": name, "options": {}}, [])
    # The repetition ends after a 4, wherever it is looked for.
    text = np.concatenate([np.tile(_PERIOD, 3), _PERIOD[:5]])
    _, drafts = server.answer({"op": "propose", "max_tokens": 5, "setting": answer["full_draft"]}, [text])
    if drafts[0].tolist() != _PERIOD[5:].tolist():
        raise ValueError(f"{name} drafted {drafts[0].tolist()} after {text.tolist()}")
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
