"""transformers' prompt lookup: the first place in a request's own text where its last tokens occurred."""

from __future__ import annotations

from importlib import import_module
from time import perf_counter_ns

import numpy as np

from benchmarks.peers.frames import TokenIds
from benchmarks.peers.local import Setting, Speculation, chain
from benchmarks.peers.own_context import OwnContext, refuse_settings


class PromptLookup(OwnContext):
    """`PromptLookupCandidateGenerator.get_candidates`, which generation calls before every pass; one torch thread."""

    distributions: tuple[str, ...] = ("transformers", "torch", "numpy")

    def __init__(self, max_matching_ngram_size: int = 2) -> None:
        """``max_matching_ngram_size`` 2 is the library's default."""
        super().__init__()
        self.full_draft: Setting = {}
        self._ngram_size = max_matching_ngram_size
        self._torch = import_module("torch")
        self._torch.set_num_threads(1)
        self._generator = import_module("transformers.generation.candidate_generator").PromptLookupCandidateGenerator
        self.start("warm-up", np.empty(0, np.int32))
        for text in (np.tile(np.arange(8, dtype=np.int32), 4), np.arange(64, dtype=np.int32)):
            for _ in range(8):
                self.speculate("warm-up", text, 8, {})
        self.stop("warm-up", keep=False)

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Speculation:
        self.require_running(request_id)
        refuse_settings("prompt-lookup", setting)
        # Generation hands over ids that are int64 tensors already and builds the generator once a request.
        input_ids = self._torch.from_numpy(context.astype(np.int64)[None, :])
        generator = self._generator(
            num_output_tokens=max_tokens,
            max_matching_ngram_size=self._ngram_size,
            # The length that generation may reach. Its default, 20, would cut drafts out of longer contexts.
            max_length=len(context) + max_tokens + 1,
        )
        began = perf_counter_ns()
        candidates, _ = generator.get_candidates(input_ids)
        took = perf_counter_ns() - began
        draft = candidates[0, len(context) :].tolist()
        return Speculation(ns=took, token_ids=draft, parents=chain(len(draft)))
