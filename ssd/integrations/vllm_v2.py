"""Our drafter inside vLLM's V2 model runner, a speculator that ``ssd.integrations.vllm_plugin`` puts there::

    vllm serve MODEL --speculative-config '{"method": "ngram_gpu", "model": "ssd", "num_speculative_tokens": 8}'

The runner's host is ahead of its device: when it asks for a draft, the tokens that the draft is to follow are often not
sampled yet. Nothing here waits for them. At each step

1. what the step gives is packed on the device and copied to the host on a stream of its own, with an event behind it;
2. earlier steps whose event has happened are taken over into the requests' texts;
3. from the text that is known a *chain* is drafted for each request: what the steps in flight are expected to give, and
   what comes after that; with the chances of its tokens it goes to the device in one copy;
4. the device compares the chain with what was said since the text that is known, and takes the draft from where that
   ends: exactly, or where the last two tokens stand in the chain nearest to there; else it has nothing to say.

Where the device is not ahead (a CPU, a step that was waited for) the chain is the draft itself.

vLLM verifies as many tokens of every row as were asked for, filled up with the last token where nothing is to be said,
so that a step without a draft costs what one with a draft does. With ``"enable_adaptive_verification": true``, where
vLLM has it (full CUDA graphs), it verifies those whose chance is worth it: that of what was filled up is 0.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from ssd.drafting.batch_drafter import NUM_HEADER_WORDS
from ssd.drafting.draft_records import MAX_DRAFT
from ssd.integrations.vllm_core import Core, Request, VllmDrafter, stop_rules_of, tensor_rank
from ssd.integrations.vllm_hooks import METHOD, lengths_of, log

OFF_COURSE: Final = 0.5
"""How far the first chance of a chain is trusted where the text left it and came back."""

_LOW_PRICE: Final = 0.02
"""Of a drafted token. A device verifies a draft of fixed width, so that a token less saves nothing."""

_WARM_UP: Final = ("_warmup", "_v2_mixed_warmup", "_sparse_mla_v2_warmup")
"""How ids of requests begin by which vLLM itself warms up."""
_FAR: Final = 1 << 30
"""More than twice any length; int32 holds it."""


class Event(Protocol):
    """When a copy has arrived; ``torch.cuda.Event`` is one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def record(self, stream: Any) -> None: ...


class _Step:
    """Host memory of one step, pinned where there is a device: what it said, and what it was told.

    ``said`` : int32[requests, n], see `BatchDrafter.append`. ``told`` : int32[requests, n], see
    `BatchDrafter.draft`.
    """

    def __init__(self, num_requests: int, num_said: int, num_told: int, event: Event | None) -> None:
        pin = event is not None and torch.cuda.is_available()
        self.said = torch.zeros((num_requests, num_said), dtype=torch.int32, pin_memory=pin)
        self.told = torch.zeros((num_requests, num_told), dtype=torch.int32, pin_memory=pin)
        self.said_np, self.told_np = self.said.numpy(), self.told.numpy()
        self.event = event
        self.texts: Sequence[Request | None] = ()

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class Speculator(VllmDrafter):
    """vLLM's ``BaseSpeculator``, by its methods. Made and called by its V2 model runner, on one thread.

    Every rank of a tensor-parallel group has one; the first drafts, the others are sent what it says, on the device.
    Each engine of a data-parallel group has a cache of its own, in the directory ``rank-N`` below ``cache_dir``; they
    share through Redis.
    """

    supports_mm_inputs = False
    draft_logits: Tensor | None = None
    """A draft has no law of its own: its tokens are accepted with the target's probability of them."""
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager: Any = None

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, make_event: Callable[[], Event] | None = None
    ) -> None:
        """``req_states`` : of the runner. ``make_event`` : None takes CUDA's on CUDA; elsewhere copies are waited for.

        Raises what `Core` does, and ConfigError for models whose state vLLM corrupts.
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
        self._steps: deque[_Step] = deque()  # not arrived, oldest first
        self._free: list[_Step] = []
        self._arrived: _Step | None = None  # the last that has: the device may still read what it was told
        self._ending: list[Request] = []
        self._seated: list[str] | None = None  # ids of the rows
        self._texts: list[Request | None] = []
        super().__init__(vllm_config, longest=self._longest, default_token_cost=_LOW_PRICE)
        self._num_ranks = tensor_rank()[1]
        if self._core is None:
            return
        log.info(
            "SSD drafts in place of vLLM's n-gram method: the method \"%s\" is named because vLLM's checks and its "
            "asynchronous scheduling know it, nothing of it runs; prompt_lookup_* have no effect",
            METHOD,
        )
        if not self.enable_adaptive_verification:
            log.info("vLLM verifies %d tokens of every request in every step, also where SSD has nothing to say",
                     self._width)  # fmt: skip

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is no graph."""

    def capture(self) -> None:
        """There is no graph."""

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
        """One draft for each row of the batch, int64[rows, K] on the device. Never raises, waits for nothing.

        ``num_sampled`` : int32[rows], what this step gave each; 0 while a prompt is computed. ``last_sampled`` :
        int64[slots, 1]. ``num_speculative_tokens`` : of each draft so many are looked at; None: all.
        Of ``input_batch`` what ``vllm_hooks.V2_HOOKS`` names; the rest is not looked at.
        """
        count = input_batch.num_reqs
        drafts = self._drafts[:count]
        if dummy_run:
            return drafts
        slots = input_batch.idx_mapping[:count]
        filling = last_sampled.view(-1)[slots].unsqueeze(1)
        drafts.copy_(filling.expand_as(drafts))
        chances = self.draft_token_confidence_probs[:count] if self.enable_adaptive_verification else None
        if chances is not None:
            chances.zero_()
        try:
            if self._core is not None:
                width = self._width if num_speculative_tokens is None else min(num_speculative_tokens, self._width)
                lengths = self._states.total_len.gpu[slots].unsqueeze(1)
                told = self._draft(self._core, input_batch, slots, lengths, num_sampled[:count].unsqueeze(1), width)
                if told is not None:
                    self._choose(told, slots.unsqueeze(1), lengths, filling, drafts, chances)
        except Exception:
            self._note_failure("drafting")
        if self._num_ranks > 1:
            group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
            group.broadcast(drafts, src=0)
            if chances is not None:
                group.broadcast(chances, src=0)
        return drafts

    def on_add(self, scheduler_output: Any) -> None:
        """Requests begin; one that had been preempted comes back with what it has said so far. Never raises."""
        core = self._core
        if core is None or not scheduler_output.scheduled_new_reqs:
            return
        try:
            self._seated = None
            for new in scheduler_output.scheduled_new_reqs:
                # Of pooling, without a text, and nobody's.
                if new.sampling_params is None or new.prompt_embeds is not None or new.req_id.startswith(_WARM_UP):
                    continue
                tokens = np.array(new.prefill_token_ids, np.int32)
                if new.req_id in core.requests:
                    core.drafter.clear()
                core.begin(new.req_id, tokens, new.prompt_len).stop = stop_rules_of(new.sampling_params)
        except Exception:
            self._note_failure("following requests")

    def on_step(self, runner: Any, scheduler_output: Any) -> None:
        """Requests have ended. Each is learned once all that its client got has arrived here. Never raises."""
        core, names = self._core, sorted(scheduler_output.finished_req_ids)
        if core is None or not names:
            return
        try:
            self._seated, lengths = None, lengths_of(scheduler_output)
            for name in names:
                for request in core.forget([name]):
                    request.end = lengths.get(name)
                    self._ending.append(request)
            self._take_over(core)
            self._learn(core)
        except Exception:
            self._note_failure("learning")

    def close(self) -> None:
        """Learn what has ended and what is in flight, and close the cache. May be called twice."""
        core = self._core
        if core is None:
            return
        try:
            for step in self._steps:
                if step.event is not None:
                    step.event.synchronize()
            self._take_over(core)
            self._learn(core)
        except Exception:
            self._note_failure("learning")
        super().close()

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _draft(
        self, core: Core, batch: Any, slots: Tensor, lengths: Tensor, num_sampled: Tensor, width: int
    ) -> Tensor | None:
        """Chains for the rows of a batch, on the device, as in `BatchDrafter.draft`. None where no token of
        them is looked at.

        ``lengths``, ``num_sampled`` : int32[rows, 1]. ``width`` : tokens of a draft.
        """
        count = len(slots)
        if self._seated != batch.req_ids:
            self._texts, self._seated = [core.requests.get(name) for name in batch.req_ids], None
        step = self._free.pop() if self._free else self._new_step()
        step.texts = self._texts
        self._pack(step, slots.unsqueeze(1), lengths, num_sampled)
        self._steps.append(step)
        self._take_over(core)
        self._learn(core)
        if self._seated is None:
            core.drafter.assign(self._texts)
            self._seated = list(batch.req_ids)
        if width == 0:
            return None
        # A row whose prompt is not computed to its end has said nothing.
        says = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count] >= batch.prefill_len_np[:count]
        limit = min(3 * width + 2, self._longest) if self._steps else width
        core.drafter.draft(says, core.cache.snapshot(), step.told_np, limit)
        return step.told[:count].to(self._device, non_blocking=True)

    def _new_step(self) -> _Step:
        event = None if self._make_event is None else self._make_event()
        return _Step(
            self._num_requests, NUM_HEADER_WORDS + self._width + 1, NUM_HEADER_WORDS + 2 * self._longest, event
        )

    def _pack(self, step: _Step, slots: Tensor, lengths: Tensor, num_sampled: Tensor) -> None:
        """Have what this step gives copied to the host."""
        tokens = self._states.all_token_ids.gpu
        places = lengths - num_sampled + self._offsets[: self._width + 1]
        new = tokens[slots, places.clamp_(0, tokens.shape[1] - 1)]
        said = torch.cat([lengths, num_sampled, new], 1)
        if self._stream is None:
            step.said[: len(slots)].copy_(said)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                step.said[: len(slots)].copy_(said, non_blocking=True)
            said.record_stream(self._stream)
        if step.event is not None:
            step.event.record(self._stream)

    def _take_over(self, core: Core) -> None:
        """What has arrived, into the texts."""
        while self._steps and self._steps[0].has_arrived():
            step = self._steps.popleft()
            lost = core.drafter.append(step.texts, step.said_np)
            if lost:
                self._lose(core, [text for row in lost if (text := step.texts[row]) is not None])
            step.texts = ()
            if self._arrived is not None:
                self._free.append(self._arrived)
            self._arrived = step

    def _lose(self, core: Core, texts: Sequence[Request]) -> None:
        """Tokens of these are missing: they are not drafted for any more, and not learned."""
        lost = [name for name, request in core.requests.items() if request in texts]
        core.forget(lost)
        core.drafter.clear()
        self._ending = [request for request in self._ending if request not in texts]
        self._texts, self._seated = [None if text in texts else text for text in self._texts], None
        if lost:
            log.warning("%d requests are not followed any more: tokens of theirs are missing", len(lost))

    def _learn(self, core: Core) -> None:
        """Those that have ended, as far as nothing that their client got is still to arrive."""
        if self._ending:
            coming = {id(text) for step in self._steps for text in step.texts}
            done = [r for r in self._ending if id(r) not in coming or (r.end is not None and r.length >= r.end)]
            if done:
                self._ending = [request for request in self._ending if request not in done]
                self._seated = None
                core.end(done)

    def _choose(
        self, told: Tensor, slots: Tensor, lengths: Tensor, filling: Tensor, drafts: Tensor, chances: Tensor | None
    ) -> None:
        """Of every chain what comes after what was said, on the device; see the head of this file.

        ``slots``, ``lengths``, ``filling`` : of each row one.
        """
        longest, width = self._longest, self._width
        known, size = told[:, :1], told[:, 1:2]
        chain, chance = (
            told[:, NUM_HEADER_WORDS : NUM_HEADER_WORDS + longest],
            told[:, NUM_HEADER_WORDS + longest :].view(torch.float32),
        )
        tokens, offsets = self._states.all_token_ids.gpu, self._offsets
        last, ahead = tokens.shape[1] - 1, lengths - known
        said = tokens[slots, (known + offsets[:longest]).clamp_(max=last)]
        is_on_course = ((said == chain) | (offsets[:longest] >= ahead)).all(1, keepdim=True) & (ahead <= size)
        # Where it is not: behind the two tokens that were said last, where they stand nearest to where it should be.
        behind = offsets[2 : longest + 1]
        ends = tokens[slots, (lengths + self._last_two).clamp_(min=0)]
        stands = (chain[:, :-1] == ends[:, :1]) & (chain[:, 1:] == ends[:, 1:]) & (behind <= size)
        distance = 2 * (behind - ahead).abs_() + (behind > ahead)
        nearest, where = distance.masked_fill_(~stands, _FAR).min(1, keepdim=True)
        start = torch.where(is_on_course, ahead, where + 2)
        places = start + offsets[:width]
        is_said = (is_on_course | (nearest < _FAR)) & (ahead >= 0) & (places < size)
        places = places.clamp_(0, longest - 1)
        torch.where(is_said, chain.gather(1, places), filling, out=drafts)
        if chances is not None:
            trust = torch.where(is_on_course | (offsets[:width] > 0), 1.0, OFF_COURSE)
            chances.copy_(torch.where(is_said, chance.gather(1, places) * trust, 0.0))
