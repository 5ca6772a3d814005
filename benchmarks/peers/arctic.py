"""arctic-inference's suffix trees: one over finished responses, one per running request."""

from __future__ import annotations

from importlib import import_module
from time import perf_counter_ns
from typing import Self

import numpy as np

from benchmarks.peers.local import Setting, Speculation, TokenIds

_SETTINGS = {"max_spec_factor", "max_spec_offset", "min_token_prob", "use_tree_spec"}


class Arctic:
    """`SuffixDecodingCache` as a server uses it.

    Three of its ways matter to who compares figures. The tree of finished requests holds responses, not prompts: the
    first ``prompt_length`` tokens of an inserted sequence draft for nobody. Only the last ``depth`` tokens of a context
    are matched, and a match together with its draft is at most ``depth`` long. The match is always shorter than the
    context given, so a context of one token never drafts.
    """

    distributions: tuple[str, ...] = ("arctic-inference", "numpy")
    has_store = True

    def __init__(self, depth: int = 64, prompt_length: int = 32, max_cached_requests: int = -1) -> None:
        """``depth`` 64 is the library's default, 24 what vLLM sets; no limit on cached requests unless given."""
        library = import_module("arctic_inference.suffix_decoding")
        self._cache = library.SuffixDecodingCache(depth, max_cached_requests)
        self._depth = depth
        self._prompt_length = prompt_length
        self._num_inserted = 0
        # By default a draft is no longer than the match it follows and stops at a chance of 0.1. The offset alone
        # lifts the first limit: `factor * match + offset` then never falls below what was asked for.
        self.full_draft: Setting = {"max_spec_factor": 1.0, "max_spec_offset": float(depth), "min_token_prob": 0.0}

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        return self

    def insert(self, sequence: TokenIds) -> tuple[int, int]:
        """A whole request at once: started, answered in one piece, stopped."""
        key = ("inserted", self._num_inserted)
        self._num_inserted += 1
        prompt, response = sequence[: self._prompt_length], sequence[self._prompt_length :]
        began = perf_counter_ns()
        self._cache.start_request(key, prompt)
        self._cache.add_active_response(key, response)
        self._cache.stop_request(key)
        return perf_counter_ns() - began, len(response)

    def start(self, request_id: str, prompt: TokenIds) -> None:
        self._cache.start_request(request_id, prompt)

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Speculation:
        """``setting``: max_spec_factor, max_spec_offset, min_token_prob, use_tree_spec; the library's where absent."""
        if unknown := setting.keys() - _SETTINGS:
            raise ValueError(f"arctic has no setting {sorted(unknown)}, only {sorted(_SETTINGS)}")
        options = {**setting, "use_tree_spec": bool(setting.get("use_tree_spec", False))}
        pattern = np.ascontiguousarray(context[-self._depth :])
        began = perf_counter_ns()
        draft = self._cache.speculate(request_id, pattern, max_spec_tokens=max_tokens, **options)
        took = perf_counter_ns() - began
        return Speculation(ns=took, token_ids=draft.token_ids, parents=draft.parents)

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        self._cache.add_active_response(request_id, token_ids)

    def stop(self, request_id: str, keep: bool) -> None:
        self._cache.stop_request(request_id)
        if not keep and request_id in self._cache.cached_requests:
            self._cache.evict_cached_response(request_id)
