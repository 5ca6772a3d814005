r"""Use of SSD's drafter in vLLM's V1 model runner as a custom proposer class (for V2 see ``ssd.integrations.vllm_v2``).

::

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --speculative-config \
      '{"method": "custom_class", "model": "ssd.integrations.vllm.SuffixProposer", "num_speculative_tokens": 16}'

Settings (``ssd.integrations.settings``) come from ``SSD_CACHE_DIR``, ``SSD_REDIS_URL``, ``SSD_NAMESPACE`` and so on, or
from ``--additional-config '{"ssd": {"cache_dir": ...}}'``. Cache directories, warm-up directories and a Redis log can
be shared with ``ssd-serve``, because both programs use the same names and tokenizer fingerprint.

vLLM passes only rows of tokens to a proposer. SSD obtains request ids, the ends of requests and the lengths of the
answers sent to clients by wrapping methods of vLLM's runner. vLLM calls its interface for custom classes experimental.

vLLM verifies the drafts, so they do not change outputs. With a custom class vLLM disables its asynchronous scheduling,
and if the longest request of a step leaves no room for a full draft before ``max_model_len``, it requests no drafts at
all in that step. When a vLLM server is stopped, it kills its workers immediately unless it runs with
``--shutdown-timeout``. Then the text of the last ``rebuild_interval_s`` seconds, which is not flushed yet, is lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.drafting.draft_records import MAX_DRAFT
from ssd.drafting.row_texts import TokenRows
from ssd.integrations import vllm_plugin
from ssd.integrations.vllm_core import VllmCache, VllmDrafter, VllmRequest, stop_rules_of
from ssd.integrations.vllm_hooks import finished_lengths


class SuffixProposer(VllmDrafter):
    """SSD's drafter for vLLM's V1 model runner: drafts for every running request, and adds completed text to the cache.

    vLLM creates and calls it on one thread. In a tensor-parallel group only the first rank drafts, and vLLM uses its
    drafts in all ranks. Each engine of a data-parallel group has a cache of its own, in the directory ``rank-N`` below
    ``cache_dir``; the engines share text through Redis.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._runner: weakref.ref[Any] | None = None  # weak: the runner holds this proposer
        self._row_ids: list[str] | None = None  # the requests of the last step
        self._source: TokenRows | None = None  # vLLM's arrays of tokens
        self._longest: int = min(MAX_DRAFT, vllm_config.speculative_config.num_speculative_tokens)
        self._limit = self._longest  # the draft limit of this step
        super().__init__(vllm_config, longest=self._longest)
        if self._core is not None and not vllm_plugin.wrap_v1_runner():
            self.close()

    def load_model(self, target_model: object) -> None:
        """Do nothing: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return one draft for each sequence of vLLM's batch; a draft may be empty. Never raises an exception.

        Args:
            sampled_token_ids: The tokens that this step sampled for each sequence; empty during prefill.
            num_tokens_no_spec: int32[rows or more], the number of tokens of each sequence, including the sampled ones.
            token_ids_cpu: int32[rows or more, max_model_len], the tokens of each sequence.
            slot_mappings: Not used.
        """
        core, drafts = self._core, list[list[int]]()
        try:
            batch = None if self._runner is None else getattr(self._runner(), "input_batch", None)
            if core is not None and batch is not None and batch.token_ids_cpu is token_ids_cpu:
                drafts = self._draft(core, batch, sampled_token_ids, num_tokens_no_spec)
        except Exception:
            self._record_failure("drafting")
        return drafts + [[] for _ in range(len(sampled_token_ids) - len(drafts))]

    def on_finished(self, runner: Any, scheduler_output: Any) -> None:
        """Add the requests that vLLM has finished to the cache, and read the draft limit of the coming step.

        SSD's wrapper calls this at the start of each step of vLLM's model runner. Never raises an exception.
        """
        try:
            self._limit = min(self._longest, scheduler_output.num_spec_tokens_to_schedule)
            if self._runner is None or self._runner() is not runner:
                self._runner = weakref.ref(runner)
            names, core = list(scheduler_output.finished_req_ids), self._core
            if names and core is not None:
                states, lengths = getattr(runner, "requests", {}), finished_lengths(scheduler_output)
                self._row_ids = None
                for name in names:
                    request, state = core.texts.get(name), states.get(name)
                    if request is not None:
                        _append_missing(request, state)
                        request.stop_rules = stop_rules_of(getattr(state, "sampling_params", None))
                        core.finish(name, lengths.get(name))
                self.export_metrics()
        except Exception:
            self._record_failure("adding text to the cache")

    def _draft(
        self, core: VllmCache, batch: Any, sampled: Sequence[Sequence[int]], lengths: npt.NDArray[np.int32]
    ) -> list[list[int]]:
        count = min(len(sampled), len(batch.req_ids), len(lengths), len(batch.token_ids_cpu))
        names = batch.req_ids[:count]
        if names != self._row_ids:
            self._start_requests(core, batch, names, [int(lengths[row]) - len(sampled[row]) for row in range(count)])
        source = self._source
        if source is None or source.tokens is not batch.token_ids_cpu or source.lengths is not lengths:
            self._source = source = TokenRows(batch.token_ids_cpu, lengths)
        drafts = core.speculate(names, self._limit, [self._limit > 0] * count, source)
        for row in core.unmatched_rows:
            self._read_text(core, batch, row, int(lengths[row]), len(sampled[row]))
        return drafts

    def _start_requests(self, core: VllmCache, batch: Any, names: list[str], lengths: Sequence[int]) -> None:
        """Register the new requests of vLLM's batch with the ``lengths[row]`` tokens that precede this step."""
        for row, (name, length) in enumerate(zip(names, lengths, strict=True)):
            # A prompt of embeddings has no token ids.
            if (
                name not in core.texts
                and 0 <= length <= batch.token_ids_cpu.shape[1]
                and row not in batch.req_prompt_embeds
            ):
                core.start(name, batch.token_ids_cpu[row, :length], int(batch.num_prompt_tokens[row]))
        self._row_ids = names

    def _read_text(self, core: VllmCache, batch: Any, row: int, length: int, num_new: int) -> None:
        """Copy a request's text from vLLM's batch, because the text is not a continuation of the known one."""
        text = core.texts.get(batch.req_ids[row])
        if text is not None and num_new <= length <= batch.token_ids_cpu.shape[1]:
            text.replace(batch.token_ids_cpu[row, :length], num_new)


def _append_missing(request: VllmRequest, state: Any) -> None:
    """Append the output tokens that the drafter missed, because vLLM did not call it in some steps.

    The tokens are read from ``state``, vLLM's state of the request; if it is None, nothing is appended.
    """
    if state is None:
        return
    missing: list[int] = state.output_token_ids[max(0, request.length - request.prompt_length) :]
    if missing:
        request.replace(np.concatenate([request.tokens, np.array(missing, np.int32)]), len(missing))
