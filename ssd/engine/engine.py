"""The serving loop: prefill, propose, forward, verify, commit."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import HybridDrafter, make_drafter
from ssd.drafting.protocol import Drafter
from ssd.engine.batch import LEFT, Batch, append_said, warm_up_rows
from ssd.engine.isolation import Isolation, settle, violations
from ssd.engine.metrics import BestEffort, EngineMetrics
from ssd.engine.passes import Passes
from ssd.engine.proposals import Proposals, SpeculationStatus
from ssd.engine.request import FinishReason, Request, RequestOutput
from ssd.engine.schedule import Prefill, PrefixReuse, Scheduler
from ssd.engine.sequence import Coupling, Sequence, open_sequence
from ssd.engine.verify import Pass, Taken, warm_up_verification
from ssd.errors import ConfigError, EngineError, EngineStopped, QueueFull
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from ssd.text.grammar_compiler import GrammarCompiler
from ssd.text.load_tokenizer import HubOptions

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over the slots of one target model, drafting from a retrieval cache.

    ``submit``, ``cancel`` and ``wait_for_work`` may be called from any thread; ``step`` by one thread at a time. What a
    request raises inside a step ends that request; the others go on with the output that they have without it. None of
    them reads a file: a namespace's cache is opened beside them, and its requests draft from it once it is open.
    ``caches`` and ``codec`` may be None: then nothing is learned, or only token ids are handled.
    ``draw_seed`` gives the seed of a request that brings none; None draws it at random. ``noise_root`` gives what the
    secrets of coupled noise are made of, see `Coupling`.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter,
        codec: TextCodec | None = None,
        caches: CacheManager | None = None,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        eos_token_ids: Iterable[int] | None = None,
        draw_seed: Callable[[], int] | None = None,
        noise_root: Callable[[], bytes] | None = None,
    ) -> None:
        self.target = target
        self.codec = codec
        self.caches = caches
        self.metrics = EngineMetrics()
        self.max_model_len = target.max_length
        self.config = config or EngineConfig()
        draft = draft or DraftConfig()
        self._draw_seed = draw_seed or partial(secrets.randbits, 63)
        self._coupling = Coupling(self.config.coupled_streams, self.config.coupled_window, noise_root)
        self._eos_token_ids = tuple(
            eos_token_ids if eos_token_ids is not None else codec.eos_token_ids if codec else ()
        )
        self.grammars = (
            GrammarCompiler(codec, vocab_size=target.vocab_size, eos_token_ids=self._eos_token_ids) if codec else None
        )
        self._best_effort = BestEffort()
        self._proposals = Proposals(target, drafter, draft, self._best_effort)
        self._batch = Batch(())
        self._is_calibrated = False
        self._reuse = PrefixReuse(target, enabled=self.config.enable_prefix_caching)
        self._scheduler = Scheduler(target.num_slots, self._reuse)
        self._isolation = Isolation(target, self._scheduler, self._reuse, self._proposals)
        self._passes = Passes(target, self._proposals, self._isolation)
        self._prefill = Prefill(target, self._reuse, self.config.prefill_chunk_tokens, self._isolation.fail_alone)
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
        caches: CacheManager | None = None,
        codec: TextCodec | None = None,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        drafter: str = "ssd",
        draft_model: str | Path | None = None,
        draft_head: str | Path | None = None,
        adapters: Mapping[str, str] | None = None,
        hub: HubOptions | None = None,
        draft_hub: HubOptions | None = None,
        draw_seed: Callable[[], int] | None = None,
        noise_root: Callable[[], bytes] | None = None,
        report: Callable[[str], None] = lambda _stage: None,
    ) -> Engine:
        """Load a Hugging Face model directory or id and everything around it.

        draft_model : a smaller model with the same tokenizer, asked where what it brings beyond retrieval is worth more
        than it costs. draft_head : a head trained for this model, see ``docs/heads.md``, likewise asked; both may be
        given, beside the drafter "ssd" alone. Without speculation neither is read.
        adapters : directories or ids of LoRA adapters by their names, which requests may then give.
        hub, draft_hub : where their ids are fetched from. draw_seed, noise_root : as for the engine.
        report : called with what is being done, in words, before each part that may take long.
        Raises ConfigError for a drafter that judges no offers beside a draft model or head; ModelError when a model
        cannot be loaded, does not fit, or the two do not share a tokenizer.
        """
        if drafter != "ssd" and (draft_model is not None or draft_head is not None):
            raise ConfigError(
                f'a draft model or head needs the drafter "ssd", which judges its drafts, not {drafter!r}'
            )
        config, draft = config or EngineConfig(), draft or DraftConfig()
        if not draft.num_speculative_tokens:  # nobody would ask them
            draft_model = draft_head = None
        codec = codec or TextCodec.load(str(model), hub)
        # These modules import the whole of transformers, which takes longer than everything else together.
        from ssd.model.draft.drafter import HeadDrafter, feature_spec, load_draft_model
        from ssd.model.heads.layouts import load_head
        from ssd.model.loading.adapters import load_adapters
        from ssd.model.loading.load_target import load_model, open_target
        from ssd.model.loading.threads import tune_threads
        from ssd.model.runners.batch_invariance import verify_batch_invariance

        report(f"reading the weights of {model}")
        loaded = load_model(model, dtype=dtype, device=device, hub=hub)
        _compare_tokenizer(codec, loaded.config.get_text_config().vocab_size)
        if adapters:
            report(f"reading adapters {', '.join(adapters)}")
        adapted = load_adapters(loaded, adapters or {})
        head = None
        if draft_head is not None:
            report(f"reading the draft head {draft_head}")
            head = load_head(draft_head, loaded, draft_hub)
        report(f"trying how to drive {type(loaded).__name__}")
        target = open_target(
            loaded, num_slots=config.max_num_seqs, max_length=config.max_model_len,
            max_draft_tokens=draft.num_speculative_tokens, kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization, enforce_eager=config.enforce_eager,
            exact="off",  # until the threads are known that will make the passes
            adapters=adapted, tapped=None if head is None else feature_spec(head, loaded.device, loaded.dtype),
            keeps_top=draft.recycling and draft.num_speculative_tokens > 0 and drafter == "ssd",
        )  # fmt: skip
        report("trying numbers of threads, and whether passes agree to the bit")
        tune_threads(target)
        verify_batch_invariance(target, config.exact)
        log.info("%s", target.batch_invariance)
        drafters = [make_drafter(drafter, draft)]
        if head is not None:
            drafters.append(HeadDrafter(head, target))
        if draft_model is not None:
            report(f"reading the draft model {draft_model}")
            drafters.append(
                load_draft_model(
                    draft_model, target, codec, dtype=dtype, device=device, hub=draft_hub,
                    enforce_eager=config.enforce_eager,
                )
            )  # fmt: skip
        return cls(
            target, drafter=drafters[0] if len(drafters) == 1 else HybridDrafter(drafters), codec=codec, caches=caches,
            config=config, draft=draft, draw_seed=draw_seed, noise_root=noise_root,
        )  # fmt: skip

    # -- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; it ends with exactly one output that has a finish reason.

        Raises RequestError (ContextTooLong among them), QueueFull or EngineStopped; then nothing was queued.
        """
        sequence = open_sequence(
            request,
            codec=self.codec,
            grammars=self.grammars,
            caches=self.caches,
            vocab_size=self.target.vocab_size,
            adapters=self.target.adapter_names,
            max_length=self.max_model_len,
            eos_token_ids=self._eos_token_ids,
            noise=self._coupling.noise_of(request, self._draw_seed()),
            takes_priority=self.config.scheduling_policy == "priority",
        )
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine has been stopped")
            if self._num_unfinished() >= self.config.max_waiting + self.target.num_slots:
                raise QueueFull(f"{self.config.max_waiting} requests are waiting already: try again later")
            self._inbox.append(sequence)
        self._work.set()

    def draw_streams(self, count: int) -> list[int]:
        """Numbers for the ``noise_stream`` of ``count`` requests of one prompt, no two the same. O(count)."""
        return self._coupling.different_streams(count, self._draw_seed())

    def cancel(self, request_id: str) -> None:
        """End a request at the next step; unknown or finished ids are ignored."""
        with self._lock:
            self._cancelled.add(request_id)
        self._work.set()

    def has_work(self) -> bool:
        """True when a step would do something."""
        return bool(self._cancelled or self._num_unfinished() or self._isolation.has_ended)

    def _num_unfinished(self) -> int:
        return len(self._inbox) + self._scheduler.num_waiting + len(self._scheduler.running)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Sleep until there is work or the time is over; returns ``has_work()``."""
        if not self.has_work():
            self._work.wait(timeout_s)
        self._work.clear()
        return self.has_work()

    def close(self) -> None:
        """Take no more requests and close the caches, which keeps what they learned. Requests in flight are dropped.

        To be called by the thread that steps, or after it.
        """
        with self._lock:
            self._stopped = True
        self._work.set()
        if self.caches is not None:
            self._proposals.publish()
            self.caches.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advance every running sequence by one forward pass of the target.

        A device that computes beside the host changes the order: the pass that the step before began is verified and
        committed first; it is counted and learned from, the text of its tokens is made and what comes next is drafted
        while the next pass runs. Where no draft was found for a while, and no request comes or goes, that one has begun
        already: it takes the tokens of the one before where they are, and the device waits for nobody.
        Raises EngineBroken where nothing can be computed any more. What tells the program to end (KeyboardInterrupt)
        cancels all that run; the others go on at the next step.
        """
        begun = list(self._scheduler.running)
        try:
            return self._step()
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            self._passes.drop()
            self._isolation.give_up(dict.fromkeys([*begun, *self._scheduler.running]))
            raise

    def _step(self) -> list[RequestOutput]:
        if self._passes.first is not None and self._passes.behind is None:  # only beside the host
            self._proposals.prepare(self._passes.first)
        taken = self._commit(self._passes.verify())
        cancelled = list[Sequence]()
        if self._passes.first is None:  # else what comes or goes waits for a pass
            cancelled = self._admit_and_cancel()
            batch = self._prefill_prompts()
            self._passes.begin(batch, self._proposals.propose(batch))
        if not self.target.is_asynchronous:
            taken = self._commit(self._passes.verify())
        num_tokens = self._prefill.take_count() + self._count(taken)
        outputs = self._spell(taken)
        outputs += [self._finish(sequence, sequence.end(FinishReason.CANCELLED)) for sequence in cancelled]
        outputs += [self._finish(sequence, output) for sequence, output in self._isolation.collect()]
        if num_tokens:
            self.metrics.histograms.step_tokens.observe(num_tokens)
        if self.target.is_asynchronous and not (self._inbox or self._cancelled or self._scheduler.has_next()):
            self._passes.run_ahead(self._scheduler.running)
        self._observe_load()
        return outputs

    def check(self) -> list[str]:
        """What is wrong in the bookkeeping of slots and requests, a sentence each; between steps only.

        Sequences of a pass that is under way are not looked at.
        """
        with self._lock:
            arriving = list(self._inbox)
        return violations(
            self.target, self._scheduler, self._reuse, arriving, is_under_way=self._passes.first is not None
        )

    @property
    def is_drafting(self) -> bool:
        """Whether drafts are made by now: False while their kernels are compiled beside the passes, see ``warm_up``."""
        return self._proposals.is_ready

    @property
    def speculation(self) -> SpeculationStatus:
        """Whether drafts are verified now, and why or why not."""
        return self._proposals.status

    @property
    def is_speculating(self) -> bool:
        """Whether drafts are ever made; constant for the life of the engine."""
        return self._proposals.is_enabled

    def relative_pass_cost(self, width: int) -> float:
        """Return the estimated time of a pass of ``width`` tokens of one row, in passes of one token; 0 if unknown."""
        return self._proposals.relative_cost(width)

    def warm_up(self, patience_s: float | None = None) -> None:
        """Compile every kernel and run every kind of pass once, so that the first request compiles nothing.

        patience_s : the kernels that draft take most of that, once on each machine. After so many seconds they are
        compiled on a thread of their own, and requests are answered meanwhile, each token by a pass of its own.
        """
        self._coupling.warm_up()
        warm_up_verification()
        warm_up_rows()
        self.target.warm_up()
        if patience_s is not None:  # one kernel is compiled at a time: first those without which nothing is answered
            self._proposals.wait()
            if not self.is_drafting:
                self._warm_up_passes()
        self._proposals.warm_up(patience_s)
        if self.is_drafting:
            self._warm_up_passes()
        else:
            log.info("drafts join later: %s", self.speculation.reason)
        self.calibrate()
        self.metrics = EngineMetrics()

    def _warm_up_passes(self) -> None:
        repeated = tuple([1, 2, 3] * min(12, self.max_model_len // 6))
        sampled = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=0, ignore_eos=True, logprobs=1)
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        for i, params in enumerate((greedy, sampled)):
            self.submit(Request(request_id=f"warm-up-{i}", prompt_token_ids=repeated, sampling=params, namespace=None))
        while self.has_work():
            self.step()

    def calibrate(self) -> None:
        """Time passes, where that has not been done and drafts are made; between requests, by the thread that steps."""
        if not self._is_calibrated and self.is_drafting and not self.has_work() and self._passes.first is None:
            self._reuse.forget_all()
            self._best_effort(self._proposals.calibrate)  # it may be while serving
            self._reuse.forget_all()
            self._is_calibrated = True

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go on with other weights of the same model, as between steps of its training; by the thread that steps.

        weights : a ``state_dict``, see `replace_weights`. Outputs from now on are those of an engine opened with them:
        keys and values that slots kept are dropped. What was learned of texts, drafts and times stays; a draft head or
        a draft model does too, and accepts less the further the weights move from what it was trained for.
        Raises EngineError while requests run or wait, and ModelError, nothing changed, for weights that do not fit.
        """
        from ssd.model.loading.replace_weights import replace_weights

        if self.has_work() or self._passes.first is not None:
            raise EngineError("requests run or wait, and would go on with other weights: let them end, or cancel them")
        self._reuse.forget_all()
        replace_weights(self.target.model, weights)

    def generate(
        self,
        prompts: Iterable[list[int]],
        sampling: SamplingParams | None = None,
        *,
        namespace: str | None = "default",
    ) -> Iterator[RequestOutput]:
        """Complete prompts of token ids and yield every output as it comes; for scripts, on the calling thread.

        What it has not ended is cancelled where it is not read to its end, or a prompt is refused.
        """
        asked = list[str]()
        try:
            for index, prompt in enumerate(prompts):
                while self._num_unfinished() >= self.config.max_waiting + self.target.num_slots:
                    yield from self.step()
                asked.append(f"generate-{id(prompts)}-{index}")
                self.submit(
                    Request(
                        request_id=asked[-1],
                        prompt_token_ids=tuple(prompt),
                        sampling=sampling or SamplingParams(),
                        namespace=namespace,
                    )
                )
            while self.has_work():
                yield from self.step()
        except BaseException:
            for name in asked:
                self.cancel(name)
            raise

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _admit_and_cancel(self) -> list[Sequence]:
        """Fill free slots; those that were cancelled, off their slots."""
        with self._lock:
            self._scheduler.enqueue(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
        ended = self._scheduler.remove(cancelled) if cancelled else []
        preempted = self._scheduler.admit()
        self.metrics.num_preemptions += len(preempted)
        for sequence in (*ended, *preempted):  # what was preempted comes back as if it were new
            self._proposals.forget(sequence)
        return ended

    def _prefill_prompts(self) -> Batch:
        """Compute prompts: the sequences that are ready for the pass, or one suspect alone."""
        ready = self._prefill.run(self._scheduler.running)
        ready = next(([sequence] for sequence in ready if sequence.is_suspect), ready)
        if not self._batch.is_of(ready):
            self._batch = Batch(ready)
        return self._batch

    def _commit(self, ended: Pass | None) -> Taken | None:
        """Append to every sequence what was accepted of its draft and the target's own token.

        Done here is what the next pass needs, no more: for that a device waits.
        """
        if ended is None:
            return None
        self._proposals.observe_scores(ended)
        batch, taken = ended.batch, Taken(ended, {})
        append_said(batch.address, ended.said, ended.sizes)
        num_rows, num_left = len(batch.slots), batch.frame.num_left
        if num_left < num_rows:
            if self._passes.first is None:  # else a pass has gone on from what was said, all of it
                goes_on = slice(None) if not num_left else np.flatnonzero(batch.taken != LEFT)
                self.target.truncate(batch.slots[goes_on], batch.lengths[goes_on] - 1)
            self._proposals.observe(ended)
            batch.sequences[0].is_suspect &= num_rows > 1
        if num_left:
            for b in np.flatnonzero(batch.taken == LEFT).tolist():
                self._commit_left(taken, b, batch.sequences[b])
            if (batch.taken <= 0).all() and not ended.is_late:
                self._isolation.require_a_target()
        return taken

    def _commit_left(self, taken: Taken, b: int, sequence: Sequence) -> None:
        """Append what was said to a row about which something is special, and give its slot back at its end."""
        ended, size = taken.ended, int(taken.ended.sizes[b])
        if sequence.finish_reason is not None:  # its text failed while the pass ran
            self._isolation.drop(sequence)
        elif b in ended.failed:
            self._isolation.fail(sequence, "choosing a token", ended.failed[b])
        elif not size:  # its grammar is late: the same pass again, behind the text read anew where none can be kept
            self._proposals.observe_one(ended, b, 0)
            self.target.rollback(sequence.slot, sequence.num_tokens - 1 if self.target.can_copy_prefixes else 0)
        else:
            try:
                token_ids = ended.said[b, :size].tolist()
                found = sequence.take(token_ids, ended.logits(b) if sequence.asks_logprobs else None)
                sequence.is_suspect = False
                self._proposals.observe_one(ended, b, min(size - 1, len(found.token_ids)))
                if found.finish_reason is not None:
                    # Before the next pass is drafted for: a drafter may have as many slots as the target.
                    self._scheduler.release(sequence)
                    self._proposals.forget(sequence)
                elif self._passes.first is None:
                    self.target.truncate([sequence.slot], [sequence.num_tokens - 1])
                ended.batch.taken[b], taken.special[b] = len(found.token_ids), found
            except BaseException as error:
                self._isolation.fail(sequence, "taking tokens", error)

    def _count(self, taken: Taken | None) -> int:
        """Count what a pass brought and learn from it; how many tokens it gave."""
        if taken is None:
            return 0
        ended, batch = taken.ended, taken.ended.batch
        taken.count()
        self.metrics.count_rows(batch)
        for b in [b for b in batch.unseen if batch.taken[b] > 0]:
            sequence = batch.sequences[b]
            self.metrics.count_prompt(sequence.stats, queried=self._reuse.serves(sequence))
            batch.unseen.remove(b)
        self._proposals.count(ended)
        self._proposals.observe_pass(ended, batch.frame.num_tokens)
        return batch.frame.num_tokens

    def _spell(self, taken: Taken | None) -> list[RequestOutput]:
        """Make text of what was taken; learn from sequences that have ended. Nothing of one where that failed."""
        if taken is None:
            return []
        outputs = list[RequestOutput]()
        for sequence, found in taken.by_row():
            try:
                output = sequence.output(found)
            except BaseException as error:
                under_way = () if self._passes.first is None else self._passes.first.batch.sequences
                self._isolation.fail(sequence, "making text", error, is_under_way=sequence in under_way)
            else:
                outputs.append(output if output.finish_reason is None else self._finish(sequence, output))
        return outputs

    def _finish(self, sequence: Sequence, output: RequestOutput) -> RequestOutput:
        self.metrics.histograms.count_ended(sequence.request, sequence.stats)
        self.metrics.num_coupled_requests += sequence.stats.is_coupled
        reason = str(output.finish_reason)
        self.metrics.num_requests_finished[reason] = self.metrics.num_requests_finished.get(reason, 0) + 1
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._learn(sequence)
        return output

    def _learn(self, sequence: Sequence) -> None:
        if (namespace := sequence.namespace) is not None and sequence.request.learn:
            self._best_effort(
                lambda: namespace.append(sequence.context.copy(), prompt_length=sequence.num_prompt_tokens)
            )

    def _observe_load(self) -> None:
        scheduler = self._scheduler
        num_unopened = 0 if self.caches is None else self.caches.num_failed_openings
        self.metrics.drafter_failures = self._proposals.num_failures + num_unopened
        self.metrics.num_failed_passes = self._isolation.num_failed_passes
        self.metrics.num_running = len(scheduler.running)
        self.metrics.num_waiting = scheduler.num_waiting
        held = sum(sequence.row.length for sequence in scheduler.running)
        self.metrics.kv_usage = held / (self.target.num_slots * self.max_model_len)
        if not scheduler.running:
            self._batch = Batch(())  # it holds sequences
            self._passes.drop()
        if not scheduler.running and not scheduler.num_waiting:
            self._best_effort(lambda: settle(self.check(), self.metrics, scheduler, self._reuse))


def _compare_tokenizer(codec: TextCodec, num_logits: int) -> None:
    """Warn of a tokenizer that does not belong to the model, and of outputs that only ``max_tokens`` can end."""
    if codec.vocab_size > num_logits:
        log.warning(
            "the tokenizer has %d token ids and the model %d: they do not belong together, and prompts with an id "
            "beyond are refused. Check --tokenizer and the files of the model", codec.vocab_size, num_logits,
        )  # fmt: skip
    if not codec.eos_token_ids:
        log.warning(
            "no token ends an output: neither the tokenizer nor generation_config.json nor config.json names one "
            "(eos_token_id). Outputs end by max_tokens, stop or stop_token_ids alone"
        )
