"""Our end of the pipes: one peer, started in its own environment.

::

    with Peer("arctic", depth=24) as peer:
        insertion = peer.insert(sequences)
        proposals = peer.propose(contexts, max_tokens=10)
        print(insertion.resident_growth_bytes / insertion.num_tokens, np.median(proposals.us))

All times are taken in the peer's process around its own calls: pipes and copies are never part of a figure.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from benchmarks.peers.local import PEER_NAMES, FrameError, Setting, TokenIds, read_frame, write_frame
from benchmarks.walk import Steps

_ROOT = Path(__file__).parents[2]
_CHUNK_TOKENS = 1 << 20
_STDERR_LINES = 8


class PeerError(Exception):
    """The peer refused a call, or its library raised; it can be asked again."""


class PeerUnavailable(PeerError):
    """The peer is not installed, did not start or has died. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """What it took a peer to learn sequences; all zero for a peer without a store."""

    seconds: float
    """The peer's own calls, added up."""
    num_tokens: int
    """Tokens it can now draft from for other requests; less than it was given where it does not store prompts."""
    resident_growth_bytes: int
    """Growth of its resident memory, once freed memory was given back."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Answers to a list of contexts, in order."""

    us: npt.NDArray[np.float64]
    """float64[n], microseconds."""
    drafts: list[TokenIds]
    """n of int32[<= max_tokens]; empty where the peer had nothing to say."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft of a running request."""

    us: float
    token_ids: TokenIds
    """int32[n]."""
    parents: TokenIds
    """int32[n], index of each token's parent in ``token_ids``; -1 follows the context. A chain is -1, 0, 1, ..."""
    probs: npt.NDArray[np.float64] | None
    """float64[n], the peer's estimates, where it gives any."""
    match_length: int | None
    """Length of the match behind the draft, where the peer tells."""


class Peer:
    """A peer's process, from construction to `close`. Not for several threads.

    ``options`` are the peer's own:

    - arctic: ``depth`` (64), ``prompt_length`` (32), ``max_cached_requests`` (-1, no limit)
    - vllm-ngram: ``min_ngram`` (2), ``max_ngram`` (5), ``max_context_tokens`` (65,536), ``max_draft`` (256)
    - prompt-lookup: ``max_matching_ngram_size`` (2)
    - sglang-ngram: ``capacity`` (10,000,000), ``match_type`` (BFS), ``min_bfs_breadth`` (1), ``max_bfs_breadth`` (10),
      ``max_trie_depth`` (18), ``draft_tokens`` (12), ``padded`` (0), ``prompts`` (0)
    - llama-cpp: ``type`` (ngram-mod), and ``first``, ``second``, ``third``, its three sizes

    ``setting`` of `propose` and `speculate` are arctic's alone: ``max_spec_factor``, ``max_spec_offset``,
    ``min_token_prob``, ``use_tree_spec``. In `replay` a setting of sglang-ngram or llama-cpp holds options, and has a
    peer of its own.
    """

    versions: dict[str, str]
    """Versions of the packages that the peer is made of."""
    has_store: bool
    """Whether it learns from finished requests."""
    shares_state: bool
    """Whether all settings of `replay` draft from one memory."""
    full_draft: Setting
    """The setting `propose` uses unless it is given one."""

    def __init__(self, name: str, **options: int | str) -> None:
        """Start the peer and wait until it is warm. Raises PeerUnavailable, or PeerError where an option is wrong."""
        if name not in PEER_NAMES:
            raise ValueError(f"no peer is called {name!r}, only {', '.join(PEER_NAMES)}")
        self.name = name
        python = environment() / "bin" / "python"
        if not python.exists():
            raise PeerUnavailable(f"the peers are not installed in {environment()}: run `make bench-peers`")
        # A file, not a pipe: nobody drains it, and a library that prints much must not block.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self._process = subprocess.Popen(
                [python, "-E", "-s", "-m", "benchmarks.peers.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd=_ROOT,
                env=_environment_variables(),
            )
        except OSError as error:
            self._stderr.close()
            raise PeerUnavailable(f"{python} does not run ({error}): remove it and run `make bench-peers`") from error
        try:
            answer, _ = self._call("open", {"peer": name, "options": options})
        except BaseException:
            self.close()
            raise
        self.versions = answer["versions"]
        self.has_store = answer["has_store"]
        self.shares_state = answer["shares_state"]
        self.full_draft = answer["full_draft"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """Id of the peer's process."""
        return self._process.pid

    def insert(self, sequences: Iterable[TokenIds]) -> Insertion:
        """Let the peer learn finished requests, each int32[n]; they are streamed, so a generator holds nothing twice.

        ``sequences`` is not even looked at for a peer without a store.
        """
        if not self.has_store:
            return Insertion(0.0, 0, 0)
        before = self._resident_bytes()
        ns = num_tokens = 0
        for chunk in _chunks(sequences):
            answer, _ = self._call("insert", {}, chunk)
            ns += answer["ns"]
            num_tokens += answer["num_tokens"]
        return Insertion(ns / 1e9, num_tokens, self._resident_bytes() - before)

    def propose(self, contexts: Sequence[TokenIds], max_tokens: int, **setting: float | str) -> Proposals:
        """Draft once for each context, as the prompt of a request of its own that leaves nothing behind.

        Without ``setting`` the peer is set to draft up to ``max_tokens`` however short the match: see `full_draft`.
        """
        times: list[int] = []
        drafts: list[TokenIds] = []
        for chunk in _chunks(contexts):
            answer, some = self._call(
                "propose", {"max_tokens": max_tokens, "setting": setting or self.full_draft}, chunk
            )
            times += answer["ns"]
            drafts += some
        return Proposals(np.array(times, np.float64) / 1e3, drafts)

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Begin a request that is decoded step by step."""
        self._call("start", {"request_id": request_id}, [prompt])

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, **setting: float | str) -> Draft:
        """Draft for a running request; ``context`` is all of its text, prompt included.

        What ``setting`` leaves out is as the library has it, not as in `full_draft`.
        """
        request = {"request_id": request_id, "max_tokens": max_tokens, "setting": setting}
        answer, (token_ids, parents) = self._call("speculate", request, [context])
        probs = None if answer["probs"] is None else np.array(answer["probs"], np.float64)
        return Draft(answer["ns"] / 1e3, token_ids, parents, probs, answer["match_length"])

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Tell the peer which tokens a step of the request put out, the target's own included."""
        self._call("add", {"request_id": request_id}, [token_ids])

    def stop(self, request_id: str, keep: bool) -> None:
        """End a request. With ``keep`` a peer that has a store drafts for later requests from its output."""
        self._call("stop", {"request_id": request_id, "keep": keep})

    def replay(
        self, request_id: str, text: TokenIds, prompt_length: int, settings: Sequence[tuple[int, Setting]]
    ) -> list[Steps]:
        """Decode a recorded request in the peer's process, once under each setting, and let the peer keep the output.

        ``text`` : int32[n], prompt and output. ``settings`` : most tokens of a draft, and what `speculate` would be
        given. No setting's drafts depend on the others. Without settings the request is only learned, by a peer whose
        settings share a state.
        """
        asked = [{"max_tokens": max_tokens, "setting": setting} for max_tokens, setting in settings]
        _, arrays = self._call(
            "replay", {"request_id": request_id, "prompt_length": prompt_length, "settings": asked}, [text]
        )
        size = len(arrays) // max(1, len(asked))
        return [Steps.from_arrays(arrays[first : first + size]) for first in range(0, len(arrays), max(1, size))]

    def close(self) -> None:
        """End the process; may be called twice."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended before
                self._process.stdin.close()  # it ends with its stdin
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def _resident_bytes(self) -> int:
        return int(self._call("resident", {})[0]["resident_bytes"])

    def _call(
        self, operation: str, header: dict[str, Any], arrays: Sequence[TokenIds] = ()
    ) -> tuple[dict[str, Any], list[TokenIds]]:
        """One question, one answer."""
        if self._stderr.closed:
            raise PeerUnavailable(f"{self.name} was closed")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_frame(self._process.stdin, {"op": operation, **header}, arrays)
            frame = read_frame(self._process.stdout)
        except (FrameError, OSError) as error:
            raise self._dead(operation) from error
        if frame is None:
            raise self._dead(operation)
        answer, drafts = frame
        if "error" not in answer:
            return answer, drafts
        if answer["missing"]:
            raise PeerUnavailable(f"{self.name} is not installed ({answer['error']}): run `make bench-peers`")
        raise PeerError(f"{self.name}, {operation}: {answer['error']}")

    def _dead(self, operation: str) -> PeerUnavailable:
        """Whatever happened, the pipes are out of step: end the process and say what it said last."""
        # Killing one that has ended changes nothing: the status is that of its own end.
        if self._process.poll() is None:
            try:
                self._process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                self._process.kill()
        status = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()[-_STDERR_LINES:]
        self.close()
        said = "\n".join(f"  {line}" for line in words) or "  nothing on stderr"
        return PeerUnavailable(
            f"{self.name} ended with status {status} during {operation!r}. If its environment is broken, remove "
            f"{environment()} and run `make bench-peers`. Its last words:\n{said}"
        )


def environment() -> Path:
    """The peers' virtual environment: ``.venv-peers`` in the checkout, or what ``SSD_PEERS`` names."""
    return Path(os.environ.get("SSD_PEERS") or _ROOT / ".venv-peers").absolute()


def _environment_variables() -> dict[str, str]:
    """Ours, with one thread a library, as our own figures are taken, and nothing that calls out."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _chunks(arrays: Iterable[TokenIds]) -> Iterator[list[TokenIds]]:
    """Group arrays so that a frame holds about a million tokens."""
    chunk: list[TokenIds] = []
    num_tokens = 0
    for array in arrays:
        chunk.append(array)
        num_tokens += len(array)
        if num_tokens >= _CHUNK_TOKENS:
            yield chunk
            chunk, num_tokens = [], 0
    if chunk:
        yield chunk
