"""Our drafter inside vLLM, as a proposer class of its own::

    vllm serve MODEL --speculative-config \\
      '{"method": "custom_class", "model": "ssd.integrations.vllm.SuffixProposer", "num_speculative_tokens": 16}'

Settings (``ssd.integrations.settings``) come from ``SSD_CACHE_DIR``, ``SSD_REDIS_URL``, ``SSD_NAMESPACE`` and so on, or
from ``--additional-config '{"ssd": {"cache_dir": ...}}'``. A directory, warm-up directories and a Redis log are shared
with ``ssd-serve``: the names and the tokenizer's fingerprint are the same.

vLLM hands over rows of tokens and nothing else. Where it loads our entry point (``ssd.integrations.vllm_plugin``, which
an installed package brings), requests and their ends are known by id; elsewhere they are told apart by their text
(``ssd.integrations.requests``). vLLM calls its interface for such classes experimental: see ``TESTED_VERSIONS``.

vLLM verifies: an accepted token is one that the target chose, so drafts change no output. It gives up its asynchronous
scheduling for classes like this one, and where the longest request of a step leaves no room for a full draft before
``max_model_len`` it asks for no drafts at all in that step. A server that is told to stop kills its workers at once
unless it runs with ``--shutdown-timeout``: then all is kept, otherwise what was not sealed yet is lost, the last
``rebuild_interval_s``.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.config import DraftConfig
from ssd.drafting.rows import RowDrafter
from ssd.integrations import vllm_plugin
from ssd.integrations.requests import Learner, OpenNamespace, Request, RequestTable, Row
from ssd.integrations.vllm_plugin import (
    TESTED_VERSIONS,
    is_first_rank,
    load_codec,
    num_pipeline_stages,
    settings_of,
    warn_if_untested,
)

__all__ = ["TESTED_VERSIONS", "ProposerStats", "SuffixProposer"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerStats:
    """Counters since the start."""

    num_proposals: int
    """Rows that could have had a draft."""
    num_drafts: int
    num_draft_tokens: int
    num_learned: int
    """Requests that ended and were given to the cache."""
    num_failures: int
    """Failed calls; each cost drafts and nothing else."""
    knows_ids: bool
    """Whether requests are known by vLLM's ids."""


class SuffixProposer:
    """Drafts for every running request of a vLLM engine from a namespace of the cache, and learns what completes.

    Made and called by vLLM, on one thread. Of the ranks of a tensor-parallel group only the first one drafts: vLLM
    takes its drafts. Each engine of a data-parallel group has a cache of its own, in the directory ``rank-N`` below
    ``cache_dir``; they share through Redis.
    """

    def __init__(self, vllm_config: Any) -> None:
        """``vllm_config`` : vLLM's. Raises ConfigError and CacheError, and ModelError where text is shared and the
        tokenizer cannot be loaded.
        """
        warn_if_untested()
        model, settings = vllm_config.model_config, settings_of(vllm_config)
        draft = DraftConfig(
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
            max_match_length=settings.max_match_length,
        )
        vocab_size = int(model.get_vocab_size())
        self._runner: weakref.ref[Any] | None = None  # weak: the runner holds this proposer
        self._known_batch: Any = None  # of the runner, as it was at the last call
        self._knows_ids = False
        self._names: list[str] | None = None  # of the rows as they are seated, where they are known by id
        self._num_seated = 0  # requests in them
        self._num_failures = self._num_learned = 0
        self._ended = 0.0  # the last call
        self._learner: Learner | None = None
        self._drafter: RowDrafter | None = None
        if not is_first_rank():
            return
        codec = load_codec(settings.tokenizer or model.tokenizer or model.model, settings)
        fingerprint = codec.fingerprint if codec else xxhash.xxh3_128_hexdigest(str(model.model).encode())
        namespace = OpenNamespace(
            settings, fingerprint=fingerprint, vocab_size=codec.vocab_size if codec else vocab_size
        )
        requests = RequestTable(patience=4 * num_pipeline_stages(vllm_config))
        learner = self._learner = Learner(namespace, requests, frozenset(codec.eos_token_ids if codec else ()))
        drafter = self._drafter = RowDrafter(
            limit=draft.num_speculative_tokens,
            max_length=int(model.max_model_len),
            vocab_size=vocab_size,
            end_of_text_ids=learner.end_of_text_ids,
            max_match_length=draft.max_match_length,
            min_match_length=draft.min_match_length,
            learned=namespace.cache.learned,
        )
        drafter.warm_up()
        # Closed when vLLM drops its runner, and at the end of the process; a forked worker runs the first kind only.
        at_exit = multiprocessing.util.Finalize(None, _close, (learner, drafter), exitpriority=10)
        self._finalizer = weakref.finalize(self, at_exit)
        if vllm_plugin.is_registered():
            vllm_plugin.watch(_is_ours)
        log.info("drafting up to %d tokens from namespace=%s", draft.num_speculative_tokens, settings.namespace)

    def load_model(self, target_model: object) -> None:
        """There is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """One draft for each row of the batch, empty where nothing is known. Never raises.

        ``sampled_token_ids`` : what this step gave each row; empty for a row that is still prefilling.
        ``num_tokens_no_spec`` : int32[rows or more], tokens of each row, these included. ``token_ids_cpu`` :
        int32[rows or more, max_model_len], row i has its text in ``[i, :num_tokens_no_spec[i]]``.
        """
        learner, drafter = self._learner, self._drafter
        if learner is None or drafter is None:
            return [[] for _ in sampled_token_ids]
        try:
            seconds = time.perf_counter() - self._ended
            batch, snapshot, drafts = self._batch(token_ids_cpu), learner.namespace.cache.snapshot(), None
            if self._may_be_seated(learner, batch):
                drafts = drafter.draft(
                    sampled_token_ids, num_tokens_no_spec, token_ids_cpu, snapshot, seconds, by_text=batch is None
                )
            if drafts is None:
                if not self._seat(learner, drafter, batch, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
                    seconds = 0.0
                drafts = drafter.draft(
                    sampled_token_ids, num_tokens_no_spec, token_ids_cpu, snapshot, seconds, is_seated=True
                )
                assert drafts is not None
            self._ended = time.perf_counter()
            return drafts
        except Exception:  # whatever is wrong in here must not be the request's problem
            self._failed("drafting")
            return [[] for _ in sampled_token_ids]

    def on_step(self, runner: Any, finished: Iterable[str]) -> None:
        """vLLM's runner begins a step, and the requests ``finished`` have ended. Never raises."""
        try:
            if self._runner is None or self._runner() is not runner:
                self._runner, self._known_batch = weakref.ref(runner), None
            names = list(finished)
            if names and self._knows_ids and self._learner is not None:
                states = getattr(runner, "requests", {})
                for name in names:
                    _catch_up(self._learner.requests.get(name), states.get(name))
                self._end(self._learner, self._learner.requests.end(names))
        except Exception:
            self._failed("learning")

    def stats(self) -> ProposerStats:
        """The counters as they are now."""
        proposals, drafts, draft_tokens = (0, 0, 0) if self._drafter is None else self._drafter.counts
        return ProposerStats(
            num_proposals=proposals,
            num_drafts=drafts,
            num_draft_tokens=draft_tokens,
            num_learned=self._num_learned if self._learner is None else self._learner.num_learned,
            num_failures=self._num_failures,
            knows_ids=self._knows_ids,
        )

    def close(self) -> None:
        """Learn what is in flight and close the cache; nothing is drafted any more. May be called twice."""
        learner, self._learner = self._learner, None
        if learner is not None:
            self._finalizer()
            self._num_learned = learner.num_learned

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _may_be_seated(self, learner: Learner, batch: Any) -> bool:
        """Whether rows may be those of the last call, for all that names tell: no other request is waited for."""
        if batch is None:
            return not self._knows_ids and self._num_seated == len(learner.requests)
        return self._knows_ids and self._names == batch.req_ids

    def _seat(
        self,
        learner: Learner,
        drafter: RowDrafter,
        batch: Any,
        sampled: Sequence[Sequence[int]],
        lengths: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
    ) -> bool:
        """Find out which requests the rows are, and tell the drafter. Returns whether they are those they were."""
        rows = _rows(sampled, lengths, token_ids)
        requests = self._identify(learner, rows, batch)
        self._names = None if batch is None else list(batch.req_ids)
        self._num_seated = sum(request is not None for request in requests)
        texts: list[Request | None] = [None] * min(len(sampled), len(lengths), len(token_ids))
        for row, request in zip(rows, requests, strict=True):
            texts[row.number] = request
        return drafter.seat(texts, lengths[: len(texts)].tolist())

    def _identify(self, learner: Learner, rows: list[Row], batch: Any) -> list[Request | None]:
        if batch is None:
            self._knows_ids = False
            requests, ended = learner.requests.by_text(rows)
            self._end(learner, ended)
            return requests
        if not self._knows_ids:  # what was told apart by text has no ids
            self._end(learner, learner.requests.end_all())
            self._knows_ids = True
        names = [batch.req_ids[row.number] for row in rows]
        return learner.requests.by_id(rows, names, [int(batch.num_prompt_tokens[row.number]) for row in rows])

    def _batch(self, token_ids_cpu: npt.NDArray[np.int32]) -> Any:
        """The runner's batch, where it is the one that these rows are of; else None."""
        batch = self._known_batch
        if batch is None or batch.token_ids_cpu is not token_ids_cpu:
            runner = None if self._runner is None else self._runner()
            batch = getattr(runner, "input_batch", None)
            is_of_these = getattr(batch, "token_ids_cpu", None) is token_ids_cpu
            if not is_of_these or not hasattr(batch, "req_ids") or not hasattr(batch, "num_prompt_tokens"):
                batch = None
            self._known_batch = batch
        return batch

    def _end(self, learner: Learner, ended: list[Request]) -> None:
        """These are over: learn them."""
        if ended and self._drafter is not None:
            self._drafter.forget(ended)
            self._names = None
        learner.learn(ended)

    def _failed(self, what: str) -> None:
        self._num_failures += 1
        if self._num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... only
            log.exception("%s failed, the step goes on without (%d times so far)", what, self._num_failures)


def _close(learner: Learner, drafter: RowDrafter) -> None:
    drafter.publish()
    learner.close()


def _is_ours(drafter: object) -> TypeGuard[SuffixProposer]:
    return isinstance(drafter, SuffixProposer)


def _rows(
    sampled: Sequence[Sequence[int]], num_tokens: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]
) -> list[Row]:
    """The rows that hold what they should; others get no draft and teach nothing."""
    num_rows, most = token_ids.shape
    lengths = num_tokens[: len(sampled)].tolist()
    return [
        Row(number, token_ids[number, :length], len(new))
        for number, (new, length) in enumerate(zip(sampled[:num_rows], lengths, strict=False))
        if max(1, len(new)) <= length <= most
    ]


def _catch_up(request: Request | None, state: Any) -> None:
    """Add what a request generated in steps that no draft was asked for, from vLLM's own record of it."""
    if request is None or state is None:
        return
    missing: list[int] = state.output_token_ids[max(0, request.length - request.prompt_length) :]
    if missing:
        request.take_over(np.concatenate([request.tokens, np.array(missing, np.int32)]), len(missing))
