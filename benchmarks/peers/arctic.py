"""arctic-inference's suffix trees: one over finished responses, one per running request."""

from __future__ import annotations

from importlib import import_module

import numpy as np

from benchmarks.walk import Proposal, Setting, TokenIds


class Arctic:
    """`SuffixDecodingCache` as a server uses it.

    Three of its ways matter to who compares figures. By its own design the tree that all requests share holds responses
    (`start_request` puts a prompt into the request's own tree alone), so prompts draft for nobody else. Only the last
    ``depth`` tokens of a context are matched, and a match together with its draft is at most ``depth`` long. The match
    is always shorter than the context given, so a context of one token never drafts.
    """

    distributions: tuple[str, ...] = ("arctic-inference", "numpy")

    def __init__(self, depth: int = 64) -> None:
        """``depth`` 64 is the library's default, 24 what vLLM sets; no limit on cached requests."""
        library = import_module("arctic_inference.suffix_decoding")
        self._cache = library.SuffixDecodingCache(depth, -1)
        self._depth = depth
        self._of_depth: dict[int, Arctic] = {depth: self}

    def apart(self, max_tokens: int, setting: Setting) -> Arctic:
        """One for each depth: how many tokens are asked for changes no tree."""
        depth = int(setting.get("depth", self._depth))
        if depth not in self._of_depth:
            self._of_depth[depth] = Arctic(depth)
        return self._of_depth[depth]

    def start(self, request_id: str, prompt: TokenIds) -> None:
        self._cache.start_request(request_id, prompt)

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        """``setting``: max_spec_factor, max_spec_offset, min_token_prob, use_tree_spec; the library's where absent.
        ``depth`` is what `apart` heeds."""
        options = {name: value for name, value in setting.items() if name != "depth"}
        options["use_tree_spec"] = bool(setting.get("use_tree_spec", False))
        pattern = np.ascontiguousarray(context[-self._depth :])
        draft = self._cache.speculate(request_id, pattern, max_spec_tokens=max_tokens, **options)
        return Proposal(draft.token_ids, draft.parents)

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        self._cache.add_active_response(request_id, token_ids)

    def stop(self, request_id: str) -> None:
        self._cache.stop_request(request_id)
