"""Our end: one peer, started in its own environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.child import ROOT, Child, ChildEnded, ChildError
from benchmarks.peers.process import PEERS
from benchmarks.walk import Setting, Steps, TokenIds


class PeerUnavailable(ChildEnded):
    """The peer is not installed. The message says what to do."""


class Peer(Child):
    """A peer's process, from construction to `close`.

    ``options`` are the peer's own:

    - arctic: ``depth`` (64)
    - vllm-ngram: ``max_context_tokens`` (65,536), ``max_draft`` (256), ``least`` (2), ``most`` (5)
    - sglang: ``capacity`` (10,000,000), ``match_type`` (BFS), ``max_bfs_breadth`` (10), ``draft_tokens`` (12),
      ``padded`` (0), ``prompts`` (0)
    - llama-cpp: ``type`` (ngram-mod), and ``first``, ``second``, ``third``, its three sizes

    A setting of arctic holds ``max_spec_factor``, ``max_spec_offset``, ``min_token_prob``, ``use_tree_spec`` and
    ``depth``; one of prompt-lookup-hf ``ngram``; one of vllm-ngram its last two options; one of sglang or llama-cpp
    options, and has a peer of its own.
    """

    versions: dict[str, str]
    """Versions of the packages that the peer is made of."""

    def __init__(self, name: str, **options: int | str) -> None:
        """Start the peer and wait until it is warm. Raises PeerUnavailable, or ChildError where an option is wrong."""
        if name not in PEERS:
            raise ValueError(f"no peer is called {name!r}, only {', '.join(PEERS)}")
        python = environment() / "bin" / "python"
        if not python.exists():
            raise PeerUnavailable(f"the peers are not installed in {environment()}: run `make bench-peers`")
        super().__init__(name, python, "benchmarks.peers.process", _environment_variables())
        try:
            self.ask("open", name, options)
            self.versions = self.ask("versions")
        except ChildError as error:
            self.close()
            if error.kind in ("ImportError", "ModuleNotFoundError") or isinstance(error, ChildEnded):
                raise PeerUnavailable(f"{error}\nIs it installed? `make bench-peers` does that") from error
            raise

    def replay(
        self, request_id: str, text: TokenIds, prompt_length: int, settings: Sequence[tuple[int, Setting]]
    ) -> list[Steps]:
        """Decode a recorded request in the peer's process, once under each setting, and let the peer keep the output.

        ``text`` : int32[n], prompt and output. ``settings`` : most tokens of a draft, and the peer's own knobs. No
        setting's drafts depend on the others.
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
