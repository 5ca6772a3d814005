"""The serving loop: propose, one forward pass, verify, roll back, commit."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Arbiter, make_drafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest
from ssd.engine.metrics import EngineMetrics
from ssd.engine.opening import open_sequence
from ssd.engine.request import FinishReason, Request, RequestOutput
from ssd.engine.scheduler import Scheduler
from ssd.engine.sequence import Sequence
from ssd.engine.verify_cost import VerifyCost, calibrate
from ssd.errors import EngineStopped, QueueFull
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.snapshot import Snapshot
from ssd.target.draft_loading import load_draft_model
from ssd.target.loading import load_model, open_target
from ssd.target.sampling import target_tokens
from ssd.target.target import Target
from ssd.target.verification import accepted_length, pad_rows
from ssd.text.codec import TextCodec
from ssd.text.grammar import GrammarCompiler

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Continuous batching over the slots of one target model, drafting from a retrieval cache.

    ``submit``, ``cancel`` and ``wait_for_work`` may be called from any thread; ``step`` by one thread at a time.
    ``caches`` and ``codec`` may be None: then nothing is learned, or only token ids are handled.
    ``draw_seed`` gives the seed of a request that brings none.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter,
        codec: TextCodec | None = None,
        caches: CacheSet | None = None,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        eos_token_ids: Iterable[int] | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.target = target
        self.codec = codec
        self.caches = caches
        self.metrics = EngineMetrics()
        self.max_model_len = target.max_length
        self._config = config or EngineConfig()
        draft = draft or DraftConfig()
        self._draft_limit = draft.num_speculative_tokens if target.can_roll_back else 0
        self._draft_acceptance = draft.draft_acceptance
        self._draw_seed = draw_seed
        self._drafter = drafter
        self._eos_token_ids = tuple(
            eos_token_ids if eos_token_ids is not None else codec.eos_token_ids if codec else ()
        )
        self.grammars = (
            GrammarCompiler(codec, vocab_size=target.vocab_size, eos_token_ids=self._eos_token_ids) if codec else None
        )
        self._cost = VerifyCost()
        self._num_source_failures = 0
        self._scheduler = Scheduler(target.num_slots)
        self._inbox: deque[Sequence] = deque()
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stopped = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        caches: CacheSet | None = None,
        codec: TextCodec | None = None,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        drafter: str = "ssd",
        draft_model: str | Path | None = None,
    ) -> Engine:
        """Load a Hugging Face model directory or id and everything around it.

        draft_model : a smaller model with the same tokenizer, asked where ``drafter`` promises less than it costs.
        Raises ModelError when a model cannot be loaded, does not fit, or the two do not share a tokenizer.
        """
        config, draft = config or EngineConfig(), draft or DraftConfig()
        codec = codec or TextCodec.load(str(model))
        target = open_target(
            load_model(model, dtype=dtype, device=device),
            num_slots=config.max_num_seqs,
            max_length=config.max_model_len,
            max_draft_tokens=draft.num_speculative_tokens,
        )
        chosen = make_drafter(drafter, draft)
        if draft_model is not None:
            chosen = Arbiter([chosen, load_draft_model(draft_model, target, codec, dtype=dtype, device=device)])
        return cls(target, drafter=chosen, codec=codec, caches=caches, config=config, draft=draft)

    # -- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; it ends with exactly one output that has a finish reason.

        Raises RequestError (ContextTooLong among them), QueueFull or EngineStopped; then nothing was queued.
        """
        sequence = open_sequence(
            request,
            codec=self.codec,
            grammars=self.grammars,
            vocab_size=self.target.vocab_size,
            max_length=self.max_model_len,
            eos_token_ids=self._eos_token_ids,
            seed=self._draw_seed(),
            acceptance=self._draft_acceptance,
        )
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine has been stopped")
            if len(self._inbox) + len(self._scheduler.waiting) >= self._config.max_waiting + self.target.num_slots:
                raise QueueFull(f"{self._config.max_waiting} requests are waiting already: try again later")
            self._inbox.append(sequence)
        self._work.set()

    def cancel(self, request_id: str) -> None:
        """End a request at the next step; unknown or finished ids are ignored."""
        with self._lock:
            self._cancelled.add(request_id)
        self._work.set()

    def has_work(self) -> bool:
        """True when a step would do something."""
        return bool(self._inbox or self._cancelled or self._scheduler.waiting or self._scheduler.running)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Sleep until there is work or the time is over; returns ``has_work()``."""
        if not self.has_work():
            self._work.wait(timeout_s)
        self._work.clear()
        return self.has_work()

    def close(self) -> None:
        """Take no more requests and close the caches, which keeps what they learned. Requests in flight are dropped."""
        with self._lock:
            self._stopped = True
        self._work.set()
        if self.caches is not None:
            self.caches.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advance every running sequence by one forward pass of the target."""
        outputs = self._admit_and_cancel()
        self._prefill()
        batch = [sequence for sequence in self._scheduler.running if self._is_prefilled(sequence)]
        if batch:
            drafts = self._propose(batch)
            fed = pad_rows([np.append(s.context[-1:], draft.token_ids) for s, draft in zip(batch, drafts, strict=True)])
            started = time.perf_counter()
            logits = self.target.forward([s.slot for s in batch], fed, [len(draft.token_ids) + 1 for draft in drafts])
            chosen = target_tokens(logits, [s.sampling_row(draft) for s, draft in zip(batch, drafts, strict=True)])
            seconds = time.perf_counter() - started
            committed = [self._commit(*each) for each in zip(batch, drafts, chosen, logits, strict=True)]
            num_tokens = sum(len(output.token_ids) for output in committed)
            self._cost.observe(len(batch), fed.shape[1], num_tokens, seconds)
            outputs += committed
        self._observe_load()
        return outputs

    def warm_up(self) -> None:
        """Compile every kernel and run every kind of pass once, so that the first request compiles nothing."""
        self._guarded(lambda: getattr(self._drafter, "warm_up", lambda: None)())
        repeated = tuple([1, 2, 3] * min(12, self.max_model_len // 6))
        sampled = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=0, ignore_eos=True)
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        for index, sampling in enumerate((greedy, sampled)):
            self.submit(
                Request(request_id=f"warm-up-{index}", prompt_token_ids=repeated, sampling=sampling, namespace=None)
            )
        while self.has_work():
            self.step()
        if self._draft_limit > 0:
            calibrate(self._cost, self.target, self._draft_limit + 1)
        self.metrics = EngineMetrics()

    def generate(
        self,
        prompts: Iterable[list[int]],
        sampling: SamplingParams | None = None,
        *,
        namespace: str | None = "default",
    ) -> Iterator[RequestOutput]:
        """Complete prompts of token ids and yield every output as it comes; for scripts, on the calling thread."""
        for index, prompt in enumerate(prompts):
            self.submit(
                Request(
                    request_id=f"generate-{id(prompts)}-{index}",
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling or SamplingParams(),
                    namespace=namespace,
                )
            )
        while self.has_work():
            yield from self.step()

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _admit_and_cancel(self) -> list[RequestOutput]:
        with self._lock:
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
        outputs = []
        if cancelled:
            waiting = self._scheduler.waiting
            for sequence in [s for s in (*waiting, *self._scheduler.running) if s.request.request_id in cancelled]:
                if sequence.slot < 0:
                    waiting.remove(sequence)
                outputs.append(self._finish(sequence, sequence.end(FinishReason.CANCELLED)))
        for sequence in self._scheduler.admit():
            self.target.rollback(sequence.slot, 0)
            self.metrics.prompt_tokens += sequence.num_prompt_tokens
        return outputs

    def _prefill(self) -> None:
        """Feed prompts up to their last token, at most one chunk a step so that running sequences keep going."""
        budget = self._config.prefill_chunk_tokens
        for sequence in self._scheduler.running:
            while budget > 0 and not self._is_prefilled(sequence):
                done = self.target.length(sequence.slot)
                part = sequence.context[done : min(sequence.num_prompt_tokens - 1, done + budget)]
                if sequence.scores_prompt:
                    sequence.score_prompt(self.target.forward([sequence.slot], pad_rows([part]), [len(part)])[0], done)
                else:
                    self.target.prefill([sequence.slot], pad_rows([part]), [len(part)])
                budget -= len(part)

    def _is_prefilled(self, sequence: Sequence) -> bool:
        return self.target.length(sequence.slot) >= sequence.num_prompt_tokens - 1

    def _propose(self, batch: list[Sequence]) -> list[Draft]:
        """One draft per sequence; a drafter or cache that fails proposes nothing."""
        nothing = [EMPTY_DRAFT] * len(batch)
        if self._draft_limit == 0:
            return nothing
        prices = self._cost.prices(len(batch))
        # One token is always the target's own, so a draft never needs to reach the very end.
        drafts = self._guarded(
            lambda: self._drafter.propose(
                [
                    DraftRequest(
                        request_id=sequence.request.request_id,
                        context=sequence.context,
                        prompt_length=sequence.num_prompt_tokens,
                        snapshot=self._snapshot(sequence.request.namespace),
                        limit=min(self._draft_limit, sequence.num_remaining - 1),
                        prices=prices,
                        prediction=sequence.prediction,
                        sampling=sequence.sampling,
                    )
                    for sequence in batch
                ]
            )
        )
        if drafts is None or len(drafts) != len(batch):
            return nothing
        usable = [self._usable(draft, sequence) for draft, sequence in zip(drafts, batch, strict=True)]
        width = self._cost.paying_width(usable)
        return [draft.cut(width) for draft in usable]

    def _usable(self, draft: Draft, sequence: Sequence) -> Draft:
        """The draft, or nothing where a token is outside the vocabulary; cut to what may still be generated."""
        draft = draft.cut(max(0, min(self._draft_limit, sequence.num_remaining - 1)))
        tokens = draft.token_ids
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.target.vocab_size):
            self.metrics.drafter_failures += 1
            return EMPTY_DRAFT
        return draft

    def _commit(
        self, sequence: Sequence, draft: Draft, chosen: npt.NDArray[np.int64], logits: torch.Tensor
    ) -> RequestOutput:
        """Accept what agrees, take back the rest of the draft, end or go on."""
        accepted = accepted_length(draft.token_ids, chosen)
        output = sequence.commit(chosen[: accepted + 1].tolist(), logits)
        emitted = len(output.token_ids)
        num_accepted = min(accepted, emitted)
        stats = sequence.stats
        stats.num_verify_steps += 1
        stats.num_drafts += bool(len(draft.token_ids))
        stats.num_draft_tokens += len(draft.token_ids)
        stats.num_accepted_tokens += num_accepted
        self.metrics.count_draft(len(draft.token_ids), num_accepted, draft.source)
        self.metrics.generation_tokens += emitted
        self._guarded(lambda: self._drafter.observe(sequence.request.request_id, draft, num_accepted))
        if output.finish_reason is not None:
            return self._finish(sequence, output)
        self.target.rollback(sequence.slot, sequence.num_tokens - 1)
        return output

    def _finish(self, sequence: Sequence, output: RequestOutput) -> RequestOutput:
        if sequence.slot >= 0:
            self.target.rollback(sequence.slot, 0)
            self._scheduler.release(sequence)
        reason = str(output.finish_reason)
        self.metrics.num_requests_finished[reason] = self.metrics.num_requests_finished.get(reason, 0) + 1
        self._guarded(lambda: self._drafter.finish(sequence.request.request_id))
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._learn(sequence)
        return output

    def _learn(self, sequence: Sequence) -> None:
        if self.caches is None or sequence.request.namespace is None:
            return
        caches, namespace = self.caches, sequence.request.namespace
        self._guarded(
            lambda: caches.get(namespace).append(sequence.context.copy(), prompt_length=sequence.num_prompt_tokens)
        )

    def _snapshot(self, namespace: str | None) -> Snapshot | None:
        if self.caches is None or namespace is None:
            return None
        return self.caches.get(namespace).snapshot()

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Run something of the drafter's or the cache's: its failure is a counter, never a failed request."""
        try:
            return call()
        except Exception:
            self.metrics.drafter_failures += 1
            if self.metrics.drafter_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... only
                log.exception("drafting or caching failed (%d times so far)", self.metrics.drafter_failures)
            return None

    def _observe_load(self) -> None:
        # A drafter that owns several survives the failure of one, and counts it.
        failures = getattr(self._drafter, "num_failures", 0)
        self.metrics.drafter_failures += failures - self._num_source_failures
        self._num_source_failures = failures
        scheduler = self._scheduler
        self.metrics.num_running = len(scheduler.running)
        self.metrics.num_waiting = len(scheduler.waiting)
        held = sum(sequence.num_tokens for sequence in scheduler.running)
        self.metrics.kv_usage = held / (self.target.num_slots * self.max_model_len)
        if not scheduler.running:
            scheduler.check_integrity()
