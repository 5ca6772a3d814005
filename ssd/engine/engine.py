"""The serving loop: propose, one forward pass, verify, roll back, commit."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Arbiter, make_drafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest
from ssd.engine.asking import Asking
from ssd.engine.integrity import settle, violations
from ssd.engine.metrics import EngineMetrics
from ssd.engine.opening import open_sequence
from ssd.engine.prefill import Prefill
from ssd.engine.prefix_reuse import PrefixReuse
from ssd.engine.request import FinishReason, Request, RequestOutput
from ssd.engine.scheduler import Scheduler
from ssd.engine.sequence import Sequence
from ssd.engine.trust import Trust, is_sure
from ssd.engine.verify import Verdict, branches, possible_shape, usable, verify
from ssd.engine.verify_cost import VerifyCost, calibrate
from ssd.errors import EngineStopped, QueueFull
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.snapshot import Snapshot
from ssd.target.draft_loading import load_draft_model
from ssd.target.loading import load_model, open_target
from ssd.target.target import Target
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
        self._draft_shape = possible_shape(draft.draft_shape, target)
        self._draw_seed = draw_seed
        self._drafter = drafter
        self._eos_token_ids = tuple(
            eos_token_ids if eos_token_ids is not None else codec.eos_token_ids if codec else ()
        )
        self.grammars = (
            GrammarCompiler(codec, vocab_size=target.vocab_size, eos_token_ids=self._eos_token_ids) if codec else None
        )
        self._cost = VerifyCost()
        self._trust = Trust()
        self._asking = Asking()
        self._num_source_failures = 0
        self._reuse = PrefixReuse(target, enabled=self._config.enable_prefix_caching)
        self._scheduler = Scheduler(target.num_slots, self._reuse)
        self._prefill = Prefill(target, self._reuse, self._config.prefill_chunk_tokens)
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
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            enforce_eager=config.enforce_eager,
        )
        chosen = make_drafter(drafter, draft)
        if draft_model is not None:
            smaller = load_draft_model(
                draft_model, target, codec, dtype=dtype, device=device, enforce_eager=config.enforce_eager
            )
            chosen = Arbiter([chosen, smaller])
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
            takes_priority=self._config.scheduling_policy == "priority",
        )
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine has been stopped")
            if self._num_unfinished() >= self._config.max_waiting + self.target.num_slots:
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
        return bool(self._cancelled or self._num_unfinished())

    def _num_unfinished(self) -> int:
        return len(self._inbox) + len(self._scheduler.waiting) + len(self._scheduler.running)

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
        if batch := self._prefill.run(self._scheduler.running):
            drafts = self._propose(batch)
            started = time.perf_counter()
            verdicts = verify(self.target, batch, drafts)
            seconds = time.perf_counter() - started
            self._asking.passed(seconds)
            committed = [self._commit(*row) for row in zip(batch, drafts, verdicts, strict=True)]
            num_tokens = sum(len(output.token_ids) for output in committed)
            width = 1 + max(len(draft.token_ids) for draft in drafts)
            self._cost.observe(len(batch), width, num_tokens, seconds)
            outputs += committed
        self._observe_load()
        return outputs

    def check(self) -> list[str]:
        """What is wrong in the bookkeeping of slots and requests, a sentence each; between steps only."""
        with self._lock:
            arriving = list(self._inbox)
        return violations(self.target, self._scheduler, self._reuse, arriving)

    def warm_up(self) -> None:
        """Compile every kernel and run every kind of pass once, so that the first request compiles nothing."""
        self._guarded(lambda: getattr(self._drafter, "warm_up", lambda: None)())
        repeated = tuple([1, 2, 3] * min(12, self.max_model_len // 6))
        sampled = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=0, ignore_eos=True)
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        self.target.warm_up()
        for i, params in enumerate((greedy, sampled)):
            self.submit(Request(request_id=f"warm-up-{i}", prompt_token_ids=repeated, sampling=params, namespace=None))
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
            self._scheduler.enqueue(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
        ended = self._scheduler.remove(cancelled) if cancelled else []
        outputs = [self._finish(sequence, sequence.end(FinishReason.CANCELLED)) for sequence in ended]
        preempted = self._scheduler.admit()
        self.metrics.num_preemptions += len(preempted)
        for sequence in preempted:  # a drafter's memory goes with the slot; the sequence comes back as if it were new
            self._forget_drafts(sequence)
        return outputs

    def _forget_drafts(self, sequence: Sequence) -> None:
        self._guarded(lambda: self._drafter.finish(sequence.request.request_id))

    def _propose(self, batch: list[Sequence]) -> list[Draft]:
        """One draft per sequence; those that are not worth asking for get none."""
        if self._draft_limit == 0:
            return [EMPTY_DRAFT] * len(batch)
        due = self._asking.due(batch)
        shares = [self._trust.share(sequence.request.sampling.temperature) for sequence in batch]
        started = time.perf_counter()
        asked = [(sequence, share) for sequence, share, is_due in zip(batch, shares, due, strict=True) if is_due]
        found = iter(self._ask(asked, len(batch)) if asked else ())
        seconds = time.perf_counter() - started
        kept = [next(found) if is_due else EMPTY_DRAFT for is_due in due]
        width = self._cost.paying_width(kept, shares)
        drafts = [draft.cut(width) for draft in kept]
        self._asking.asked(batch, due, [len(draft.token_ids) for draft in drafts], seconds)
        return drafts

    def _ask(self, asked: list[tuple[Sequence, float]], num_rows: int) -> list[Draft]:
        """A draft for each sequence and its share, in a pass of ``num_rows``; a drafter that fails proposes nothing."""
        prices = self._cost.prices(num_rows)
        drafts = self._guarded(
            lambda: self._drafter.propose(
                [
                    DraftRequest(
                        request_id=sequence.request.request_id,
                        context=sequence.context,
                        prompt_length=sequence.num_prompt_tokens,
                        snapshot=self._snapshot(sequence.request.namespace),
                        limit=sequence.most_drafted(self._draft_limit),
                        prices=None if prices is None else prices / share,
                        tree=self._may_branch(sequence, num_rows),
                        prediction=sequence.prediction,
                        sampling=sequence.sampling,
                    )
                    for sequence, share in asked
                ]
            )
        )
        if drafts is None or len(drafts) != len(asked):
            return [EMPTY_DRAFT] * len(asked)
        return [
            self._usable(draft, sequence, num_rows)
            if len(draft.token_ids) and (sequence.stats.num_verify_steps or is_sure(draft, share))
            else EMPTY_DRAFT
            for draft, (sequence, share) in zip(drafts, asked, strict=True)
        ]

    def _usable(self, draft: Draft, sequence: Sequence, num_rows: int) -> Draft:
        """The draft, or nothing where a token or parent cannot be; cut to what may still be generated."""
        limit = sequence.most_drafted(self._draft_limit)
        allow_tree = self._may_branch(sequence, num_rows)
        found = usable(draft, limit, vocab_size=self.target.vocab_size, allow_tree=allow_tree)
        self.metrics.drafter_failures += found is None
        return EMPTY_DRAFT if found is None else found

    def _may_branch(self, sequence: Sequence, num_rows: int) -> bool:
        is_free = sequence.sampling.acceptance == "match" and sequence.request.sampling.structured_output is None
        return is_free and branches(self._draft_shape, num_rows)

    def _commit(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> RequestOutput:
        """Emit what was accepted, take back the rest of the draft, end or go on."""
        output = sequence.commit(verdict.token_ids, verdict.logits)
        num_accepted = min(len(verdict.path), len(output.token_ids))
        if draft.parents is not None:
            draft = replace(draft, path=verdict.path[:num_accepted])
        if draft.probabilities is not None or not len(draft.token_ids):
            promised = 0.0 if draft.probabilities is None else float(draft.chances().sum())
            self._trust.observe(sequence.request.sampling.temperature, promised, len(verdict.path))
        stats = sequence.stats
        if not stats.num_verify_steps:
            self.metrics.count_prompt(stats, queried=self._reuse.serves(sequence))
        stats.num_verify_steps += 1
        stats.num_drafts += bool(len(draft.token_ids))
        stats.num_draft_tokens += len(draft.token_ids)
        stats.num_accepted_tokens += num_accepted
        self.metrics.count_draft(len(draft.token_ids), num_accepted, draft.source)
        self.metrics.generation_tokens += len(output.token_ids)
        self._guarded(lambda: self._drafter.observe(sequence.request.request_id, draft, num_accepted))
        if output.finish_reason is not None:
            return self._finish(sequence, output)
        self.target.rollback(sequence.slot, sequence.num_tokens - 1)
        return output

    def _finish(self, sequence: Sequence, output: RequestOutput) -> RequestOutput:
        if sequence.slot >= 0:
            self._scheduler.release(sequence)
        reason = str(output.finish_reason)
        self.metrics.num_requests_finished[reason] = self.metrics.num_requests_finished.get(reason, 0) + 1
        self._forget_drafts(sequence)
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
        if not scheduler.running and not scheduler.waiting:
            settle(self.check(), self.metrics, scheduler, self._reuse)
