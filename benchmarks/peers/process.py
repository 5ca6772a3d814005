"""The peer's end: ``python -m benchmarks.peers.process``, started by `client.Peer`; or, to see whether an installed
peer drafts, ``python -m benchmarks.peers.process check NAME``, with which ``make bench-peers`` ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.child import serve
from benchmarks.peers.arctic import Arctic
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.local import LocalPeer, Setting, TokenIds
from benchmarks.peers.own_text import PromptLookup, VllmNgram
from benchmarks.peers.sglang_ngram import SglangNgram
from benchmarks.walk import Proposal, Steps, walk

_MAKERS: Final[dict[str, Callable[..., LocalPeer]]] = {
    "arctic": Arctic,
    "vllm-ngram": VllmNgram,
    "prompt-lookup": PromptLookup,
    "sglang-ngram": SglangNgram,
    "llama-cpp": LlamaCpp,
}


class _Request:
    """A running request and how much of its text the peer was told."""

    def __init__(self, peer: LocalPeer, request_id: str, text: TokenIds, prompt_length: int) -> None:
        self.peer, self.request_id, self.text = peer, request_id, text
        self._known = prompt_length
        peer.start(request_id, text[:prompt_length])

    def advance(self, position: int) -> None:
        """Tell the peer the text up to ``position``."""
        if position > self._known:
            self.peer.add(self.request_id, self.text[self._known : position])
            self._known = position


class _Asker:
    """One setting."""

    def __init__(self, request: _Request, max_tokens: int, setting: Setting) -> None:
        self._request, self._max_tokens, self._setting = request, max_tokens, setting

    def ask(self, position: int) -> Proposal:
        request = self._request
        request.advance(position)
        draft = request.peer.speculate(request.request_id, request.text[:position], self._max_tokens, self._setting)
        return Proposal(draft.ns, draft.token_ids, draft.parents)

    def tell(self, num_accepted: int) -> None:
        """The text says it all."""


@contextmanager
def _without_collection(*, first: bool = True) -> Iterator[None]:
    """Keep Python's cyclic collector from running inside a timed call. ``first`` : collect before, which before each
    single request would cost more than the drafting."""
    if first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Server:
    """One peer and what is asked of it."""

    def __init__(self, peer: LocalPeer) -> None:
        self._peer = peer
        self._num_asked = 0
        self._apart: dict[str, LocalPeer] = {}

    def about(self) -> tuple[dict[str, str], bool, Setting]:
        """Versions, whether it has a store, and its setting for full drafts."""
        return {name: _version(name) for name in self._peer.distributions}, self._peer.has_store, self._peer.full_draft

    def resident_bytes(self) -> int:
        """Resident set size after freed memory went back to the kernel.

        The trim is in the peer's favour: what it used while inserting and freed since is not held against it.
        """
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries give pages back themselves
        if trim is not None:
            trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def insert(self, sequences: Sequence[TokenIds]) -> tuple[int, int]:
        """Nanoseconds, and tokens that are now held for later requests."""
        with _without_collection():
            results = [self._peer.insert(sequence) for sequence in sequences]
        return sum(ns for ns, _ in results), sum(stored for _, stored in results)

    def propose(
        self, contexts: Sequence[TokenIds], max_tokens: int, setting: Setting
    ) -> tuple[list[int], list[TokenIds]]:
        """Nanoseconds and drafts. Each context is a request of its own that leaves nothing behind."""
        times, drafts = [], []
        with _without_collection():
            for context in contexts:
                request_id = f"asked {self._num_asked}"
                self._num_asked += 1
                self._peer.start(request_id, context)
                try:
                    speculation = self._peer.speculate(request_id, context, max_tokens, setting)
                finally:
                    self._peer.stop(request_id, keep=False)
                times.append(speculation.ns)
                drafts.append(np.array(speculation.token_ids, np.int32))
        return times, drafts

    def replay(
        self, request_id: str, text: TokenIds, prompt_length: int, settings: Sequence[tuple[int, Setting]]
    ) -> list[Steps]:
        """Start the request, draft for all of its output under each setting, stop it and keep what it put out.

        Settings that share a state share a peer, because what is drafted depends on the text alone and not on earlier
        drafts. With no setting the one peer learns the request.
        """
        with _without_collection(first=False):
            peers = [self._of_setting(*setting) for setting in settings] or [self._peer]
            distinct = {id(peer): peer for peer in peers}
            requests = {key: _Request(peer, request_id, text, prompt_length) for key, peer in distinct.items()}
            askers = [_Asker(requests[id(peer)], *each) for peer, each in zip(peers, settings, strict=False)]
            steps = walk(text.tolist(), prompt_length, askers)
            for request in requests.values():
                request.advance(len(text))
                request.peer.stop(request_id, keep=True)
        return steps

    def _of_setting(self, max_tokens: int, setting: Setting) -> LocalPeer:
        """The same as in earlier calls."""
        name = json.dumps([max_tokens, setting])
        if name not in self._apart:
            self._apart[name] = self._peer.apart(max_tokens, setting)
        return self._apart[name]


def open_peer(name: str, options: dict[str, Any]) -> Server:
    """A peer by its name and own options."""
    return Server(_MAKERS[name](**options))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


WAYS: Final[dict[str, list[dict[str, Any]]]] = {
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
    period = np.arange(10, dtype=np.int32)
    text = np.concatenate([np.tile(period, 3), period[:5]])  # the repetition ends after a 4, wherever it is looked for
    for options in WAYS.get(name, [{}]):
        server = open_peer(name, options)
        versions, _, full_draft = server.about()
        _, (draft,) = server.propose([text], 5, full_draft)
        if draft.tolist() != period[5:].tolist():
            raise ValueError(f"{name} {options or ''} drafted {draft.tolist()} after {text.tolist()}")
    return f"{name}: " + ", ".join(f"{package} {number}" for package, number in versions.items())


if __name__ == "__main__":
    if sys.argv[1] == "check":
        print(check(sys.argv[2]))
        sys.exit(0)
    sys.exit(serve(open_peer))
