"""Use of SSD's drafter in vLLM's V2 model runner, as a speculator that ``ssd.integrations.vllm_plugin`` installs.

::

    vllm serve MODEL --speculative-config '{"method": "ngram_gpu", "model": "ssd", "num_speculative_tokens": 8}'

The runner's host code is ahead of the GPU: when it requests a draft, the tokens before the draft are often not sampled
yet. The drafter does not wait for them. At each step

1. the output of the step is packed on the GPU and copied to the host on a separate CUDA stream, followed by an event;
2. the output of earlier steps whose event has been reached is appended to the requests' texts;
3. from the known text, a *chain* is drafted for each request: the expected output of the steps that still run, and its
   continuation. The chain and the acceptance probabilities of its tokens are copied to the GPU in one copy;
4. the GPU compares the chain with the tokens that were sampled since the known text. If the chain begins with these
   tokens, the draft is the rest of the chain. Otherwise the draft starts after the last two tokens, at their occurrence
   in the chain that is nearest to the expected position. If there is none, there is no draft.

If no step is running on the device (on a CPU, or after a wait), the chain itself is the draft.

vLLM verifies the requested number of tokens for every sequence, so sequences without a draft are padded with the last
token, and a step without a draft costs as much as a step with one. With ``"enable_adaptive_verification": true``, if
vLLM supports it (full CUDA graphs), it verifies only tokens whose acceptance probability is high enough; padding has
the probability 0.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from ssd.drafting.draft_records import MAX_DRAFT
from ssd.drafting.row_texts import NUM_HEADER_WORDS
from ssd.integrations.vllm_core import VllmCache, VllmDrafter, VllmRequest, stop_rules_of, tensor_rank
from ssd.integrations.vllm_hooks import METHOD, finished_lengths, log

REJOINED_TRUST: Final = 0.5  # lowers the probability of a draft token after the chain was left and found again

_TOKEN_COST: Final = 0.02  # low, because vLLM verifies drafts of a fixed width, so shorter drafts save nothing

# Prefixes of the ids of vLLM's warm-up requests.
_WARM_UP_PREFIXES: Final = ("_warmup", "_v2_mixed_warmup", "_sparse_mla_v2_warmup")
_FAR: Final = 1 << 30  # more than twice any length; fits into int32


class Event(Protocol):
    """The interface of ``torch.cuda.Event``, which tells whether a copy from the GPU to the host has ended."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def record(self, stream: Any) -> None: ...


class _StepBuffers:
    """The host memory of one step for its output, copied from the device, and for the drafts, copied to the device.

    The memory is pinned if there is a GPU, so that copies are asynchronous.
    """

    def __init__(self, num_requests: int, num_output_words: int, num_chain_words: int, event: Event | None) -> None:
        pin = event is not None and torch.cuda.is_available()
        # The output of the step, int32[requests, n], see `BatchDrafter.append`.
        self.outputs = torch.zeros((num_requests, num_output_words), dtype=torch.int32, pin_memory=pin)
        # The drafted chains, int32[requests, n], see `BatchDrafter.draft`.
        self.chains = torch.zeros((num_requests, num_chain_words), dtype=torch.int32, pin_memory=pin)
        self.outputs_np, self.chains_np = self.outputs.numpy(), self.chains.numpy()
        self.event = event  # the event after the copy of the output; None if copies are synchronous
        self.requests: Sequence[VllmRequest | None] = ()  # the request of each row

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class Speculator(VllmDrafter):
    """SSD's drafter for vLLM's V2 model runner, with the interface of vLLM's ``BaseSpeculator``.

    The runner creates and calls it on one thread. Every rank of a tensor-parallel group has a speculator; the first
    rank drafts and broadcasts its drafts on the device. Each engine of a data-parallel group has a cache of its own, in
    the directory ``rank-N`` below ``cache_dir``; the engines share text through Redis.
    """

    supports_mm_inputs = False
    draft_logits: Tensor | None = None
    """Always None, because SSD's drafts have no probability distribution.

    vLLM then accepts a draft token if the target samples the same token.
    """
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager: Any = None

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, make_event: Callable[[], Event] | None = None
    ) -> None:
        """Open the cache and the drafter, see `VllmCache`.

        ``req_states`` are the request states of vLLM's runner. Without ``make_event``, CUDA events are used on CUDA; on
        other devices, copies are synchronous.
        """
        speculative = vllm_config.speculative_config
        self._states, self._device = req_states, device
        self._width: int = speculative.num_speculative_tokens
        self._num_requests: int = vllm_config.scheduler_config.max_num_seqs
        is_cuda = device.type == "cuda"
        self._make_event = torch.cuda.Event if make_event is None and is_cuda else make_event
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self.enable_adaptive_verification = bool(getattr(speculative, "enable_adaptive_verification", False))
        shape = self._num_requests, self._width
        self._drafts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._longest = min(3 * self._width + 2, MAX_DRAFT)
        self._offsets = torch.arange(max(self._longest, self._width) + 1, dtype=torch.int32, device=device)
        self._last_two = torch.tensor([-2, -1], dtype=torch.int32, device=device)
        self._pending_steps: deque[_StepBuffers] = deque()  # whose output has not arrived, oldest first
        self._free_steps: list[_StepBuffers] = []
        self._last_arrived: _StepBuffers | None = None  # the device may still read its chains
        self._finished_requests: list[VllmRequest] = []
        self._row_ids: list[str] | None = None  # request ids of the drafter's rows
        self._row_requests: list[VllmRequest | None] = []
        super().__init__(vllm_config, longest=self._longest, default_token_cost=_TOKEN_COST)
        self._num_ranks = tensor_rank()[1]
        if self._core is None:
            return
        log.info(
            "SSD drafts in place of vLLM's method \"%s\". This method is configured only because vLLM's checks "
            "and asynchronous scheduling accept its name; prompt_lookup_* have no effect",
            METHOD,
        )
        if not self.enable_adaptive_verification:
            log.info(
                "in every step, vLLM verifies %d tokens per request, even if SSD has no draft (nothing to do)",
                self._width,
            )

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: the drafter has no CUDA graph."""

    def capture(self) -> None:
        """Do nothing: the drafter has no CUDA graph."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Any,
        last_sampled: Tensor,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Return one draft for each sequence of vLLM's batch, int64[rows, K] on the device.

        It never raises an exception and never waits for the device. ``num_sampled``, int32[rows], is the number of
        tokens that this step sampled for each sequence, 0 in prefill. ``last_sampled``, int64[slots, 1], is the last
        sampled token. ``num_speculative_tokens`` is the number of tokens of each draft that will be verified; None
        means all. Only the fields of ``input_batch`` that are named in ``vllm_hooks.V2_HOOKS`` are used.
        """
        count = input_batch.num_reqs
        drafts = self._drafts[:count]
        if dummy_run:
            return drafts
        slots = input_batch.idx_mapping[:count]
        padding = last_sampled.view(-1)[slots].unsqueeze(1)
        drafts.copy_(padding.expand_as(drafts))
        probabilities = self.draft_token_confidence_probs[:count] if self.enable_adaptive_verification else None
        if probabilities is not None:
            probabilities.zero_()
        try:
            if self._core is not None:
                width = self._width if num_speculative_tokens is None else min(num_speculative_tokens, self._width)
                lengths = self._states.total_len.gpu[slots].unsqueeze(1)
                chains = self._draft(self._core, input_batch, slots, lengths, num_sampled[:count].unsqueeze(1), width)
                if chains is not None:
                    self._select_drafts(chains, slots.unsqueeze(1), lengths, padding, drafts, probabilities)
        except Exception:
            self._record_failure("drafting")
        if self._num_ranks > 1:
            group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
            group.broadcast(drafts, src=0)
            if probabilities is not None:
                group.broadcast(probabilities, src=0)
        return drafts

    def on_add(self, scheduler_output: Any) -> None:
        """Register requests that join the batch, a preempted one with its output so far. Never raises an exception."""
        core = self._core
        if core is None or not scheduler_output.scheduled_new_reqs:
            return
        try:
            self._row_ids = None
            for new in scheduler_output.scheduled_new_reqs:
                # Requests for pooling, without token ids, and for warm-up are not drafted for.
                if (
                    new.sampling_params is None
                    or new.prompt_embeds is not None
                    or new.req_id.startswith(_WARM_UP_PREFIXES)
                ):
                    continue
                tokens = np.array(new.prefill_token_ids, np.int32)
                if new.req_id in core.texts:
                    core.drafter.clear()
                core.start(new.req_id, tokens, new.prompt_len)
                core.texts[new.req_id].stop_rules = stop_rules_of(new.sampling_params)
        except Exception:
            self._record_failure("registering requests")

    def on_finished(self, runner: Any, scheduler_output: Any) -> None:
        """Stop drafting for finished requests, and add their text to the cache as soon as it is complete.

        A request's last tokens may still have to be copied from the device. Never raises an exception.
        """
        core, names = self._core, sorted(scheduler_output.finished_req_ids)
        if core is None or not names:
            return
        try:
            self._row_ids, lengths = None, finished_lengths(scheduler_output)
            for name in names:
                if (request := core.pop(name)) is not None:
                    request.num_sent = lengths.get(name)
                    self._finished_requests.append(request)
            self._process_arrived(core)
            self._finish_arrived(core)
        except Exception:
            self._record_failure("adding text to the cache")

    def close(self) -> None:
        core = self._core
        if core is None:
            return
        try:
            for step in self._pending_steps:
                if step.event is not None:
                    step.event.synchronize()
            self._process_arrived(core)
            self._finish_arrived(core)
        except Exception:
            self._record_failure("adding text to the cache")
        super().close()

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _draft(
        self, core: VllmCache, batch: Any, slots: Tensor, lengths: Tensor, num_sampled: Tensor, width: int
    ) -> Tensor | None:
        """Draft a chain for each sequence of a batch; return the chains on the device, see `BatchDrafter.draft`.

        ``slots``, int64[rows], are the sequences' indices in the runner's state. ``lengths`` and ``num_sampled``,
        int32[rows, 1], are their numbers of tokens, and of tokens that this step sampled. ``width`` is the number of
        draft tokens that will be verified; 0 disables drafting. Returns None if nothing was drafted.
        """
        count = len(slots)
        if self._row_ids != batch.req_ids:
            self._row_requests, self._row_ids = [core.texts.get(name) for name in batch.req_ids], None
        step = self._free_steps.pop() if self._free_steps else self._new_step()
        step.requests = self._row_requests
        self._copy_outputs_to_host(step, slots.unsqueeze(1), lengths, num_sampled)
        self._pending_steps.append(step)
        self._process_arrived(core)
        self._finish_arrived(core)
        if self._row_ids is None:
            core.drafter.assign(self._row_requests)
            self._row_ids = list(batch.req_ids)
        if width == 0:
            return None
        # A row in prefill has no output.
        has_output = (
            batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count] >= batch.prefill_len_np[:count]
        )
        limit = min(3 * width + 2, self._longest) if self._pending_steps else width
        core.drafter.draft(has_output.tolist(), core.cache.snapshot(), step.chains_np, limit)
        return step.chains[:count].to(self._device, non_blocking=True)

    def _new_step(self) -> _StepBuffers:
        event = None if self._make_event is None else self._make_event()
        return _StepBuffers(
            self._num_requests, NUM_HEADER_WORDS + self._width + 1, NUM_HEADER_WORDS + 2 * self._longest, event
        )

    def _copy_outputs_to_host(self, step: _StepBuffers, slots: Tensor, lengths: Tensor, num_sampled: Tensor) -> None:
        tokens = self._states.all_token_ids.gpu
        positions = lengths - num_sampled + self._offsets[: self._width + 1]
        new = tokens[slots, positions.clamp_(0, tokens.shape[1] - 1)]
        outputs = torch.cat([lengths, num_sampled, new], 1)
        if self._stream is None:
            step.outputs[: len(slots)].copy_(outputs)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                step.outputs[: len(slots)].copy_(outputs, non_blocking=True)
            outputs.record_stream(self._stream)
        if step.event is not None:
            step.event.record(self._stream)

    def _process_arrived(self, core: VllmCache) -> None:
        """For each step whose output has arrived on the host, append the output to the texts of the step's requests."""
        while self._pending_steps and self._pending_steps[0].has_arrived():
            step = self._pending_steps.popleft()
            missing = core.drafter.append(step.requests, step.outputs_np)
            if missing:
                self._drop_requests(core, [request for row in missing if (request := step.requests[row]) is not None])
            step.requests = ()
            if self._last_arrived is not None:
                self._free_steps.append(self._last_arrived)
            self._last_arrived = step

    def _drop_requests(self, core: VllmCache, requests: Sequence[VllmRequest]) -> None:
        """Give up requests with missing output tokens: they get no more drafts, and their text is not cached."""
        missing = [name for name, request in core.texts.items() if request in requests]
        for name in missing:
            core.pop(name)
        core.drafter.clear()
        self._finished_requests = [request for request in self._finished_requests if request not in requests]
        self._row_requests, self._row_ids = (
            [None if request in requests else request for request in self._row_requests],
            None,
        )
        if missing:
            log.warning(
                "SSD missed output tokens of %d requests: these requests get no more drafts, and their text is not "
                "cached. Their outputs are correct",
                len(missing),
            )

    def _finish_arrived(self, core: VllmCache) -> None:
        """Add finished requests to the cache, except those whose last tokens are still being copied from the device."""
        if self._finished_requests:
            awaited = {id(request) for step in self._pending_steps for request in step.requests}
            done = [
                r
                for r in self._finished_requests
                if id(r) not in awaited or (r.num_sent is not None and r.length >= r.num_sent)
            ]
            if done:
                self._finished_requests = [request for request in self._finished_requests if request not in done]
                self._row_ids = None
                core.drafter.clear()
                core.store(done)
                self.export_metrics()

    def _select_drafts(
        self,
        chains: Tensor,
        slots: Tensor,
        lengths: Tensor,
        padding: Tensor,
        drafts: Tensor,
        probabilities: Tensor | None,
    ) -> None:
        """Write to ``drafts``, for each sequence, the part of its chain that follows the newest sampled tokens.

        While a chain is drafted, earlier steps still run on the device. So the chain begins with the tokens that these
        steps are expected to sample. If they sample other tokens, the draft starts after an occurrence of the last two
        sampled tokens in the chain. If there is none, there is no draft, and ``padding`` is written.

        ``slots``, ``lengths`` and ``padding`` have one entry per sequence. ``probabilities`` receives the acceptance
        probabilities of the draft tokens, unless it is None.
        """
        longest, width = self._longest, self._width
        known, size = chains[:, :1], chains[:, 1:2]
        chain, chain_probabilities = (
            chains[:, NUM_HEADER_WORDS : NUM_HEADER_WORDS + longest],
            chains[:, NUM_HEADER_WORDS + longest :].view(torch.float32),
        )
        tokens, offsets = self._states.all_token_ids.gpu, self._offsets
        last, ahead = tokens.shape[1] - 1, lengths - known
        outputs = tokens[slots, (known + offsets[:longest]).clamp_(max=last)]
        follows_chain = ((outputs == chain) | (offsets[:longest] >= ahead)).all(1, keepdim=True) & (ahead <= size)
        # Otherwise continue after the occurrence of the last two sampled tokens nearest to the expected position.
        behind = offsets[2 : longest + 1]
        ends = tokens[slots, (lengths + self._last_two).clamp_(min=0)]
        matches = (chain[:, :-1] == ends[:, :1]) & (chain[:, 1:] == ends[:, 1:]) & (behind <= size)
        distance = 2 * (behind - ahead).abs_() + (behind > ahead)
        nearest, where = distance.masked_fill_(~matches, _FAR).min(1, keepdim=True)
        start = torch.where(follows_chain, ahead, where + 2)
        positions = start + offsets[:width]
        is_drafted = (follows_chain | (nearest < _FAR)) & (ahead >= 0) & (positions < size)
        positions = positions.clamp_(0, longest - 1)
        torch.where(is_drafted, chain.gather(1, positions), padding, out=drafts)
        if probabilities is not None:
            weight = torch.where(follows_chain | (offsets[:width] > 0), 1.0, REJOINED_TRUST)
            probabilities.copy_(torch.where(is_drafted, chain_probabilities.gather(1, positions) * weight, 0.0))
