"""Start a peer (a drafter of another project) in its own environment, and send requests to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.child import ROOT, Child, ChildEnded, ChildError
from benchmarks.peers.process import PEERS
from benchmarks.walk import Setting, Steps, TokenIds


class PeerUnavailable(ChildEnded):
    """A peer (a drafter of another project) is not installed. The message tells how to install it."""


class Peer(Child):
    """A running process with a peer, which is a drafter of another project. `close` ends it.

    ``options`` configure the peer (defaults in parentheses):

    - arctic: ``depth`` (64)
    - vllm-ngram: ``max_context_tokens`` (65,536), ``max_draft`` (256), ``least`` (2), ``most`` (5)
    - sglang: ``capacity`` (10,000,000), ``match_type`` (BFS), ``max_bfs_breadth`` (10), ``draft_tokens`` (12),
      ``padded`` (0), ``prompts`` (0)
    - llama-cpp: ``type`` (ngram-mod), and its three sizes ``first``, ``second``, ``third``

    A setting, passed to `replay`, may contain:

    - arctic: ``max_spec_factor``, ``max_spec_offset``, ``min_token_prob``, ``use_tree_spec`` and ``depth``
    - prompt-lookup-hf: ``ngram``
    - vllm-ngram: ``least`` and ``most``
    - sglang and llama-cpp: the options above; each setting then has its own peer
    """

    versions: dict[str, str]
    """The versions of the Python packages that implement the drafter."""

    def __init__(self, name: str, **options: int | str) -> None:
        """Start the drafter's process and wait for it. Raises PeerUnavailable, or ChildError for invalid options."""
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
        """Replay a recorded request in the drafter's process once per setting; the drafter then stores the output.

        Args:
            request_id: The name of the request.
            text: The prompt and the output, int32[n].
            prompt_length: The number of prompt tokens.
            settings: For each setting the maximum number of draft tokens and the drafter's parameters.

        Returns:
            The verification steps of each setting. The drafts of a setting do not depend on the other settings.
        """
        found: list[Steps] = self.ask("replay", request_id, text, prompt_length, list(settings))
        return found


def environment() -> Path:
    """Return the path of the peers' virtual environment: ``$SSD_PEERS``, or ``.venv-peers`` in the checkout."""
    return Path(os.environ.get("SSD_PEERS") or ROOT / ".venv-peers").absolute()


def _environment_variables() -> dict[str, str]:
    """Return this process's environment variables, with one thread per library and without network access."""
    theirs = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | theirs
