"""The n-gram speculation of SGLang: one trie of the recent tokens of all requests, from which draft trees are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.peers.build import load_corpus_class
from benchmarks.walk import Proposal, Setting, TokenIds

_DRAFT_TOKENS = 12
DEPTH, CAPACITY = 18, 10_000_000
"""The depth of the trie in tokens and its number of nodes: the defaults of SGLang's server."""
_SHIFT = 1  # of token ids, so that no real one is the 0 that it fills drafts with


@dataclass(slots=True)
class _Request:
    text: list[int]
    """The prompt and output so far, with shifted token ids."""
    asked_length: int = 0
    """The context length of the last draft, if that context has not been added to the trie yet; else 0."""


class SglangNgram:
    """SGLang's `NgramCorpus`, called as its `NGRAMWorker` calls it (sglang/srt/speculative/ngram_worker.py).

    After each step, the last ``max_trie_depth`` tokens of the context that was drafted from are added to the trie, with
    each suffix as a path. So a token is counted many times, and of a prompt only the last tokens are ever added. The
    last tokens of a request are added when it ends, as with SGLang's overlap scheduler. A draft is a tree of
    ``draft_tokens - 1`` nodes, padded with token 0 if the trie has fewer.

    The content of the trie depends on the drafts, because tokens are added after each step. Therefore, `apart` creates
    a new drafter for every setting. A setting contains options of the constructor.
    """

    distributions: tuple[str, ...] = ("sglang", "apache-tvm-ffi", "torch", "numpy")

    def __init__(
        self,
        capacity: int = CAPACITY,
        match_type: str = "BFS",
        max_bfs_breadth: int = 10,
        draft_tokens: int = _DRAFT_TOKENS,
        padded: int = 0,
        prompts: int = 0,
    ) -> None:
        """Create a drafter; the defaults are those of SGLang's server.

        Args:
            capacity: The number of nodes of the trie, allocated at once.
            match_type: "BFS" drafts the most recent continuations, "PROB" the most frequent ones.
            max_bfs_breadth: The maximum breadth of the draft tree.
            draft_tokens: The number of nodes of a draft, plus one for the token before it.
            padded: 1 counts padding as draft tokens, because the server's passes compute it.
            prompts: 1 adds whole prompts to the trie, which SGLang's worker has code for but does not do.
        """
        import_module("torch").set_num_threads(1)
        load_corpus_class()  # here, so that what is missing is known at once
        self._options: dict[str, Any] = {
            "capacity": capacity,
            "match_type": match_type,
            "max_bfs_breadth": max_bfs_breadth,
            "draft_tokens": draft_tokens,
            "padded": padded,
            "prompts": prompts,
        }
        self._is_padded, self._with_prompts = bool(padded), bool(prompts)
        self._requests: dict[str, _Request] = {}

    @cached_property
    def _corpus(self) -> Any:
        """The trie, created at the first use: an instance that only creates others by `apart` never needs it."""
        options = {name: value for name, value in self._options.items() if name not in ("padded", "prompts")}
        options["draft_token_num"] = options.pop("draft_tokens")
        return load_corpus_class()(**options, min_bfs_breadth=1, max_trie_depth=DEPTH)

    def apart(self, max_tokens: int, setting: Setting) -> SglangNgram:
        return SglangNgram(**{**self._options, "draft_tokens": max_tokens + 1, **setting})

    def start(self, request_id: str, prompt: TokenIds) -> None:
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already running")
        self._requests[request_id] = request = _Request(_shifted(prompt))
        if self._with_prompts and request.text:
            self._put(request.text)

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        """Draft a tree after ``context``. ``max_tokens`` cuts the tree, whose nodes are ordered by level."""
        request = self._requests[request_id]
        if not len(context):
            return Proposal([])
        tail = _shifted(context[-DEPTH:])
        request.asked_length = len(context)
        tokens, mask = self._corpus.batch_get([request_id], [tail], [len(context)])
        token_ids, parents = _tree(tokens.tolist(), mask)
        num_tokens = len(token_ids) if self._is_padded else _without_filling(token_ids)
        num_tokens = min(num_tokens, max_tokens)
        kept = [each - _SHIFT for each in token_ids[:num_tokens]]
        return Proposal(kept, parents[:num_tokens])

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """End a step: add the last tokens of the drafted context to the trie, and store the new tokens."""
        request = self._requests[request_id]
        if request.asked_length:
            self._put_tail(request, request.asked_length)
        request.text += _shifted(token_ids)

    def stop(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._put_tail(request, len(request.text))
        self._corpus.erase_match_state([request_id])

    def _put_tail(self, request: _Request, end: int) -> None:
        self._put(request.text[max(0, end - DEPTH) : end])
        request.asked_length = 0

    def _put(self, tokens: list[int]) -> None:
        # The server waits before the next match, after a pass that hides it.
        self._corpus.batch_put([tokens])
        self._corpus.synchronize()


def _shifted(token_ids: TokenIds) -> list[int]:
    tokens: list[int] = (token_ids + _SHIFT).tolist()
    return tokens


def _tree(tokens: Sequence[int], mask: Any) -> tuple[list[int], list[int]]:
    """Return the nodes of a draft tree and the index of each node's parent, without the root.

    The root is the last token of the context. In ``mask``, [n * n], row i marks node i and its ancestors. The nearest
    ancestor has the largest index, because nodes are ordered by level.
    """
    size = len(tokens)
    ancestors = np.tril(np.asarray(mask).reshape(size, size), -1) != 0
    parents = size - 1 - ancestors[:, ::-1].argmax(axis=1)
    return list(tokens[1:]), [int(parent) - 1 for parent in parents[1:]]


def _without_filling(token_ids: Sequence[int]) -> int:
    return next((index for index, token_id in enumerate(token_ids) if token_id == 0), len(token_ids))
