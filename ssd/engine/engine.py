"""The serving loop: prefill prompts, propose drafts, run the target, verify the drafts, append the accepted tokens."""

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
from ssd.engine.batch import NEEDS_SLOW_PATH, Batch, append_output_ids, warm_up_rows
from ssd.engine.forward_pass import CommittedPass, ForwardPass, warm_up_verification
from ssd.engine.isolation import FaultIsolation, find_violations, handle_violations
from ssd.engine.metrics import BestEffort, EngineMetrics
from ssd.engine.pipeline import Pipeline
from ssd.engine.prefill import Prefill
from ssd.engine.prefix_cache import PrefixCache
from ssd.engine.request import FinishReason, Request, RequestOutput
from ssd.engine.scheduler import Scheduler
from ssd.engine.sequence import Coupling, Sequence, open_sequence
from ssd.engine.speculation import SpeculationManager, SpeculationStatus
from ssd.errors import ConfigError, EngineError, EngineStopped, QueueFull
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from ssd.text.grammar_compiler import GrammarCompiler
from ssd.text.load_tokenizer import HubOptions

log = logging.getLogger(__name__)


class Engine:
    """Serves requests with continuous batching and speculative decoding; the drafts come from a cache of earlier text.

    ``submit``, ``cancel`` and ``wait_for_work`` may be called from any thread, ``step`` by one thread at a time. An
    exception that a request causes in a step ends only that request. A step never reads a file: caches are opened in
    the background, and a request gets drafts as soon as its cache is open.
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
        """Create an engine for a target model that has been loaded.

        Args:
            target: The served model.
            drafter: The drafter, which proposes draft tokens.
            codec: The tokenizer; with None, the engine accepts and returns only token ids.
            caches: The retrieval caches of finished text; with None, no text is cached.
            config: The settings of the engine.
            draft: The settings of drafting.
            eos_token_ids: The end-of-text ids; None takes those of ``codec``.
            draw_seed: A function that returns the seed of a request without one; None draws seeds at random.
            noise_root: A function that returns the secret for sampling noise that requests share, see `Coupling`.
        """
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
        self._speculation = SpeculationManager(target, drafter, draft, self._best_effort)
        self._batch = Batch(())
        self._is_calibrated = False
        self._prefix_cache = PrefixCache(target, enabled=self.config.enable_prefix_caching)
        self._scheduler = Scheduler(target.num_slots, self._prefix_cache)
        self._isolation = FaultIsolation(target, self._scheduler, self._prefix_cache, self._speculation)
        self._pipeline = Pipeline(target, self._speculation, self._isolation)
        self._prefill = Prefill(target, self._prefix_cache, self.config.prefill_chunk_tokens, self._isolation.fail_one)
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
        """Load a Hugging Face model, its tokenizer, and the draft model or draft head if given, and create an engine.

        Args:
            model: The directory or id of the model.
            dtype: The data type of the weights.
            device: The device of the model.
            caches: The retrieval caches of finished text; with None, no text is cached.
            codec: The tokenizer; None loads the tokenizer of the model.
            config: The settings of the engine.
            draft: The settings of drafting.
            drafter: The name of the drafter.
            draft_model: A smaller model with the same tokenizer. It drafts when its expected gain exceeds its cost. It
                requires the drafter "ssd", and is not loaded if speculation is disabled.
            draft_head: A draft head trained for this model, see docs/concepts/draft-heads.md. It is used and loaded
                under the same conditions as ``draft_model``.
            adapters: The directories or ids of LoRA adapters, by the names that requests use.
            hub: The options for downloading ``model`` from the Hub.
            draft_hub: The options for downloading the draft model and the draft head from the Hub.
            draw_seed: A function that returns the seed of a request without one; None draws seeds at random.
            noise_root: A function that returns the secret for sampling noise that requests share, see `Coupling`.
            report: A function that is called with a description of each long stage before the stage starts.

        Raises:
            ConfigError: A draft model or head is combined with a drafter other than "ssd".
            ModelError: A model cannot be loaded or does not fit into memory, or the draft model has another tokenizer.
        """
        if drafter != "ssd" and (draft_model is not None or draft_head is not None):
            raise ConfigError(
                f'a draft model or draft head requires the drafter "ssd", got {drafter!r}: set the drafter to '
                '"ssd", or omit the drafter'
            )
        config, draft = config or EngineConfig(), draft or DraftConfig()
        if not draft.num_speculative_tokens:  # they would never be used
            draft_model = draft_head = None
        codec = codec or TextCodec.load(str(model), hub)
        # Imported late: these modules import all of transformers, which takes longer than everything else together.
        from ssd.model.draft.drafter import HeadDrafter, feature_spec, load_draft_model
        from ssd.model.heads.layouts import load_head
        from ssd.model.loading.adapters import load_adapters
        from ssd.model.loading.load_target import load_model, open_target
        from ssd.model.loading.threads import tune_threads
        from ssd.model.runners.batch_invariance import verify_batch_invariance

        report(f"reading the weights of {model}")
        loaded = load_model(model, dtype=dtype, device=device, hub=hub)
        _warn_about_tokenizer(codec, loaded.config.get_text_config().vocab_size)
        if adapters:
            report(f"reading adapters {', '.join(adapters)}")
        adapted = load_adapters(loaded, adapters or {})
        head = None
        if draft_head is not None:
            report(f"reading the draft head {draft_head}")
            head = load_head(draft_head, loaded, draft_hub)
        report(f"selecting the runner for {type(loaded).__name__}")
        target = open_target(
            loaded,
            num_slots=config.max_num_seqs,
            max_length=config.max_model_len,
            max_draft_tokens=draft.num_speculative_tokens,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager,
            batch_invariant="off",  # verified below, when the number of threads is known
            adapters=adapted,
            tapped=None if head is None else feature_spec(head, loaded.device, loaded.dtype),
            keeps_top=draft.recycling and draft.num_speculative_tokens > 0 and drafter == "ssd",
        )
        report("tuning the number of threads, and checking whether forward passes are bit-identical")
        tune_threads(target)
        verify_batch_invariance(target, config.batch_invariant)
        log.info("%s", target.batch_invariance)
        drafters = [make_drafter(drafter, draft)]
        if head is not None:
            drafters.append(HeadDrafter(head, target))
        if draft_model is not None:
            report(f"reading the draft model {draft_model}")
            drafters.append(
                load_draft_model(
                    draft_model,
                    target,
                    codec,
                    dtype=dtype,
                    device=device,
                    hub=draft_hub,
                    enforce_eager=config.enforce_eager,
                )
            )
        return cls(
            target,
            drafter=drafters[0] if len(drafters) == 1 else HybridDrafter(drafters),
            codec=codec,
            caches=caches,
            config=config,
            draft=draft,
            draw_seed=draw_seed,
            noise_root=noise_root,
        )

    # -- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. It gets one or more outputs in later steps; only the last one has a finish reason.

        Raises:
            RequestError: The request is invalid, e.g. ContextTooLong.
            QueueFull: Too many requests are waiting.
            EngineStopped: The engine has been closed.
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
            noise=self._coupling.make_noise(request, self._draw_seed()),
            allows_priority=self.config.scheduling_policy == "priority",
        )
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine has been stopped")
            if self._num_unfinished() >= self.config.max_waiting + self.target.num_slots:
                raise QueueFull(f"{self.config.max_waiting} requests are waiting already: try again later")
            self._inbox.append(sequence)
        self._work.set()

    def draw_streams(self, count: int) -> list[int]:
        """Draw the numbers of ``count`` different noise streams, so that the outputs of one prompt differ.

        With coupled sampling, requests with the same noise stream share their sampling noise.
        """
        return self._coupling.distinct_streams(count, self._draw_seed())

    def cancel(self, request_id: str) -> None:
        """End a request at the next step. The ids of unknown and finished requests are ignored."""
        with self._lock:
            self._cancelled.add(request_id)
        self._work.set()

    def has_work(self) -> bool:
        """Return whether there are unfinished requests, cancellations or outputs that a step must process."""
        return bool(self._cancelled or self._num_unfinished() or self._isolation.has_outputs)

    def _num_unfinished(self) -> int:
        return len(self._inbox) + self._scheduler.num_waiting + len(self._scheduler.running)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Sleep until there is work or the timeout has passed; return ``has_work()``."""
        if not self.has_work():
            self._work.wait(timeout_s)
        self._work.clear()
        return self.has_work()

    def close(self) -> None:
        """Reject further requests, drop the running ones, and close the caches, which are then stored on disk.

        It must be called by the thread that steps, or after that thread has ended.
        """
        with self._lock:
            self._stopped = True
        self._work.set()
        if self.caches is not None:
            self._speculation.publish()
            self.caches.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advance every running sequence by one forward pass of the target, and return the new outputs.

        On a GPU, which computes concurrently with the host, a step verifies the forward pass that the previous step
        launched, and launches the next pass. While that pass runs, the step makes outputs and further drafts. If there
        were no drafts for a while and no request starts or ends, one more pass is launched ahead, so that the GPU is
        never idle.

        An exception that ends the program, e.g. KeyboardInterrupt, cancels all running requests and is raised again;
        the waiting requests continue at the next step.

        Raises:
            EngineBroken: The target cannot compute anything any more.
        """
        begun = list(self._scheduler.running)
        try:
            return self._step()
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            self._pipeline.drop()
            self._isolation.abort(dict.fromkeys([*begun, *self._scheduler.running]))
            raise

    def _step(self) -> list[RequestOutput]:
        if self._pipeline.current is not None and self._pipeline.next is None:  # only on a concurrent device
            self._speculation.prepare_drafts(self._pipeline.current)
        committed = self._commit(self._pipeline.verify())
        cancelled = list[Sequence]()
        if self._pipeline.current is None:  # else admission and cancellation wait for a pass
            cancelled = self._admit_and_cancel()
            batch = self._prefill_prompts()
            self._pipeline.launch(batch, self._speculation.propose(batch))
        if not self.target.is_asynchronous:
            committed = self._commit(self._pipeline.verify())
        num_tokens = self._prefill.pop_num_computed() + self._update_counts(committed)
        outputs = self._make_outputs(committed)
        outputs += [self._finish(sequence, sequence.end(FinishReason.CANCELLED)) for sequence in cancelled]
        outputs += [self._finish(sequence, output) for sequence, output in self._isolation.collect_outputs()]
        if num_tokens:
            self.metrics.histograms.step_tokens.observe(num_tokens)
        if self.target.is_asynchronous and not (self._inbox or self._cancelled or self._scheduler.can_admit()):
            self._pipeline.launch_ahead(self._scheduler.running)
        self._update_gauges()
        return outputs

    def check(self) -> list[str]:
        """Check the state of KV cache slots and requests between two steps; return each inconsistency as a sentence.

        Sequences in a running forward pass are not checked.
        """
        with self._lock:
            arriving = list(self._inbox)
        return find_violations(
            self.target, self._scheduler, self._prefix_cache, arriving, is_in_flight=self._pipeline.current is not None
        )

    @property
    def is_drafting(self) -> bool:
        """Whether the drafter may be called. False while its kernels are compiled in the background."""
        return self._speculation.is_ready

    @property
    def speculation(self) -> SpeculationStatus:
        """Whether drafts are verified at present, and the reason in one sentence."""
        return self._speculation.status

    @property
    def is_speculating(self) -> bool:
        """Whether this engine is configured to make drafts. The value never changes."""
        return self._speculation.is_enabled

    def relative_pass_cost(self, width: int) -> float:
        """Return the estimated time of a pass over ``width`` tokens relative to a pass over one token; 0 if unknown."""
        return self._speculation.relative_cost(width)

    def warm_up(self, patience_s: float | None = None) -> None:
        """Compile all kernels and run every kind of forward pass once, so that the first request compiles nothing.

        Args:
            patience_s: The seconds to wait for the drafting kernels. If they are not ready then, a background thread
                goes on compiling them, and requests are served without drafts meanwhile. None waits for all kernels.
        """
        self._coupling.warm_up()
        warm_up_verification()
        warm_up_rows()
        self.target.warm_up()
        if patience_s is not None:  # kernels are compiled one at a time: the necessary ones first
            self._speculation.defer_drafting()
            if not self.is_drafting:
                self._warm_up_passes()
        self._speculation.warm_up(patience_s)
        if self.is_drafting:
            self._warm_up_passes()
        else:
            log.info("requests are served without drafts for now: %s", self.speculation.reason)
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
        """Measure the latency of forward passes of several sizes, because the length of drafts depends on it.

        This is done once, as soon as no request is running or waiting and the drafting kernels are compiled; otherwise
        the call has no effect. Only the thread that steps the engine may call this method.
        """
        if not self._is_calibrated and self.is_drafting and not self.has_work() and self._pipeline.current is None:
            self._prefix_cache.clear_all()
            self._best_effort(self._speculation.calibrate)  # requests may already be served
            self._prefix_cache.clear_all()
            self._is_calibrated = True

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the model's weights, e.g. after a training step; only the thread that steps may call this.

        Outputs equal those of a new engine with these weights, because the KV cache is cleared. The text cache,
        drafting statistics and latencies are kept, and so are draft heads and draft models, which were trained for the
        old weights: fewer of their tokens are accepted as the weights move away.

        Args:
            weights: A ``state_dict``, see `replace_weights`.

        Raises:
            EngineError: Requests are running or waiting.
            ModelError: The weights do not fit; nothing was changed.
        """
        from ssd.model.loading.replace_weights import replace_weights

        if self.has_work() or self._pipeline.current is not None:
            raise EngineError(
                "weights cannot be replaced while requests run or wait: wait for their end, or cancel them"
            )
        self._prefix_cache.clear_all()
        replace_weights(self.target.model, weights)

    def generate(
        self,
        prompts: Iterable[list[int]],
        sampling: SamplingParams | None = None,
        *,
        namespace: str | None = "default",
    ) -> Iterator[RequestOutput]:
        """Complete prompts of token ids on the calling thread, and yield every output as soon as it is generated.

        Meant for scripts. Unfinished requests are cancelled if the caller stops iterating or a prompt is rejected.
        """
        request_ids = list[str]()
        try:
            for index, prompt in enumerate(prompts):
                while self._num_unfinished() >= self.config.max_waiting + self.target.num_slots:
                    yield from self.step()
                request_ids.append(f"generate-{id(prompts)}-{index}")
                self.submit(
                    Request(
                        request_id=request_ids[-1],
                        prompt_token_ids=tuple(prompt),
                        sampling=sampling or SamplingParams(),
                        namespace=namespace,
                    )
                )
            while self.has_work():
                yield from self.step()
        except BaseException:
            for name in request_ids:
                self.cancel(name)
            raise

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _admit_and_cancel(self) -> list[Sequence]:
        with self._lock:
            self._scheduler.enqueue(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
        removed = self._scheduler.remove(cancelled) if cancelled else []
        preempted = self._scheduler.admit()
        self.metrics.num_preemptions += len(preempted)
        for sequence in (*removed, *preempted):  # a preempted request starts again like a new one
            self._speculation.drop_request(sequence)
        return removed

    def _prefill_prompts(self) -> Batch:
        """Compute the next chunk of the running sequences' prompts, and return the batch of sequences that can decode.

        If a forward pass over several sequences failed and each of them must be retried alone, the batch has one
        sequence.
        """
        ready = self._prefill.run(self._scheduler.running)
        ready = next(([sequence] for sequence in ready if sequence.needs_solo_retry), ready)
        if not self._batch.has_sequences(ready):
            self._batch = Batch(ready)
        return self._batch

    def _commit(self, forward_pass: ForwardPass | None) -> CommittedPass | None:
        """Append the output tokens of a forward pass to its sequences, and report them to the drafter.

        The GPU is idle meanwhile, so metrics and text are left to `_update_counts` and `_make_outputs`, which run while
        it computes the next pass.
        """
        if forward_pass is None:
            return None
        batch, committed = forward_pass.batch, CommittedPass(forward_pass, {})
        append_output_ids(batch.address, forward_pass.output_ids, forward_pass.sizes)
        num_rows, num_slow_rows = len(batch.slots), batch.record.num_slow_rows
        if num_slow_rows < num_rows:
            if self._pipeline.current is None:  # else the next pass already continues from all of the output
                fast_rows = slice(None) if not num_slow_rows else np.flatnonzero(batch.committed != NEEDS_SLOW_PATH)
                self.target.truncate(batch.slots[fast_rows], batch.lengths[fast_rows] - 1)
            batch.sequences[0].needs_solo_retry &= num_rows > 1
        if num_slow_rows:
            for b in np.flatnonzero(batch.committed == NEEDS_SLOW_PATH).tolist():
                self._commit_slow(committed, b, batch.sequences[b])
            if (batch.committed <= 0).all() and not forward_pass.has_late_grammar:
                self._isolation.check_target()
        self._speculation.observe(committed)
        for b in committed.ended if num_slow_rows else ():
            # Dropped before the next drafts are made, as a drafter may have only as many slots as the target.
            self._speculation.drop_request(batch.sequences[b])
        return committed

    def _commit_slow(self, committed: CommittedPass, b: int, sequence: Sequence) -> None:
        forward_pass, size = committed.forward_pass, int(committed.forward_pass.sizes[b])
        if sequence.finish_reason is not None:  # detokenization failed while the pass ran
            self._isolation.drop(sequence)
        elif b in forward_pass.failed:
            self._isolation.fail(sequence, "sampling", forward_pass.failed[b])
        elif not size:  # the grammar mask is late: repeat the pass, after another prefill if prefixes cannot be kept
            forward_pass.batch.committed[b] = 0
            self.target.rollback(sequence.slot, sequence.num_tokens - 1 if self.target.can_copy_prefixes else 0)
        else:
            try:
                token_ids = forward_pass.output_ids[b, :size].tolist()
                found = sequence.append_tokens(token_ids, forward_pass.logits(b) if sequence.needs_logprobs else None)
                sequence.needs_solo_retry = False
                if found.finish_reason is not None:
                    self._scheduler.release(sequence)
                elif self._pipeline.current is None:
                    self.target.truncate([sequence.slot], [sequence.num_tokens - 1])
                forward_pass.batch.committed[b], committed.slow_path[b] = len(found.token_ids), found
            except BaseException as error:
                self._isolation.fail(sequence, "appending tokens", error)

    def _update_counts(self, committed: CommittedPass | None) -> int:
        if committed is None:
            return 0
        forward_pass, batch = committed.forward_pass, committed.forward_pass.batch
        committed.update_counts()
        self.metrics.count_pass(batch)
        for b in [b for b in batch.first_token_pending if batch.committed[b] > 0]:
            sequence = batch.sequences[b]
            self.metrics.count_prompt(sequence.stats, queried=self._prefix_cache.can_reuse(sequence))
            batch.first_token_pending.remove(b)
        self._speculation.learn(forward_pass, batch.record.num_tokens)
        return batch.record.num_tokens

    def _make_outputs(self, committed: CommittedPass | None) -> list[RequestOutput]:
        if committed is None:
            return []
        outputs = list[RequestOutput]()
        for sequence, found in committed.by_row():
            try:
                output = sequence.make_output(found)
            except BaseException as error:
                in_flight = () if self._pipeline.current is None else self._pipeline.current.batch.sequences
                self._isolation.fail(sequence, "detokenization", error, is_in_flight=sequence in in_flight)
            else:
                outputs.append(output if output.finish_reason is None else self._finish(sequence, output))
        return outputs

    def _finish(self, sequence: Sequence, output: RequestOutput) -> RequestOutput:
        self.metrics.histograms.observe_finished(sequence.request, sequence.stats)
        self.metrics.num_coupled_requests += sequence.stats.is_coupled
        reason = str(output.finish_reason)
        self.metrics.num_requests_finished[reason] = self.metrics.num_requests_finished.get(reason, 0) + 1
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._append_to_cache(sequence)
        return output

    def _append_to_cache(self, sequence: Sequence) -> None:
        if (namespace := sequence.namespace) is not None and sequence.request.learn:
            self._best_effort(
                lambda: namespace.append(sequence.context.copy(), prompt_length=sequence.num_prompt_tokens)
            )

    def _update_gauges(self) -> None:
        scheduler = self._scheduler
        num_unopened = 0 if self.caches is None else self.caches.num_failed_openings
        self.metrics.drafter_failures = self._speculation.num_failures + num_unopened
        self.metrics.num_failed_passes = self._isolation.num_failed_passes
        self.metrics.num_running = len(scheduler.running)
        self.metrics.num_waiting = scheduler.num_waiting
        num_cached = sum(sequence.row.length for sequence in scheduler.running)
        self.metrics.kv_usage = num_cached / (self.target.num_slots * self.max_model_len)
        if not scheduler.running:
            self._batch = Batch(())  # the old one would keep sequences alive
            self._pipeline.drop()
        if not scheduler.running and not scheduler.num_waiting:
            self._best_effort(lambda: handle_violations(self.check(), self.metrics, scheduler, self._prefix_cache))


def _warn_about_tokenizer(codec: TextCodec, num_logits: int) -> None:
    """Log a warning if the tokenizer does not fit the model, or if there is no end-of-text token."""
    if codec.vocab_size > num_logits:
        log.warning(
            "the tokenizer has %d token ids, but the model has only %d, so they do not belong together. "
            "Prompts with token ids that the model lacks are rejected. Check --tokenizer and the files of the "
            "model",
            codec.vocab_size,
            num_logits,
        )
    if not codec.eos_token_ids:
        log.warning(
            "no end-of-text token is known: the tokenizer, generation_config.json and config.json do not "
            "define eos_token_id. Outputs end only at max_tokens, stop or stop_token_ids. Define eos_token_id "
            "in generation_config.json"
        )
