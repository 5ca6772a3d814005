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
all in that step. A vLLM server that is told to stop kills its workers at once unless it runs with
``--shutdown-timeout``. Then the text of the last ``rebuild_interval_s`` seconds, which is not flushed yet, is lost.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.drafting.batch_drafter import NUM_HEADER_WORDS, Tokens
from ssd.drafting.draft_records import MAX_DRAFT
from ssd.integrations import vllm_plugin
from ssd.integrations.vllm_core import DrafterCore, VllmDrafter, VllmRequest, stop_rules_of
from ssd.integrations.vllm_hooks import finished_lengths
from ssd.jit.addresses import address, int32_array, int64_array, kernel


class SuffixProposer(VllmDrafter):
    """Drafts tokens from the cache for every running request of a vLLM engine, and adds completed text to the cache.

    vLLM creates and calls it on one thread. In a tensor-parallel group only the first rank drafts, and vLLM uses its
    drafts in all ranks. Each engine of a data-parallel group has a cache of its own, in the directory ``rank-N`` below
    ``cache_dir``; the engines share text through Redis.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._runner: weakref.ref[Any] | None = None  # weak: the runner holds this proposer
        self._row_ids: list[str] | None = None  # request ids of the drafter's rows
        self._row_requests: list[VllmRequest | None] = []
        self._last_call_ended = 0.0  # the time at which the last call ended
        self._longest: int = min(MAX_DRAFT, vllm_config.speculative_config.num_speculative_tokens)
        self._limit = self._longest  # the draft limit of this step
        super().__init__(vllm_config, longest=self._longest)
        if self._core is not None:
            self._allocate_buffers(16)
            if not vllm_plugin.wrap_v1_runner():
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
        """Return one draft for each sequence of vLLM's batch, empty if there is none. Never raises an exception.

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
        """At the start of a step of vLLM's runner, add finished requests to the cache and read the current draft limit.

        Never raises an exception.
        """
        try:
            self._limit = min(self._longest, scheduler_output.num_spec_tokens_to_schedule)
            if self._runner is None or self._runner() is not runner:
                self._runner = weakref.ref(runner)
            names, core = list(scheduler_output.finished_req_ids), self._core
            if names and core is not None:
                states, lengths = getattr(runner, "requests", {}), finished_lengths(scheduler_output)
                for name in names:
                    request, state = core.requests.get(name), states.get(name)
                    if request is not None:
                        _append_missing(request, state)
                        request.num_sent = lengths.get(name)
                        request.stop_rules = stop_rules_of(getattr(state, "sampling_params", None))
                self._row_ids = None
                core.finish_requests(core.pop_requests(names))
        except Exception:
            self._record_failure("adding text to the cache")

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _allocate_buffers(self, count: int) -> None:
        assert self._core is not None
        self._draft_words = self._core.drafter.new_words(count)
        self._new_words = np.zeros((count, NUM_HEADER_WORDS + self._longest + 1), np.int32)

    def _draft(
        self, core: DrafterCore, batch: Any, sampled: Sequence[Sequence[int]], lengths: npt.NDArray[np.int32]
    ) -> list[list[int]]:
        matrix: Tokens = batch.token_ids_cpu
        count = min(len(sampled), len(batch.req_ids), len(lengths), len(matrix))
        seconds = time.perf_counter() - self._last_call_ended
        sizes = np.fromiter(map(len, sampled), np.int64, len(sampled))[:count]
        lengths = lengths[:count]
        if self._row_ids != batch.req_ids or count != len(self._row_requests):
            self._assign_rows(core, batch, lengths - sizes)
        if count > len(self._draft_words):
            self._allocate_buffers(2 * count)
        needs_draft = sizes > 0 if self._limit > 0 else np.zeros(count, bool)
        if inconsistent := self._append_new_tokens(core, matrix, lengths, sizes):
            needs_draft[inconsistent] = False
        core.drafter.draft(needs_draft, core.cache.snapshot(), self._draft_words, self._limit, seconds)
        drafted = self._draft_words[:count, 1].tolist()
        tokens = self._draft_words[:count, NUM_HEADER_WORDS : NUM_HEADER_WORDS + max(drafted, default=0)].tolist()
        self._last_call_ended = time.perf_counter()
        return [row[:size] for row, size in zip(tokens, drafted, strict=True)]

    def _assign_rows(self, core: DrafterCore, batch: Any, previous_lengths: npt.NDArray[np.int64]) -> None:
        """Assign vLLM's requests to the drafter's rows; new requests start with the tokens before this step."""
        self._row_requests, width = [], batch.token_ids_cpu.shape[1]
        for row, (name, length) in enumerate(zip(batch.req_ids, previous_lengths.tolist(), strict=False)):
            request = core.requests.get(name)
            # A prompt of embeddings has no token ids.
            if request is None and 0 <= length <= width and row not in batch.req_prompt_embeds:
                tokens, prompt_length = batch.token_ids_cpu[row, :length], int(batch.num_prompt_tokens[row])
                request = core.start_request(name, tokens, prompt_length)
            self._row_requests.append(request)
        core.drafter.assign(self._row_requests)
        self._row_ids = list(batch.req_ids)

    def _append_new_tokens(
        self, core: DrafterCore, matrix: Tokens, lengths: npt.NDArray[np.int32], sizes: npt.NDArray[np.int64]
    ) -> list[int]:
        """Append the tokens generated in this step to the requests; return the rows whose lengths are inconsistent."""
        assert matrix.dtype == lengths.dtype == np.int32 and matrix.flags.c_contiguous and lengths.flags.c_contiguous
        inconsistent, width, words = [], matrix.shape[1], self._new_words
        _gather_new_tokens(
            address(matrix), width, address(lengths), address(sizes), len(sizes), address(words), words.shape[1]
        )
        for row in core.drafter.append(self._row_requests, words):
            request, length, size = self._row_requests[row], int(lengths[row]), int(sizes[row])
            if request is not None and size <= length <= width:  # vLLM did not call this in some steps
                request.replace(matrix[row, :length], size)
            else:
                inconsistent.append(row)
        return inconsistent


@kernel
def _gather_new_tokens(
    matrix_at: int, width: int, lengths_at: int, sizes_at: int, num_rows: int, words_at: int, num_words: int
) -> None:
    """Write each sequence's length, number of new tokens and new tokens in the form that `BatchDrafter.append` reads.

    The tokens are left out if the lengths are implausible. The arguments are the addresses of the tokens,
    int32[num_rows, width], the lengths, int32[num_rows], the numbers of new tokens, int64[num_rows], and the output,
    int32[num_rows, num_words].
    """
    matrix, words = int32_array(matrix_at, num_rows * width), int32_array(words_at, num_rows * num_words)
    lengths, sizes = int32_array(lengths_at, num_rows), int64_array(sizes_at, num_rows)
    for row in range(num_rows):
        length, size, at = lengths[row], sizes[row], row * num_words
        words[at], words[at + 1] = length, size
        if 0 <= size <= min(length, num_words - NUM_HEADER_WORDS) and length <= width:
            for i in range(size):
                words[at + NUM_HEADER_WORDS + i] = matrix[row * width + length - size + i]


def _append_missing(request: VllmRequest, state: Any) -> None:
    """Append tokens of earlier steps in which vLLM did not call the proposer, read from vLLM's own request state."""
    if state is None:
        return
    missing: list[int] = state.output_token_ids[max(0, request.length - request.prompt_length) :]
    if missing:
        request.replace(np.concatenate([request.tokens, np.array(missing, np.int32)]), len(missing))
