"""The process of one peer: ``python -m benchmarks.peers.process``, started by `client.Peer`.

``python -m benchmarks.peers.process check NAME`` checks that an installed peer drafts; ``make bench-peers`` runs this
at its end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np

from benchmarks.child import serve
from benchmarks.peers.arctic import Arctic
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.own_text import PromptLookup, VllmNgram
from benchmarks.peers.sglang_ngram import SglangNgram
from benchmarks.walk import LocalPeer, Proposal, Setting, Steps, TokenIds, walk

PEERS: Final[dict[str, Callable[..., LocalPeer]]] = {
    "arctic": Arctic,
    "vllm-ngram": VllmNgram,
    "prompt-lookup-hf": PromptLookup,
    "sglang": SglangNgram,
    "llama-cpp": LlamaCpp,
}
"""The drafters of other projects by name. A drafter's library is imported only when the drafter is created."""


class Server:
    """Runs one drafter of another project and answers the calls of `client.Peer`."""

    def __init__(self, peer: LocalPeer) -> None:
        self._peer = peer
        self._apart: dict[str, LocalPeer] = {}

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the Python packages that implement the drafter."""
        return {name: _version(name) for name in self._peer.distributions}

    def replay(
        self, request_id: str, text: TokenIds, prompt_length: int, settings: Sequence[tuple[int, Setting]]
    ) -> list[Steps]:
        """Replay a recorded request: start it, draft for its output under each setting, and end it, storing the output.

        Settings with the same state share a drafter. This is possible because drafts then depend on the text only, not
        on earlier drafts.
        """
        peers = [self._of_setting(*setting) for setting in settings]
        known = {id(peer): prompt_length for peer in peers}
        distinct = {id(peer): peer for peer in peers}.values()

        def advance(peer: LocalPeer, position: int) -> None:
            if position > known[id(peer)]:
                peer.add(request_id, text[known[id(peer)] : position])
                known[id(peer)] = position

        def ask(peer: LocalPeer, asked: tuple[int, Setting], position: int) -> Proposal:
            advance(peer, position)
            return peer.speculate(request_id, text[:position], *asked)

        for peer in distinct:
            peer.start(request_id, text[:prompt_length])
        askers = [partial(ask, peer, asked) for peer, asked in zip(peers, settings, strict=True)]
        steps = walk(text.tolist(), prompt_length, askers)
        for peer in distinct:
            advance(peer, len(text))
            peer.stop(request_id)
        return steps

    def _of_setting(self, max_tokens: int, setting: Setting) -> LocalPeer:
        name = json.dumps([max_tokens, setting])
        if name not in self._apart:
            self._apart[name] = self._peer.apart(max_tokens, setting)
        return self._apart[name]


def open_peer(name: str, options: dict[str, Any]) -> Server:
    """Create a drafter of another project by its name, with its options."""
    return Server(PEERS[name](**options))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


WAYS: Final[dict[str, list[dict[str, Any]]]] = {
    "sglang": [{"prompts": 1}, {"prompts": 1, "match_type": "PROB"}],
    "llama-cpp": [
        {"type": "lookup"},
        {"type": "ngram-cache"},
        {"type": "ngram-mod", "first": 4, "second": 0, "third": 8},
        *({"type": f"ngram-{name}", "first": 4, "second": 8, "third": 1} for name in ("simple", "map-k", "map-k4v")),
    ],
}
"""Options for `check` of drafters that would not draft from a short repetitive text with their defaults."""
TEXT: Final = np.tile(np.arange(10, dtype=np.int32), 5)


def check(name: str) -> str:
    """Check that a drafter drafts from repetitive text; return a line with its versions. Raises ValueError if not."""
    for options in WAYS.get(name, [{}]):
        server = open_peer(name, options)
        (steps,) = server.replay("check", TEXT, 35, [(5, {})])
        if steps.accepted[0] != 5:
            raise ValueError(
                f"{name} {options or ''}: of {steps.drafted[0]} drafted tokens {steps.accepted[0]} are right"
            )
    return f"{name}: " + ", ".join(f"{package} {number}" for package, number in server.versions.items())


if __name__ == "__main__":
    if sys.argv[1] == "check":
        print(check(sys.argv[2]))
        sys.exit(0)
    sys.exit(serve(open_peer))
