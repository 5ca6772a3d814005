"""Our end: one peer, started in its own environment.

::

    with Peer("arctic", depth=24) as peer:
        insertion = peer.insert(sequences)
        proposals = peer.propose(contexts, max_tokens=10)
        print(insertion.resident_growth_bytes / insertion.num_tokens, np.median(proposals.us))

All times are taken in the peer's process around its own calls: pipes and copies are never part of a figure.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.child import ROOT, Child, ChildEnded, ChildError
from benchmarks.peers.local import PEER_NAMES, Setting, TokenIds
from benchmarks.walk import Steps

_CHUNK_TOKENS = 1 << 20


class PeerUnavailable(ChildEnded):
    """The peer is not installed. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """What it took a peer to learn sequences; all zero for a peer without a store.

    ``seconds`` : the peer's own calls, added up. ``num_tokens`` : that it can now draft from for other requests; less
    than it was given where it does not store prompts. ``resident_growth_bytes`` : of its resident memory, once freed
    memory was given back.
    """

    seconds: float
    num_tokens: int
    resident_growth_bytes: int


@dataclass(frozen=True, slots=True)
class Proposals:
    """Answers to a list of contexts, in order: float64[n] microseconds, and n of int32[<= max_tokens]."""

    us: npt.NDArray[np.float64]
    drafts: list[TokenIds]


class Peer(Child):
    """A peer's process, from construction to `close`.

    ``options`` are the peer's own:

    - arctic: ``depth`` (64), ``prompt_length`` (32), ``max_cached_requests`` (-1, no limit)
    - vllm-ngram: ``min_ngram`` (2), ``max_ngram`` (5), ``max_context_tokens`` (65,536), ``max_draft`` (256)
    - prompt-lookup: ``max_matching_ngram_size`` (2)
    - sglang-ngram: ``capacity`` (10,000,000), ``match_type`` (BFS), ``min_bfs_breadth`` (1), ``max_bfs_breadth`` (10),
      ``max_trie_depth`` (18), ``draft_tokens`` (12), ``padded`` (0), ``prompts`` (0)
    - llama-cpp: ``type`` (ngram-mod), and ``first``, ``second``, ``third``, its three sizes

    ``setting`` of `propose` is arctic's alone: ``max_spec_factor``, ``max_spec_offset``, ``min_token_prob``,
    ``use_tree_spec``. In `replay` a setting of sglang-ngram or llama-cpp holds options, and has a peer of its own.
    """

    versions: dict[str, str]
    """Versions of the packages that the peer is made of."""
    has_store: bool
    """Whether it learns from finished requests."""
    full_draft: Setting
    """The setting `propose` uses unless it is given one."""

    def __init__(self, name: str, **options: int | str) -> None:
        """Start the peer and wait until it is warm. Raises PeerUnavailable, or ChildError where an option is wrong."""
        if name not in PEER_NAMES:
            raise ValueError(f"no peer is called {name!r}, only {', '.join(PEER_NAMES)}")
        python = environment() / "bin" / "python"
        if not python.exists():
            raise PeerUnavailable(f"the peers are not installed in {environment()}: run `make bench-peers`")
        super().__init__(name, python, "benchmarks.peers.process", _environment_variables())
        try:
            self.ask("open", name, options)
            about = self.ask("about")
        except ChildError as error:
            self.close()
            if error.kind in ("ImportError", "ModuleNotFoundError") or isinstance(error, ChildEnded):
                raise PeerUnavailable(f"{error}\nIs it installed? `make bench-peers` does that") from error
            raise
        self.versions, self.has_store, self.full_draft = about

    def insert(self, sequences: Iterable[TokenIds]) -> Insertion:
        """Let the peer learn finished requests, each int32[n]; they are streamed, so a generator holds nothing twice.

        ``sequences`` is not even looked at for a peer without a store.
        """
        if not self.has_store:
            return Insertion(0.0, 0, 0)
        before = self.ask("resident_bytes")
        ns = num_tokens = 0
        for chunk in _chunks(sequences):
            took, stored = self.ask("insert", chunk)
            ns += took
            num_tokens += stored
        return Insertion(ns / 1e9, num_tokens, self.ask("resident_bytes") - before)

    def propose(self, contexts: Sequence[TokenIds], max_tokens: int, **setting: float | str) -> Proposals:
        """Draft once for each context, as the prompt of a request of its own that leaves nothing behind.

        Without ``setting`` the peer is set to draft up to ``max_tokens`` however short the match: see `full_draft`.
        """
        times: list[int] = []
        drafts: list[TokenIds] = []
        for chunk in _chunks(contexts):
            took, some = self.ask("propose", chunk, max_tokens, setting or self.full_draft)
            times += took
            drafts += some
        return Proposals(np.array(times, np.float64) / 1e3, drafts)

    def replay(
        self, request_id: str, text: TokenIds, prompt_length: int, settings: Sequence[tuple[int, Setting]]
    ) -> list[Steps]:
        """Decode a recorded request in the peer's process, once under each setting, and let the peer keep the output.

        ``text`` : int32[n], prompt and output. ``settings`` : most tokens of a draft, and the peer's own knobs. No
        setting's drafts depend on the others. Without settings the request is only learned, by a peer whose settings
        share a state.
        """
        found: list[Steps] = self.ask("replay", request_id, text, prompt_length, list(settings))
        return found


def environment() -> Path:
    """The peers' virtual environment: ``.venv-peers`` in the checkout, or what ``SSD_PEERS`` names."""
    return Path(os.environ.get("SSD_PEERS") or ROOT / ".venv-peers").absolute()


def _environment_variables() -> dict[str, str]:
    """Ours, with one thread a library, as our own figures are taken, and nothing that calls out."""
    theirs = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | theirs


def _chunks(arrays: Iterable[TokenIds]) -> Iterator[list[TokenIds]]:
    """Groups of about a million tokens."""
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
