"""Our drafter inside vLLM's V1 model runner, as a proposer class of its own (V2: ``ssd.integrations.vllm_v2``)::

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --speculative-config \\
      '{"method": "custom_class", "model": "ssd.integrations.vllm.SuffixProposer", "num_speculative_tokens": 16}'

Settings (``ssd.integrations.settings``) come from ``SSD_CACHE_DIR``, ``SSD_REDIS_URL``, ``SSD_NAMESPACE`` and so on, or
from ``--additional-config '{"ssd": {"cache_dir": ...}}'``. A directory, warm-up directories and a Redis log are shared
with ``ssd-serve``: the names and the tokenizer's fingerprint are the same.

vLLM hands over rows of tokens and nothing else. Where it loads our entry point (``ssd.integrations.vllm_plugin``, which
an installed package brings), requests, their ends and what their clients got are known by id; elsewhere they are told
apart by their text (``ssd.integrations.requests``). vLLM calls its interface for such classes experimental.

vLLM verifies: an accepted token is one that the target chose, so drafts change no output. It gives up its asynchronous
scheduling for classes like this one, and where the longest request of a step leaves no room for a full draft before
``max_model_len`` it asks for no drafts at all in that step. A server that is told to stop kills its workers at once
unless it runs with ``--shutdown-timeout``: then all is kept, otherwise what was not sealed yet is lost, the last
``rebuild_interval_s``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.drafting.rows import RowDrafter
from ssd.integrations import vllm_plugin
from ssd.integrations.requests import Request, Row, stop_rules_of
from ssd.integrations.vllm_core import Core, Failures, ProposerStats, checked
from ssd.integrations.vllm_hooks import lengths_of


class SuffixProposer:
    """Drafts for every running request of a vLLM engine from a namespace of the cache, and learns what completes.

    Made and called by vLLM, on one thread. Of the ranks of a tensor-parallel group only the first one drafts: vLLM
    takes its drafts. Each engine of a data-parallel group has a cache of its own, in the directory ``rank-N`` below
    ``cache_dir``; they share through Redis.
    """

    def __init__(self, vllm_config: Any) -> None:
        """``vllm_config`` : vLLM's. Raises what `Core` does, and ConfigError for models whose state vLLM corrupts."""
        self._runner: weakref.ref[Any] | None = None  # weak: the runner holds this proposer
        self._known_batch: Any = None  # of the runner, as it was at the last call
        self._knows_ids = False
        self._names: list[str] | None = None  # of the rows as they are seated, where they are known by id
        self._num_seated = 0  # requests in them
        self._failures = Failures()
        self._ended = 0.0  # the last call
        self._core: Core[RowDrafter] | None = None
        self._last_stats = ProposerStats(num_proposals=0, num_drafts=0, num_draft_tokens=0, num_learned=0,
                                         num_failures=0, knows_ids=False)  # fmt: skip
        if not checked(vllm_config):
            return
        limit = vllm_config.speculative_config.num_speculative_tokens
        self._core = Core(vllm_config, lambda **settings: RowDrafter(limit=limit, **settings))
        if vllm_plugin.is_registered():
            vllm_plugin.watch_v1(lambda drafter: isinstance(drafter, SuffixProposer))

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
        core = self._core
        if core is None:
            return [[] for _ in sampled_token_ids]
        try:
            seconds, drafter = time.perf_counter() - self._ended, core.drafter
            batch, snapshot, drafts = self._batch(token_ids_cpu), core.learner.namespace.cache.snapshot(), None
            if self._may_be_seated(core, batch):
                drafts = drafter.draft(
                    sampled_token_ids, num_tokens_no_spec, token_ids_cpu, snapshot, seconds, by_text=batch is None
                )
            if drafts is None:
                if not self._seat(core, batch, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
                    seconds = 0.0
                drafts = drafter.draft(
                    sampled_token_ids, num_tokens_no_spec, token_ids_cpu, snapshot, seconds, is_seated=True
                )
                assert drafts is not None
            self._ended = time.perf_counter()
            return drafts
        except Exception:  # whatever is wrong in here must not be the request's problem
            self._failures.note("drafting")
            return [[] for _ in sampled_token_ids]

    def on_step(self, runner: Any, scheduler_output: Any) -> None:
        """vLLM's runner begins a step, and requests have ended. Never raises."""
        try:
            if self._runner is None or self._runner() is not runner:
                self._runner, self._known_batch = weakref.ref(runner), None
            names, core = list(scheduler_output.finished_req_ids), self._core
            if names and self._knows_ids and core is not None:
                states, lengths = getattr(runner, "requests", {}), lengths_of(scheduler_output)
                for name in names:
                    request, state = core.requests.get(name), states.get(name)
                    if request is not None:
                        _catch_up(request, state)
                        request.end, request.stop = (
                            lengths.get(name),
                            stop_rules_of(getattr(state, "sampling_params", None)),
                        )
                self._end(core, core.requests.end(names))
        except Exception:
            self._failures.note("learning")

    def stats(self) -> ProposerStats:
        """The counters as they are now, or as they were when it was closed."""
        core = self._core
        return self._last_stats if core is None else core.stats(self._failures, self._knows_ids)

    def close(self) -> None:
        """Learn what is in flight and close the cache; nothing is drafted any more. May be called twice."""
        core, self._core = self._core, None
        if core is not None:
            core.close()
            self._last_stats = core.stats(self._failures, self._knows_ids)

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _may_be_seated(self, core: Core[RowDrafter], batch: Any) -> bool:
        """Whether rows may be those of the last call, for all that names tell: no other request is waited for."""
        if batch is None:
            return not self._knows_ids and self._num_seated == len(core.requests)
        return self._knows_ids and self._names == batch.req_ids

    def _seat(
        self,
        core: Core[RowDrafter],
        batch: Any,
        sampled: Sequence[Sequence[int]],
        lengths: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
    ) -> bool:
        """Find out which requests the rows are, and tell the drafter. Returns whether they are those they were."""
        rows = _rows(sampled, lengths, token_ids)
        requests = self._identify(core, rows, batch)
        self._names = None if batch is None else list(batch.req_ids)
        self._num_seated = sum(request is not None for request in requests)
        texts: list[Request | None] = [None] * min(len(sampled), len(lengths), len(token_ids))
        for row, request in zip(rows, requests, strict=True):
            texts[row.number] = request
        return core.drafter.seat(texts, lengths[: len(texts)].tolist())

    def _identify(self, core: Core[RowDrafter], rows: list[Row], batch: Any) -> list[Request | None]:
        if batch is None:
            self._knows_ids = False
            requests, ended = core.requests.by_text(rows)
            self._end(core, ended)
            return requests
        if not self._knows_ids:  # what was told apart by text has no ids
            self._end(core, core.requests.end_all())
            self._knows_ids = True
        names = [batch.req_ids[row.number] for row in rows]
        return core.requests.by_id(rows, names, [int(batch.num_prompt_tokens[row.number]) for row in rows])

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

    def _end(self, core: Core[RowDrafter], ended: list[Request]) -> None:
        if ended:
            self._names = None
            core.end(ended)


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


def _catch_up(request: Request, state: Any) -> None:
    """Add what a request generated in steps that no draft was asked for, from vLLM's own record of it."""
    if state is None:
        return
    missing: list[int] = state.output_token_ids[max(0, request.length - request.prompt_length) :]
    if missing:
        request.take_over(np.concatenate([request.tokens, np.array(missing, np.int32)]), len(missing))
