"""The retrieval cache as a library for other inference engines, with five methods.

::

    with RetrievalCache(vocab_size=32000, max_length=4096, end_of_text_ids=[2]) as cache:
        cache.start("a", prompt_ids)                     # a request arrives
        while not finished:
            (draft,) = cache.speculate(["a"])            # draft the next tokens
            new = verify(draft)                          # the engine: accepted tokens and one token of its own
            cache.extend(["a"], [new])
        cache.finish("a")                                # later requests draft from this text
        print(cache.stats())

One kernel call drafts for all running requests. Text is searchable as soon as its request has finished. With a cache
directory, text survives a restart. With Redis, other replicas also draft from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.batch_drafter import BatchDrafter
from ssd.drafting.draft_records import MAX_DRAFT
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.row_texts import NUM_HEADER_WORDS, RowText, TokenRows
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.errors import ConfigError
from ssd.retrieval.cache_manager import DEFAULT_NAMESPACE, CacheManager, NamespaceCache

_SUNK_TOKEN_COST = 0.02  # in expected accepted tokens; the engine verifies unused nodes of a tree too
_ANY_TOKENIZER = "0" * 32  # the fingerprint of a cache that stays in this process
TokenIds = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalStats:
    """Counters of a `RetrievalCache` since it was opened, and the size of its cache now.

    Draft trees are not counted.
    """

    num_proposals: int = 0
    """The number of drafts that were requested."""

    num_drafts: int = 0
    """The number of drafts that were not empty."""

    num_draft_tokens: int = 0
    num_stored: int = 0
    """The number of finished requests whose text was stored in the cache."""

    num_running: int = 0
    num_cached_tokens: int = 0


class RetrievalCache:
    """A retrieval cache with a drafter, for engines that verify drafts themselves, such as vLLM. Not thread-safe."""

    text_type: type[RowText] = RowText

    def __init__(
        self,
        config: CacheConfig | None = None,
        *,
        vocab_size: int,
        max_length: int,
        fingerprint: str = "",
        namespace: str = DEFAULT_NAMESPACE,
        warm_dirs: Sequence[Path] = (),
        end_of_text_ids: Iterable[int] = (),
        draft: DraftConfig | None = None,
        shared_vocab_size: int | None = None,
        **drafting: Any,
    ) -> None:
        """Open the cache, and compile the kernels at the first use on a machine, which takes a minute.

        Args:
            config: The size of the cache, its directory and its Redis server. None keeps the cache in memory.
            vocab_size: The size of the target's vocabulary. Drafts never contain other token ids.
            max_length: The maximum number of tokens of a request, with its prompt.
            fingerprint: The fingerprint of the tokenizer, ``TextCodec.load(MODEL).fingerprint``. It is required if the
                cache is stored or shared, because token ids of another tokenizer mean other text.
            namespace: The name of the cache within its directory and in Redis.
            warm_dirs: Directories written by ``ssd-cache build``, which are searched too.
            end_of_text_ids: The tokens that end a text. A draft ends with the first such token.
            draft: The limits of drafts: their number of tokens and the length of matches.
            shared_vocab_size: The number of token ids that text from Redis may contain (default: ``vocab_size``).
            **drafting: Further arguments of `BatchDrafter`.

        Raises:
            ConfigError: An argument is invalid, or ``fingerprint`` is missing.
            CacheError: The cache cannot be opened.
        """
        config, draft = config or CacheConfig(), draft or DraftConfig()
        if not fingerprint and (config.directory or config.redis_url or warm_dirs):
            raise ConfigError("a stored or shared cache requires fingerprint: ssd.TextCodec.load(MODEL).fingerprint")
        fingerprint = fingerprint or _ANY_TOKENIZER
        self.max_length, self.end_of_text_ids = max_length, frozenset(end_of_text_ids)
        self.texts: dict[str, RowText] = {}
        self._vocab_size, self._draft = vocab_size, draft
        self._tree_drafter: SuffixDrafter | None = None  # created when a tree is drafted for the first time
        self.num_stored = 0
        self.unmatched_rows: list[int] = []  # the rows of the last step whose text does not match the engine's arrays
        self._assigned: list[str] | None = None  # the ids of the drafter's rows
        self._step_began_s = self._step_s = 0.0
        with ExitStack() as opening:
            attach = None
            if config.redis_url is not None:
                from ssd.replication.replication_log import ReplicationLog  # requires redis-py, which is optional

                replication_log = ReplicationLog(
                    config.redis_url, fingerprint=fingerprint, vocab_size=shared_vocab_size or vocab_size
                )
                attach = opening.enter_context(replication_log).attach
            caches = opening.enter_context(CacheManager(config, fingerprint, namespace=namespace, on_open=attach))
            self.cache: NamespaceCache = caches.get()
            for directory in warm_dirs:
                self.cache.add_prebuilt_directory(directory)
            self.drafter = BatchDrafter(
                max_length=max_length,
                vocab_size=vocab_size,
                end_of_text_ids=self.end_of_text_ids,
                max_match_length=draft.max_match_length,
                min_match_length=draft.min_match_length,
                learned=self.cache.learned,
                **{"longest": min(MAX_DRAFT, draft.num_speculative_tokens)} | drafting,
            )
            self.drafter.warm_up()
            self._allocate(16)
            self._resources = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, request_id: str, token_ids: TokenIds, prompt_length: int | None = None) -> None:
        """Register a request, for which drafts can then be requested. O(tokens).

        ``token_ids`` are the prompt, or the prompt and the output so far; then ``prompt_length`` is the length of the
        prompt. A running request with the same id is replaced.
        """
        tokens = np.array(token_ids, np.int32)
        length = len(tokens) if prompt_length is None else min(prompt_length, len(tokens))
        self.texts[request_id] = self.text_type(tokens, length, self.max_length)
        self._assigned = None

    def extend(self, request_ids: Sequence[str], token_ids: Sequence[TokenIds]) -> list[int]:
        """Append newly generated tokens to the texts of requests, and return the length of each text.

        A request that was not started has length 0. A text that would exceed ``max_length`` is not extended.
        """
        self._step_s = time.perf_counter() - self._step_began_s
        self._assign(request_ids)
        return self.drafter.extend(token_ids)

    def speculate(
        self,
        request_ids: Sequence[str],
        limit: int | None = None,
        needs_draft: Sequence[bool] | None = None,
        source: TokenRows | None = None,
    ) -> list[list[int]]:
        """Draft the next tokens of each request; a draft is empty if verifying one is not expected to save time.

        The draft lengths of all requests are chosen together, for the greatest number of output tokens per second. The
        engine's step time, which this choice requires, is measured from the return of this method to the next
        ``extend``.

        Args:
            request_ids: The requests of the next decoding step. Requests that were not started get empty drafts.
            limit: The maximum number of tokens per draft (default: ``draft.num_speculative_tokens``).
            needs_draft: Whether to draft for each request (default: for all).
            source: The engine's own arrays of tokens, from which the texts are extended first, instead of by
                ``extend``. Requests without new tokens get empty drafts, and so do those in ``unmatched_rows``.
        """
        if source is not None:
            self._step_s = time.perf_counter() - self._step_began_s
        self._assign(request_ids)
        count, longest = len(request_ids), self.drafter.longest
        self.unmatched_rows = self.drafter.draft(
            [True] * count if needs_draft is None else needs_draft,
            self.cache.snapshot(),
            self._words,
            longest if limit is None else min(limit, longest),
            self._step_s,
            source,
        )
        self._step_s, self._step_began_s = 0.0, time.perf_counter()
        words, width = self._flat_words, self._words.shape[1]
        starts = range(NUM_HEADER_WORDS, count * width, width)
        return [words[start : start + words[start - 1]].tolist() for start in starts]

    def speculate_trees(self, request_ids: Sequence[str], limit: int) -> list[Draft]:
        """Draft a tree of at most ``limit`` tokens for each request, for engines that verify trees of a fixed size.

        Requests that were not started get empty drafts. Token i of a draft follows its token ``parents[i]``, or the
        text if ``parents[i]`` is -1; without ``parents``, the draft is a chain.
        """
        if self._tree_drafter is None:
            self._tree_drafter = SuffixDrafter(
                max_match_length=self._draft.max_match_length,
                default_token_cost=_SUNK_TOKEN_COST,
                recycling=False,
                use_sample_cache=False,
            )
        snapshot, learned = self.cache.snapshot(), self.cache.learned
        requests = [
            DraftRequest(name, text.tokens, text.prompt_length, snapshot, limit, allow_tree=True, learned=learned)
            for name in request_ids
            if (text := self.texts.get(name)) is not None
        ]
        found = {
            request.request_id: draft if (draft.token_ids < self._vocab_size).all() else EMPTY_DRAFT
            for request, draft in zip(requests, self._tree_drafter.propose(requests), strict=True)
        }
        return [found.get(name, EMPTY_DRAFT) for name in request_ids]

    def finish(self, request_id: str, num_tokens: int | None = None) -> None:
        """End a request and store its text in the cache. O(tokens); does nothing if the request was not started.

        ``num_tokens`` is the number of tokens that the client received, with the prompt (default: all). Text after an
        end-of-text token, and a prompt without output, are not stored.
        """
        if (text := self.pop(request_id)) is not None:
            self.drafter.clear()
            self.store([text], num_tokens)

    def stats(self) -> RetrievalStats:
        proposals, drafts, draft_tokens = self.drafter.counts
        return RetrievalStats(
            num_proposals=proposals,
            num_drafts=drafts,
            num_draft_tokens=draft_tokens,
            num_stored=self.num_stored,
            num_running=len(self.texts),
            num_cached_tokens=self.cache.snapshot().num_tokens,
        )

    def close(self) -> None:
        """Store the text of running requests and close the cache. May be called twice."""
        for drafter in (self.drafter, self._tree_drafter):
            if drafter is not None:
                drafter.publish()
        self.store([text for name in list(self.texts) if (text := self.pop(name)) is not None])
        self._resources.close()

    # -- for engines that keep the texts themselves -------------------------------------------------------------------

    def pop(self, request_id: str) -> Any:
        """Remove a request without storing its text, for engines that store the text later with ``store``.

        Returns the text, or None if the request was not started.
        """
        self._assigned = None
        if self._tree_drafter is not None:
            self._tree_drafter.finish(request_id)
        return self.texts.pop(request_id, None)

    def store(self, texts: Iterable[RowText], num_tokens: int | None = None) -> None:
        """Add texts from ``pop`` to the cache, under the same rules as ``finish``."""
        for text in texts:
            end = self.length_to_store(text, num_tokens)
            if end > text.prompt_length:
                self.cache.append(text.tokens[:end], prompt_length=text.prompt_length)
                self.num_stored += 1

    def length_to_store(self, text: RowText, num_tokens: int | None) -> int:
        """Return how many tokens of an ended request are stored, counted from the beginning of the prompt.

        These are the first ``num_tokens`` tokens (None: all of them), but none after the first end-of-text token.
        """
        length = text.length if num_tokens is None else min(num_tokens, text.length)
        # Only the last step can contain tokens after an end of text, because a draft may continue after it.
        start = min(length, text.length - text.num_new)
        last = text.tokens[start:length].tolist()
        return start + next((at + 1 for at, token in enumerate(last) if token in self.end_of_text_ids), len(last))

    def _assign(self, request_ids: Sequence[str]) -> None:
        """Make ``request_ids`` the rows of the drafter, in this order, if they have changed since the last step."""
        if self._assigned != request_ids:
            self._assigned = list(request_ids)
            self.drafter.assign([self.texts.get(name) for name in request_ids])
            if len(request_ids) > len(self._words):
                self._allocate(2 * len(request_ids))

    def _allocate(self, num_rows: int) -> None:
        self._words = self.drafter.new_words(num_rows)
        self._flat_words = self._words.reshape(-1).data  # slices of it are faster than those of numpy
