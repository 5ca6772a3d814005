"""The peer's end of the pipes: ``python -m benchmarks.peers.process``, started by `client.Peer` and nobody else.

Requests come as frames on stdin, one answer each goes out on what was stdout. Requests name an operation in "op"; an
answer either holds results or says what failed in "error", and the process goes on. It ends with its stdin.
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
from typing import IO, Any

import numpy as np

from benchmarks.peers.arctic import Arctic
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.local import LocalPeer, Setting, Speculation, TokenIds, read_frame, write_frame
from benchmarks.peers.own_text import PromptLookup, VllmNgram
from benchmarks.peers.sglang_ngram import SglangNgram
from benchmarks.walk import Proposal, Steps, walk

Answer = tuple[dict[str, Any], list[TokenIds]]
_MAKERS: dict[str, Callable[..., LocalPeer]] = {
    "arctic": Arctic,
    "vllm-ngram": VllmNgram,
    "prompt-lookup": PromptLookup,
    "sglang-ngram": SglangNgram,
    "llama-cpp": LlamaCpp,
}


def replay(
    peers: Sequence[LocalPeer],
    request_id: str,
    text: TokenIds,
    prompt_length: int,
    settings: Sequence[dict[str, Any]],
) -> list[Steps]:
    """Start the request, draft for all of its output under each of ``settings``, stop it and keep what it put out.

    Each setting is {"max_tokens": ..., "setting": {...}}. ``peers`` : of each setting, the same one where settings
    share a state, because what is drafted depends on the text alone and not on earlier drafts. With no setting the one
    peer learns the request.
    """
    distinct = {id(peer): peer for peer in peers}
    requests = {key: _Request(peer, request_id, text, prompt_length) for key, peer in distinct.items()}
    askers = [_Asker(requests[id(peer)], **each) for peer, each in zip(peers, settings, strict=False)]
    steps = walk(text.tolist(), prompt_length, askers)
    for request in requests.values():
        request.advance(len(text))
        request.peer.stop(request_id, keep=True)
    return steps


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
        estimates = None if draft.probs is None else conditional(draft.probs, draft.parents)
        return Proposal(draft.ns, draft.token_ids, draft.parents, estimates)

    def tell(self, num_accepted: int) -> None:
        """The text says it all."""


def conditional(probs: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Chance of each token once those before it in its branch were accepted, from the chance of all of them."""
    return [prob if parent < 0 else prob / probs[parent] for prob, parent in zip(probs, parents, strict=True)]


def resident_bytes() -> int:
    """Resident set size after freed memory went back to the kernel.

    The trim is in the peer's favour: what it used while inserting and freed since is not held against it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries give pages back themselves
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's cyclic collector from running inside a timed call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def collection_put_off() -> Iterator[None]:
    """The same without collecting first, which before each single request would cost more than the drafting."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def open_peer(header: dict[str, Any]) -> LocalPeer:
    """Build the peer that the first frame asks for."""
    return _MAKERS[header["peer"]](**header["options"])


class Server:
    """One peer and the operations on it. The first must be ``open``."""

    def __init__(self, make: Callable[[dict[str, Any]], LocalPeer] = open_peer) -> None:
        self._make = make
        self._opened: LocalPeer | None = None
        self._num_asked = 0
        self._apart: dict[str, LocalPeer] = {}

    @property
    def _peer(self) -> LocalPeer:
        if self._opened is None:
            raise ValueError("the first operation must be open")
        return self._opened

    def answer(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        """Carry out one operation."""
        operations: dict[str, Callable[[dict[str, Any], list[TokenIds]], Answer]] = {
            "open": self._open,
            "resident": lambda header, arrays: ({"resident_bytes": resident_bytes()}, []),
            "insert": self._insert,
            "propose": self._propose,
            "start": self._start,
            "speculate": self._speculate,
            "add": self._add,
            "stop": self._stop,
            "replay": self._replay,
        }
        return operations[header["op"]](header, arrays)

    def _open(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        self._opened = self._make(header)
        versions = {name: _version(name) for name in self._opened.distributions}
        about = {name: getattr(self._opened, name) for name in ("has_store", "shares_state", "full_draft")}
        return {"versions": versions, **about}, []

    def _insert(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        with without_collection():
            results = [self._peer.insert(sequence) for sequence in arrays]
        return {"ns": sum(ns for ns, _ in results), "num_tokens": sum(stored for _, stored in results)}, []

    def _propose(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        """Each context is a request of its own that leaves nothing behind."""
        times, drafts = [], []
        with without_collection():
            for context in arrays:
                request_id = f"asked {self._num_asked}"
                self._num_asked += 1
                self._peer.start(request_id, context)
                try:
                    speculation = self._peer.speculate(request_id, context, header["max_tokens"], header["setting"])
                finally:
                    self._peer.stop(request_id, keep=False)
                times.append(speculation.ns)
                drafts.append(np.array(speculation.token_ids, np.int32))
        return {"ns": times}, drafts

    def _start(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        self._peer.start(header["request_id"], arrays[0])
        return {}, []

    def _speculate(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        with collection_put_off():
            draft: Speculation = self._peer.speculate(
                header["request_id"], arrays[0], header["max_tokens"], header["setting"]
            )
        answer = {"ns": draft.ns, "probs": draft.probs, "match_length": draft.match_length}
        return answer, [np.array(draft.token_ids, np.int32), np.array(draft.parents, np.int32)]

    def _add(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        self._peer.add(header["request_id"], arrays[0])
        return {}, []

    def _stop(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        self._peer.stop(header["request_id"], header["keep"])
        return {}, []

    def _replay(self, header: dict[str, Any], arrays: list[TokenIds]) -> Answer:
        with collection_put_off():
            peers = self._of_settings(header["settings"])
            steps = replay(peers, header["request_id"], arrays[0], header["prompt_length"], header["settings"])
        return {}, [array for each in steps for array in each.to_arrays()]

    def _of_settings(self, settings: Sequence[dict[str, Any]]) -> list[LocalPeer]:
        """The peer of each setting, the same as in earlier calls; without settings the one that was opened."""
        for each in settings:
            if (name := json.dumps(each)) not in self._apart:
                self._apart[name] = self._peer.apart(each["max_tokens"], each["setting"])
        return [self._apart[json.dumps(each)] for each in settings] or [self._peer]


def serve(requests: IO[bytes], answers: IO[bytes], server: Server) -> None:
    """Answer frames until ``requests`` ends; what an operation raises is its answer. Raises FrameError."""
    while (frame := read_frame(requests)) is not None:
        header, arrays = frame
        try:
            answer, drafts = server.answer(header, arrays)
        except Exception as error:  # a library may raise anything, and the client is who should hear of it
            missing = isinstance(error, ImportError)
            answer, drafts = {"error": f"{type(error).__name__}: {error}", "missing": missing}, []
        # Dropped before the next one is read: the data must not be held twice, nor be counted as the peer's.
        del frame, header, arrays
        write_frame(answers, answer, drafts)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def main() -> int:
    """Take the pipes away from everybody else, then serve."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Libraries print. From here on whatever goes to stdout, from C too, goes to stderr; stdin is empty.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    with requests, answers:
        serve(requests, answers, Server())
    return 0


if __name__ == "__main__":
    sys.exit(main())
