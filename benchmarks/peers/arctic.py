"""The suffix-tree drafter of arctic-inference: one tree over all finished responses, and one per running request."""

from __future__ import annotations

from importlib import import_module

import numpy as np

from benchmarks.walk import Proposal, Setting, TokenIds


class Arctic:
    """The `SuffixDecodingCache` of arctic-inference, called as a server calls it.

    Three properties matter for comparisons. The shared tree contains only responses, because `start_request` adds a
    prompt only to the request's own tree; so prompts never help other requests. Only the last ``depth`` tokens of a
    context are matched, and a match together with its draft has at most ``depth`` tokens. A match is always shorter
    than the context, so nothing is drafted after a context of one token.
    """

    distributions: tuple[str, ...] = ("arctic-inference", "numpy")

    def __init__(self, depth: int = 64) -> None:
        """Create a cache without a limit on requests. ``depth`` is 64 in the library and 24 in vLLM by default."""
        library = import_module("arctic_inference.suffix_decoding")
        self._cache = library.SuffixDecodingCache(depth, -1)
        self._depth = depth
        self._of_depth: dict[int, Arctic] = {depth: self}

    def apart(self, max_tokens: int, setting: Setting) -> Arctic:
        """Return the drafter for a setting: one per ``depth``, because no other part of a setting changes the trees."""
        depth = int(setting.get("depth", self._depth))
        if depth not in self._of_depth:
            self._of_depth[depth] = Arctic(depth)
        return self._of_depth[depth]

    def start(self, request_id: str, prompt: TokenIds) -> None:
        self._cache.start_request(request_id, prompt)

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        """Draft after ``context``.

        ``setting`` may contain max_spec_factor, max_spec_offset, min_token_prob and use_tree_spec; the library's
        defaults apply otherwise. Its ``depth`` is used by `apart` only.
        """
        options = {name: value for name, value in setting.items() if name != "depth"}
        options["use_tree_spec"] = bool(setting.get("use_tree_spec", False))
        pattern = np.ascontiguousarray(context[-self._depth :])
        draft = self._cache.speculate(request_id, pattern, max_spec_tokens=max_tokens, **options)
        return Proposal(draft.token_ids, draft.parents)

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        self._cache.add_active_response(request_id, token_ids)

    def stop(self, request_id: str) -> None:
        self._cache.stop_request(request_id)
