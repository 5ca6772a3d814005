"""Our drafter inside vLLM's V1 model runner, as a proposer class of its own (V2: ``ssd.integrations.vllm_v2``)::

    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --speculative-config \\
      '{"method": "custom_class", "model": "ssd.integrations.vllm.SuffixProposer", "num_speculative_tokens": 16}'

Settings (``ssd.integrations.settings``) come from ``SSD_CACHE_DIR``, ``SSD_REDIS_URL``, ``SSD_NAMESPACE`` and so on, or
from ``--additional-config '{"ssd": {"cache_dir": ...}}'``. A directory, warm-up directories and a Redis log are shared
with ``ssd-serve``: the names and the tokenizer's fingerprint are the same.

vLLM hands over rows of tokens and nothing else: which requests they are, when these end and what their clients got is
heard from its runner, which is watched for that. vLLM calls its interface for such classes experimental.

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

from ssd.drafting.batch_drafter import NUM_HEADER_WORDS, Tokens
from ssd.drafting.draft_records import MAX_DRAFT
from ssd.integrations import vllm_plugin
from ssd.integrations.vllm_core import Core, Request, VllmDrafter, stop_rules_of
from ssd.integrations.vllm_hooks import lengths_of
from ssd.jit.addresses import address, int32_array, int64_array, kernel


class SuffixProposer(VllmDrafter):
    """Drafts for every running request of a vLLM engine from a namespace of the cache, and learns what completes.

    Made and called by vLLM, on one thread. Of the ranks of a tensor-parallel group only the first one drafts: vLLM
    takes its drafts. Each engine of a data-parallel group has a cache of its own, in the directory ``rank-N`` below
    ``cache_dir``; they share through Redis.
    """

    def __init__(self, vllm_config: Any) -> None:
        """``vllm_config`` : vLLM's. Raises what `Core` does, and ConfigError for models whose state vLLM corrupts."""
        self._runner: weakref.ref[Any] | None = None  # weak: the runner holds this proposer
        self._names: list[str] | None = None  # ids of the rows as they are seated
        self._texts: list[Request | None] = []
        self._ended = 0.0  # the last call
        self._longest: int = min(MAX_DRAFT, vllm_config.speculative_config.num_speculative_tokens)
        self._limit = self._longest  # of this step
        super().__init__(vllm_config, longest=self._longest)
        if self._core is not None:
            self._make_words(16)
            if not vllm_plugin.watch_v1():
                self.close()

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
        core, drafts = self._core, list[list[int]]()
        try:
            batch = None if self._runner is None else getattr(self._runner(), "input_batch", None)
            if core is not None and batch is not None and batch.token_ids_cpu is token_ids_cpu:
                drafts = self._draft(core, batch, sampled_token_ids, num_tokens_no_spec)
        except Exception:
            self._note_failure("drafting")
        return drafts + [[] for _ in range(len(sampled_token_ids) - len(drafts))]

    def on_step(self, runner: Any, scheduler_output: Any) -> None:
        """vLLM's runner begins a step, and requests have ended. Never raises."""
        try:
            self._limit = min(self._longest, scheduler_output.num_spec_tokens_to_schedule)
            if self._runner is None or self._runner() is not runner:
                self._runner = weakref.ref(runner)
            names, core = list(scheduler_output.finished_req_ids), self._core
            if names and core is not None:
                states, lengths = getattr(runner, "requests", {}), lengths_of(scheduler_output)
                for name in names:
                    request, state = core.requests.get(name), states.get(name)
                    if request is not None:
                        _catch_up(request, state)
                        request.end = lengths.get(name)
                        request.stop = stop_rules_of(getattr(state, "sampling_params", None))
                self._names = None
                core.end(core.forget(names))
        except Exception:
            self._note_failure("learning")

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _make_words(self, count: int) -> None:
        assert self._core is not None
        self._words = self._core.drafter.new_words(count)
        self._new = np.zeros((count, NUM_HEADER_WORDS + self._longest + 1), np.int32)

    def _draft(
        self, core: Core, batch: Any, sampled: Sequence[Sequence[int]], lengths: npt.NDArray[np.int32]
    ) -> list[list[int]]:
        matrix: Tokens = batch.token_ids_cpu
        count = min(len(sampled), len(batch.req_ids), len(lengths), len(matrix))
        seconds = time.perf_counter() - self._ended
        sizes = np.fromiter(map(len, sampled), np.int64, len(sampled))[:count]
        lengths = lengths[:count]
        if self._names != batch.req_ids or count != len(self._texts):
            self._seat(core, batch, lengths - sizes)
        if count > len(self._words):
            self._make_words(2 * count)
        wanted = sizes > 0 if self._limit > 0 else np.zeros(count, bool)
        if unsound := self._take(core, matrix, lengths, sizes):
            wanted[unsound] = False
        core.drafter.draft(wanted, core.cache.snapshot(), self._words, self._limit, seconds)
        drafted = self._words[:count, 1].tolist()
        tokens = self._words[:count, NUM_HEADER_WORDS : NUM_HEADER_WORDS + max(drafted, default=0)].tolist()
        self._ended = time.perf_counter()
        return [row[:size] for row, size in zip(tokens, drafted, strict=True)]

    def _seat(self, core: Core, batch: Any, known: npt.NDArray[np.int64]) -> None:
        """Tell the drafter which requests the rows are; new ones begin with the tokens that were known before."""
        self._texts, width = [], batch.token_ids_cpu.shape[1]
        for row, (name, length) in enumerate(zip(batch.req_ids, known.tolist(), strict=False)):
            request = core.requests.get(name)
            # A prompt of embeddings is no text.
            if request is None and 0 <= length <= width and row not in batch.req_prompt_embeds:
                tokens, prompt_length = batch.token_ids_cpu[row, :length], int(batch.num_prompt_tokens[row])
                request = core.begin(name, tokens, prompt_length)
            self._texts.append(request)
        core.drafter.assign(self._texts)
        self._names = list(batch.req_ids)

    def _take(
        self, core: Core, matrix: Tokens, lengths: npt.NDArray[np.int32], sizes: npt.NDArray[np.int64]
    ) -> list[int]:
        """Take over what the step gave; the rows that hold what cannot be."""
        assert matrix.dtype == lengths.dtype == np.int32 and matrix.flags.c_contiguous and lengths.flags.c_contiguous
        unsound, width, words = [], matrix.shape[1], self._new
        _gather(address(matrix), width, address(lengths), address(sizes), len(sizes), address(words), words.shape[1])
        for row in core.drafter.append(self._texts, words):
            request, length, size = self._texts[row], int(lengths[row]), int(sizes[row])
            if request is not None and size <= length <= width:  # steps went by without a call
                request.replace(matrix[row, :length], size)
            else:
                unsound.append(row)
        return unsound


@kernel
def _gather(
    matrix_at: int, width: int, lengths_at: int, sizes_at: int, num_rows: int, words_at: int, num_words: int
) -> None:
    """Of each row its length, how many tokens are new and, where they can be, these: see `BatchDrafter.append`.

    ``matrix_at`` : int32[num_rows, width]. ``lengths_at`` : int32, ``sizes_at`` : int64[num_rows]. ``words_at`` :
    int32[num_rows, num_words], written.
    """
    matrix, words = int32_array(matrix_at, num_rows * width), int32_array(words_at, num_rows * num_words)
    lengths, sizes = int32_array(lengths_at, num_rows), int64_array(sizes_at, num_rows)
    for row in range(num_rows):
        length, size, at = lengths[row], sizes[row], row * num_words
        words[at], words[at + 1] = length, size
        if 0 <= size <= min(length, num_words - NUM_HEADER_WORDS) and length <= width:
            for i in range(size):
                words[at + NUM_HEADER_WORDS + i] = matrix[row * width + length - size + i]


def _catch_up(request: Request, state: Any) -> None:
    """Add what a request generated in steps that no draft was asked for, from vLLM's own record of it."""
    if state is None:
        return
    missing: list[int] = state.output_token_ids[max(0, request.length - request.prompt_length) :]
    if missing:
        request.replace(np.concatenate([request.tokens, np.array(missing, np.int32)]), len(missing))
