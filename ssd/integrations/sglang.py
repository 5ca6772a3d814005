"""SSD's retrieval cache with the interface of SGLang's ``NgramCorpus``, installed by `ssd.integrations.sglang_plugin`.

SGLang's worker passes only the last tokens of each request. SSD keeps the whole text: it reads the prompt in a hook
before the worker's ``_prepare_draft_tokens``, and appends the new tokens of each step. When the worker erases the match
state of a request, the request has ended, and its text is stored.

SGLang verifies the drafts, so they do not change outputs. It verifies a fixed number of tokens per request in every
step. All ranks of a tensor-parallel group must draft the same tokens. A cache that other processes fill cannot
guarantee this, so with more than one rank SGLang keeps its own corpus.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.config import DraftConfig
from ssd.integrations.retrieval_cache import RetrievalCache
from ssd.integrations.settings import read_settings
from ssd.text.codec import TextCodec

log = logging.getLogger("sglang.ssd")

_CORPUS: Final = "sglang.srt.speculative.cpp_ngram.ngram_corpus"
_DEFAULT_MAX_LENGTH: Final = 1 << 17
_server_args: Any = None
"""SGLang's server arguments, which `remember_server` stores for the constructor of `SsdCorpus`."""


def remember_server(_worker: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Store the server arguments that the worker gets, because SGLang does not pass them to the worker's corpus."""
    global _server_args
    _server_args = server_args


def remember_prompts(worker: Any, batch: Any) -> None:
    """Register the new requests of a batch with their whole prompts.

    This hook runs each time before SGLang's worker asks the corpus for drafts. It is needed because the worker passes
    only the last tokens of a request to the corpus.
    """
    corpus = worker.ngram_corpus
    if isinstance(corpus, SsdCorpus):
        corpus.start_requests((request.rid, request.origin_input_ids_unpadded) for request in batch.reqs)


class SsdCorpus:
    """SSD's replacement for SGLang's ``NgramCorpus``: drafts trees from the retrieval cache, and stores completed text.

    One thread of SGLang's scheduler uses it. An exception is counted and logged; requests continue without drafts.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return SGLang's own corpus instead if the server has several tensor-parallel ranks.

        All ranks must draft the same tokens, which a cache that other processes fill cannot guarantee.
        """
        if getattr(_server_args, "tp_size", 1) == 1:
            return super().__new__(cls)
        log.warning(
            "SSD does not draft if tensor parallelism is used (tp_size > 1): SGLang drafts from its own n-gram "
            "corpus instead"
        )
        return _own_corpus()(*args, **kwargs)

    def __init__(self, *, draft_token_num: int, max_trie_depth: int = 18, **_: object) -> None:
        """Open the cache. The settings are the environment variables of ``ssd.integrations.settings``.

        Args:
            draft_token_num: The number of tokens per request that SGLang verifies, with the last token of the text.
            max_trie_depth: Not used.

        Raises:
            ConfigError: A setting is invalid.
            CacheError: The cache cannot be opened.
            ModelError: The tokenizer cannot be loaded.
        """
        arguments, settings = _server_args, read_settings(None)
        name = settings.tokenizer or getattr(arguments, "tokenizer_path", None) or arguments.model_path
        codec = TextCodec.load(str(name))
        self._size, self._capacity = draft_token_num, settings.capacity_tokens
        self.cache = RetrievalCache(
            settings.cache_config(),
            vocab_size=codec.vocab_size,
            max_length=int(getattr(arguments, "context_length", None) or _DEFAULT_MAX_LENGTH),
            fingerprint=codec.fingerprint,
            namespace=settings.namespace,
            warm_dirs=settings.warm_dirs,
            end_of_text_ids=codec.eos_token_ids,
            draft=DraftConfig(
                num_speculative_tokens=max(1, draft_token_num - 1), max_match_length=settings.max_match_length
            ),
        )
        self.num_failures = 0
        self._corpora: dict[str, int] = {}
        log.info(
            "SSD drafts in this engine: up to %d tokens from namespace=%s cache_dir=%s redis=%s",
            draft_token_num - 1,
            settings.namespace,
            settings.cache_dir,
            settings.redis_url is not None,
        )

    def start_requests(self, requests: Iterable[tuple[str, Sequence[int]]]) -> None:
        for name, prompt in requests:
            if name not in self.cache.texts:
                self.cache.start(name, list(prompt))

    def synchronize(self) -> None:
        """Do nothing: stored text can be searched immediately."""

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: whole texts are stored when their requests end."""

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return a draft tree for each request, in SGLang's format.

        Args:
            req_ids: The requests' ids.
            batch_tokens: The last tokens of each request.
            total_lens: The number of tokens of each request.

        Returns:
            The tokens of all trees, int64[n * draft_token_num]: the last token of the text as the root, then draft
            tokens, then zeros. The second array, bool[n * draft_token_num * draft_token_num], contains the attention
            masks: entry [i, j] is whether node i is node j or one of its descendants.
        """
        tokens = np.zeros((len(req_ids), self._size), np.int64)
        parents = np.zeros((len(req_ids), self._size), np.int64)
        tokens[:, 0] = [tail[-1] for tail in batch_tokens]
        try:
            new = map(self._new_tokens, req_ids, batch_tokens, total_lens)
            self.cache.extend(req_ids, list(new))
            for row, draft in enumerate(self.cache.speculate_trees(req_ids, self._size - 1)):
                size = len(draft.token_ids)
                tokens[row, 1 : size + 1] = draft.token_ids
                before = np.arange(-1, size - 1) if draft.parents is None else draft.parents
                parents[row, 1 : size + 1] = before + 1
        except Exception:
            self._record_failure("drafting")
        mask = np.zeros((len(req_ids), self._size, self._size), np.bool_)
        rows = np.arange(len(req_ids))
        for node in range(self._size):
            if node > 0:
                mask[:, node] = mask[rows, parents[:, node]]
            mask[:, node, node] = True
        return tokens.reshape(-1), mask.reshape(-1)

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Store the text of requests that have left the batch, because they have ended or were preempted."""
        try:
            for name in req_ids:
                self.cache.finish(name)
        except Exception:
            self._record_failure("adding text to the cache")

    def reset(self) -> None:
        """Store the text of all running requests, and stop drafting for them. The cache keeps its text.

        SGLang calls this when it flushes its own caches.
        """
        self.erase_match_state(list(self.cache.texts))

    # -- corpora that clients add through SGLang's HTTP API ------------------------------------------------------------

    @property
    def remaining_token_budget(self) -> int:
        return self._capacity

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Store the texts of a corpus that a client added through SGLang's API, and return their number of tokens."""
        if corpus_id in self._corpora:
            raise ValueError(f"corpus {corpus_id!r} exists already: use another id, or remove it first")
        count = 0
        for chunk in chunks:
            self.cache.cache.append(np.array(chunk, np.int32))
            count += len(chunk)
        return count

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        self._corpora[corpus_id] = loaded_token_count

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Forget the name of a corpus; its text stays until it is evicted."""
        self._corpora.pop(corpus_id, None)

    def list_external_corpora(self) -> dict[str, int]:
        return dict(self._corpora)

    def _new_tokens(self, name: str, tail: Sequence[int], total: int) -> Sequence[int]:
        """Return the last tokens of ``tail``: those by which the known text of a request grows to ``total`` tokens.

        If the request is unknown, or ``tail`` is too short, the request starts again with ``tail`` as its whole text,
        and nothing is returned.
        """
        text = self.cache.texts.get(name)
        num_new = -1 if text is None else total - text.length
        if not 0 <= num_new <= len(tail):  # unknown, or it went on without SSD
            self.cache.start(name, list(tail))
            return ()
        return tail[len(tail) - num_new :]

    def _record_failure(self, what: str) -> None:
        self.num_failures += 1
        if self.num_failures.bit_count() == 1:
            log.exception(
                "%s failed (%d times so far): SGLang continues without this operation", what, self.num_failures
            )


def _own_corpus() -> Any:
    """Return SGLang's own corpus class.

    Its module is loaded a second time, because the plug-in has replaced the class in the first copy of the module.
    """
    spec = importlib.util.find_spec(_CORPUS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NgramCorpus
