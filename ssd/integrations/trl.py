"""Rollouts for TRL's GRPOTrainer with the SSD engine.

::

    from ssd.integrations.trl import Rollouts

    with Rollouts() as rollouts:
        GRPOTrainer(model, rollout_func=rollouts, args=GRPOConfig(...), ...).train()

The engine has a copy of the policy, whose weights are updated in place after each training step. Every sample is drawn
from the current policy with the temperature and the truncation of the trainer's settings. Drafts come from the outputs
of all epochs, and sampling noise is shared (docs/concepts/coupled-sampling.md): sample i of a prompt is drawn with
noise stream i in every epoch. So it repeats the output of the previous epoch as far as the policy has not changed, and
the repeated part takes few forward passes. Samples of one prompt have different streams and are independent.

The disadvantage is that repeated noise is not fresh. When a prompt is sampled for the first time, its samples have the
policy's distribution, independent of all training data so far. When it is sampled again with the same noise, the
weights already depend on the text that this noise has generated. Given the weights, the samples then do not follow the
policy's distribution exactly, and a gradient estimated from them is biased. Training then improves the mean over a
fixed set of scenarios, as PEGASUS does on purpose (Ng and Jordan 2000, arXiv 1301.3878). As with a fixed set of
prompts, it may find reward that does not generalize beyond this set; the risk falls with the number of scenarios.
``fresh_noise_every`` is the number of epochs after which the noise changes: 1 gives the usual distribution at every
step, but then fewer drafts are accepted. Evaluation always uses fresh noise, so its results are unbiased.
``docs/guides/rollouts.md`` has measurements.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

from transformers import AutoModelForCausalLM, PreTrainedModel

from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, FinishReason, Request
from ssd.errors import ConfigError, EngineError, QueueFull
from ssd.model.loading.load_target import open_target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

_NAMESPACE = "rollouts"
_EPSILON = 1e-6  # a tolerance for the trainer's epoch, which is a rounded fraction


@dataclass(slots=True)
class RolloutTotals:
    """The totals over all rollouts that a trainer has requested so far."""

    samples: int = 0
    tokens: int = 0
    passes: int = 0  # the number of forward passes of the target
    row_passes: int = 0  # the number of rows of all passes
    generating_s: float = 0.0  # the wall-clock seconds of generation, prefill included
    loading_s: float = 0.0  # the wall-clock seconds of weight updates


class Rollouts:
    """A ``rollout_func`` for one ``trl.GRPOTrainer`` (TRL 1.16) that generates with SSD's engine.

    Close it after the training. In a distributed run each process has its own engine. Weights that are sharded over
    processes, adapters (peft), images, and ``generation_kwargs`` are not supported.
    """

    def __init__(
        self,
        *,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        cache: CacheConfig | None = None,
        coupled: bool = True,
        secret: bytes | None = None,
        fresh_noise_every: int = 0,
    ) -> None:
        """Create a ``rollout_func``; the first call of the ``rollout_func`` or `open` starts the engine.

        Args:
            config: The settings of the engine.
            draft: The settings of drafting.
            cache: The settings of the cache; with a directory, another run can use the generated text.
            coupled: Whether samples of different epochs share sampling noise; False samples independently.
            secret: The secret from which shared noise is derived; None derives it from the trainer's seed, so that a
                run can be repeated.
            fresh_noise_every: The number of epochs after which the shared noise changes; 0 never changes it.

        Raises:
            ConfigError: An argument is invalid.
        """
        if fresh_noise_every < 0:
            raise ConfigError(f"fresh_noise_every must be at least 0 (epochs; 0: never), got {fresh_noise_every}")
        self.totals = RolloutTotals()
        self._config = config or EngineConfig()
        self._draft = draft or DraftConfig()
        self._cache = cache or CacheConfig()
        self._coupled = coupled
        self._secret = secret
        self._fresh_noise_every = fresh_noise_every
        self._noise_root = b""
        self._engine: Engine | None = None
        self._loaded_step = -1
        self._num_calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and its caches; a cache directory keeps the generated text. May be called twice."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def open(self, trainer: Any) -> None:
        """Copy the trainer's model and open the engine now, which may take minutes if kernels are compiled.

        Raises:
            ConfigError: The training is not supported.
            ModelError: The model cannot be used.
        """
        _check_supported(trainer)
        self._engine_with_weights(trainer)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate one completion for each prompt; TRL passes each prompt ``num_generations`` times.

        Args:
            prompts: Texts or lists of messages.
            trainer: The trainer.

        Returns:
            ``prompt_ids``, ``completion_ids`` and ``logprobs``, each a list with one list per prompt. The
            log-probabilities are those after temperature and truncation, as TRL gets them from other engines.

        Raises:
            ConfigError: The training is not supported.
            ModelError: The model cannot be used.
            EngineError: A sample failed.
        """
        _check_supported(trainer)
        self._noise_root = self._noise_root_of(trainer)
        engine = self._engine_with_weights(trainer)
        started = perf_counter()
        prompt_ids = _encode_prompts(prompts, trainer)
        requests = list(self._requests(prompt_ids, trainer))
        self._num_calls += 1  # before the run, so that the ids of a failed call are not used again
        samples = self._generate(engine, requests)
        self.totals.generating_s += perf_counter() - started
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [samples[request.request_id][0] for request in requests],
            "logprobs": [samples[request.request_id][1] for request in requests],
        }

    # -- weights -----------------------------------------------------------------------------------------------------

    def _engine_with_weights(self, trainer: Any) -> Engine:
        """Return the engine with the trainer's current weights; open it at the first call."""
        policy = trainer.accelerator.unwrap_model(trainer.model)
        step = trainer.state.global_step
        if self._engine is None:
            self._engine = self._open_engine(policy, trainer)
        elif step != self._loaded_step:
            started = perf_counter()
            self._engine.load_weights(policy.state_dict())
            self.totals.loading_s += perf_counter() - started
        self._loaded_step = step
        return self._engine

    def _open_engine(self, policy: PreTrainedModel, trainer: Any) -> Engine:
        config, draft = replace(self._config, coupled_streams=max(1, trainer.num_generations)), self._draft
        codec = TextCodec(trainer.processing_class, tuple(trainer.eos_token_ids))
        model = _copy_model(policy)
        target = open_target(
            model,
            num_slots=config.max_num_seqs,
            max_length=config.max_model_len,
            max_draft_tokens=draft.num_speculative_tokens,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager,
            batch_invariant=config.batch_invariant,
            keeps_top=draft.recycling and draft.num_speculative_tokens > 0,
        )
        engine = Engine(
            target,
            drafter=make_drafter("ssd", draft),
            caches=CacheManager(self._cache, codec.fingerprint, namespace=_NAMESPACE),
            config=config,
            draft=draft,
            eos_token_ids=codec.eos_token_ids,
            noise_root=lambda: self._noise_root,
        )
        engine.warm_up()
        return engine

    # -- samples -----------------------------------------------------------------------------------------------------

    def _noise_root_of(self, trainer: Any) -> bytes:
        """Return the secret of the shared sampling noise, which changes every ``fresh_noise_every`` epochs."""
        secret = self._secret or b"rollouts %d" % trainer.args.seed
        every = self._fresh_noise_every
        period = int(((trainer.state.epoch or 0.0) + _EPSILON) // every) if every else 0
        return hmac.digest(secret, b"period %d" % period, hashlib.sha256)

    def _requests(self, prompt_ids: Sequence[Sequence[int]], trainer: Any) -> Iterator[Request]:
        """Yield one request for each prompt of this process.

        With coupled sampling, the i-th request with the same prompt uses noise stream i, in each epoch.
        """
        from accelerate.utils import gather_object  # type: ignore[import-untyped]  # comes with TRL

        args = trainer.args
        is_training = trainer.model.training
        group_size = trainer.num_generations if is_training else trainer.num_generations_eval
        sampling = SamplingParams(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
            logprobs=0,
            drawn_logprobs=True,
        )
        is_coupled = self._coupled and is_training
        first = trainer.accelerator.process_index * len(prompt_ids)
        all_prompts = gather_object(prompt_ids)  # a group may be split over two processes
        groups: Counter[tuple[int, ...]] = Counter()
        for index, prompt in enumerate(map(tuple, all_prompts[: first + len(prompt_ids)])):
            sample = index % group_size
            if sample == 0:
                groups[prompt] += 1  # a prompt that occurs twice has two groups with different streams
            if index < first:
                continue
            stream = (groups[prompt] - 1) * group_size + sample
            yield Request(
                request_id=f"{self._num_calls}-{index}",
                prompt_token_ids=prompt,
                sampling=sampling if is_coupled else replace(sampling, seed=self._seed(index)),
                noise_stream=stream if is_coupled else None,
                namespace=_NAMESPACE,
                learn=is_training,
            )

    def _seed(self, index: int) -> int:
        digest = hmac.digest(self._noise_root, b"call %d, sample %d" % (self._num_calls, index), hashlib.sha256)
        return int.from_bytes(digest[:8], "little") >> 1

    def _generate(self, engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[float]]]:
        samples: dict[str, tuple[list[int], list[float]]] = {request.request_id: ([], []) for request in requests}
        pending, before = deque(requests), engine.metrics.num_verify_steps
        try:
            while pending or engine.has_work():
                _submit_pending(engine, pending)
                for output in engine.step():
                    if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                        raise EngineError(f"sample {output.request_id} failed: {output.error or output.finish_reason}")
                    tokens, logprobs = samples[output.request_id]
                    tokens += output.token_ids
                    logprobs += [entry.logprob for entry in output.logprobs or ()]
                self.totals.passes += 1
        except BaseException:  # after an interrupt, a notebook continues with the same engine
            for request in requests:
                engine.cancel(request.request_id)
            while engine.has_work():
                engine.step()
            raise
        self.totals.samples += len(requests)
        self.totals.tokens += sum(len(tokens) for tokens, _ in samples.values())
        self.totals.row_passes += engine.metrics.num_verify_steps - before
        return samples


def _submit_pending(engine: Engine, pending: deque[Request]) -> None:
    while pending:
        try:
            engine.submit(pending[0])
        except QueueFull:
            return
        pending.popleft()


def _copy_model(policy: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the policy in evaluation mode for the engine; it doubles the memory of the weights."""
    config = copy.deepcopy(policy.config)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=policy.dtype).to(policy.device)
    model.load_state_dict(policy.state_dict())
    return model.eval().requires_grad_(False)


def _encode_prompts(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return list(tokenizer(text=list(prompts))["input_ids"])
    encoded = tokenizer.apply_chat_template(
        conversation=list(prompts),
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return list(encoded["input_ids"])


def _check_supported(trainer: Any) -> None:
    if hasattr(trainer.processing_class, "tokenizer"):
        raise ConfigError("rollouts support text only: train models with images or audio without this rollout_func")
    if getattr(trainer.args, "generation_kwargs", None):
        raise ConfigError(
            "generation_kwargs are not supported: set temperature, top_p, top_k, min_p and repetition_penalty"
        )
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise ConfigError("rollouts copy the policy's own weights, not adapters: train the model without peft")
