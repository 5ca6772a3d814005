"""Rollouts of TRL's GRPO through our engine::

    from ssd.integrations.trl import Rollouts

    with Rollouts() as rollouts:
        GRPOTrainer(model, rollout_func=rollouts, args=GRPOConfig(...), ...).train()

The engine computes with a copy of the policy, which takes over the trainer's weights in place whenever a step has
changed them. Every sample is drawn from the policy as it is then, with the temperature and the truncation of the
trainer's settings. What all epochs have said is drafted from, and noise is coupled (``docs/coupled-sampling.md``):
sample i of a prompt draws with the noise of stream i in every epoch, so it says again what it said in the last one as
far as the policy has not moved, and what it says again costs few passes. Samples of one prompt are of different streams
and independent of each other.

What is given up: noise that comes again is not fresh. The first time a prompt is asked its samples have the policy's
law, independent of all that was trained on before. When it is asked again with the same noise, the weights are a
function of what this noise has already given: given the weights, the samples are no longer exactly of the policy's law,
and a gradient made of them is not unbiased. Training then improves the mean over a fixed set of scenarios, as PEGASUS
does on purpose (Ng and Jordan 2000, arXiv 1301.3878): as with a fixed set of prompts, reward may be found that does not
hold beyond it, the less the more scenarios there are. ``fresh_noise_every`` says after how many epochs noise is drawn
anew: 1 is the usual law at every step, and drafts are then what other texts give. Evaluation always draws with noise of
its own, so what it measures holds. ``docs/rollouts.md`` has what was measured.
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
_ALMOST = 1e-6
"""Epochs are counted in fractions, which round."""


@dataclass(slots=True)
class RolloutTotals:
    """What generating took so far.

    ``passes`` : of the target, over as many rows as ran. ``row_passes`` : the same counted by row. Seconds by the
    clock: of generating, prompts included, and of taking weights over.
    """

    samples: int = 0
    tokens: int = 0
    passes: int = 0
    row_passes: int = 0
    generating_s: float = 0.0
    loading_s: float = 0.0


class Rollouts:
    """A ``rollout_func`` of ``trl.GRPOTrainer`` (1.16), for one trainer; closed when the training has ended.

    One process generates for itself: in a distributed run each has an engine, and weights that are sharded over
    processes are refused, as are adapters (peft), images and ``generation_kwargs``.
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
        """Nothing is opened before the first call, or `open`.

        config, draft, cache : of the engine; ``cache`` with a directory keeps what was said for another run.
        coupled : False gives every sample noise of its own, as plain sampling does. secret : what noise is made of;
        None takes the trainer's seed, so that a run can be repeated. fresh_noise_every : epochs after which other noise
        is drawn with; 0 keeps it. Raises ConfigError.
        """
        if fresh_noise_every < 0:
            raise ConfigError(f"fresh_noise_every must be a number of epochs, or 0 for never, got {fresh_noise_every}")
        self.totals = RolloutTotals()
        self._config = config or EngineConfig()
        self._draft = draft or DraftConfig()
        self._cache = cache or CacheConfig()
        self._coupled = coupled
        self._secret = secret
        self._fresh_noise_every = fresh_noise_every
        self._root = b""
        self._engine: Engine | None = None
        self._loaded_at = -1
        self._num_calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the engine and its caches; a directory keeps what was learned. May be called twice."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def open(self, trainer: Any) -> None:
        """Copy the trainer's model and make everything ready now, which may take minutes where kernels are compiled.

        Raises ConfigError for a training that is not supported, and ModelError.
        """
        _check(trainer)
        self._engine_with_weights(trainer)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """One completion for each of ``prompts``: what TRL hands over has each of them ``num_generations`` times.

        prompts : texts or lists of messages. Returns ``prompt_ids``, ``completion_ids`` and ``logprobs``, a list of n
        numbers for each: those that the tokens were drawn with, after temperature and truncation, which is what TRL
        takes of other engines. Raises ConfigError for what is not supported, ModelError, EngineError.
        """
        _check(trainer)
        self._root = self._root_of(trainer)
        engine = self._engine_with_weights(trainer)
        began = perf_counter()
        prompt_ids = _token_ids(prompts, trainer)
        requests = list(self._requests(prompt_ids, trainer))
        self._num_calls += 1  # first: ids of a call that fails do not come again
        said = self._run(engine, requests)
        self.totals.generating_s += perf_counter() - began
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [said[request.request_id][0] for request in requests],
            "logprobs": [said[request.request_id][1] for request in requests],
        }

    # -- weights -----------------------------------------------------------------------------------------------------

    def _engine_with_weights(self, trainer: Any) -> Engine:
        """The engine, which computes with the trainer's weights of this step."""
        policy = trainer.accelerator.unwrap_model(trainer.model)
        step = trainer.state.global_step
        if self._engine is None:
            self._engine = self._opened(policy, trainer)
        elif step != self._loaded_at:
            began = perf_counter()
            self._engine.load_weights(policy.state_dict())
            self.totals.loading_s += perf_counter() - began
        self._loaded_at = step
        return self._engine

    def _opened(self, policy: PreTrainedModel, trainer: Any) -> Engine:
        config, draft = replace(self._config, coupled_streams=max(1, trainer.num_generations)), self._draft
        codec = TextCodec(trainer.processing_class, tuple(trainer.eos_token_ids))
        model = _copy_of(policy)
        target = open_target(
            model,
            num_slots=config.max_num_seqs,
            max_length=config.max_model_len,
            max_draft_tokens=draft.num_speculative_tokens,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager,
            exact=config.exact,
            keeps_top=draft.recycling and draft.num_speculative_tokens > 0,
        )
        engine = Engine(
            target,
            drafter=make_drafter("ssd", draft),
            caches=CacheManager(self._cache, codec.fingerprint, namespace=_NAMESPACE),
            config=config,
            draft=draft,
            eos_token_ids=codec.eos_token_ids,
            noise_root=lambda: self._root,
        )
        engine.warm_up()
        return engine

    # -- samples -----------------------------------------------------------------------------------------------------

    def _root_of(self, trainer: Any) -> bytes:
        """What noise is made of now: of the secret, and of which time it is drawn anew."""
        secret = self._secret or b"rollouts %d" % trainer.args.seed
        every = self._fresh_noise_every
        period = int(((trainer.state.epoch or 0.0) + _ALMOST) // every) if every else 0
        return hmac.digest(secret, b"period %d" % period, hashlib.sha256)

    def _requests(self, prompt_ids: Sequence[Sequence[int]], trainer: Any) -> Iterator[Request]:
        """Of every prompt one, with the noise of its number in the group of those with the same prompt."""
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
        own = self._coupled and is_training
        first = trainer.accelerator.process_index * len(prompt_ids)
        everywhere = gather_object(prompt_ids)  # a group may be on two processes, and its prompt's other one elsewhere
        groups: Counter[tuple[int, ...]] = Counter()
        for index, prompt in enumerate(map(tuple, everywhere[: first + len(prompt_ids)])):
            sample = index % group_size
            if sample == 0:
                groups[prompt] += 1  # a prompt that is there twice has two groups, of other streams each
            if index < first:
                continue
            stream = (groups[prompt] - 1) * group_size + sample
            yield Request(
                request_id=f"{self._num_calls}-{index}",
                prompt_token_ids=prompt,
                sampling=sampling if own else replace(sampling, seed=self._seed(index)),
                noise_stream=stream if own else None,
                namespace=_NAMESPACE,
                learn=is_training,
            )

    def _seed(self, index: int) -> int:
        """Of noise that nothing else is drawn with."""
        digest = hmac.digest(self._root, b"call %d, sample %d" % (self._num_calls, index), hashlib.sha256)
        return int.from_bytes(digest[:8], "little") >> 1

    def _run(self, engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[float]]]:
        """Tokens and their log-probabilities, by request."""
        said: dict[str, tuple[list[int], list[float]]] = {request.request_id: ([], []) for request in requests}
        pending, before = deque(requests), engine.metrics.num_verify_steps
        try:
            while pending or engine.has_work():
                _submit(engine, pending)
                for output in engine.step():
                    if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                        raise EngineError(f"sample {output.request_id} failed: {output.error or output.finish_reason}")
                    tokens, logprobs = said[output.request_id]
                    tokens += output.token_ids
                    logprobs += [entry.logprob for entry in output.logprobs or ()]
                self.totals.passes += 1
        except BaseException:  # a notebook goes on after an interrupt, with the same engine
            for request in requests:
                engine.cancel(request.request_id)
            while engine.has_work():
                engine.step()
            raise
        self.totals.samples += len(requests)
        self.totals.tokens += sum(len(tokens) for tokens, _ in said.values())
        self.totals.row_passes += engine.metrics.num_verify_steps - before
        return said


def _submit(engine: Engine, pending: deque[Request]) -> None:
    """As many as the engine takes."""
    while pending:
        try:
            engine.submit(pending[0])
        except QueueFull:
            return
        pending.popleft()


def _copy_of(policy: PreTrainedModel) -> PreTrainedModel:
    """A model of the same weights that nobody has wrapped or patched, in evaluation mode; twice the memory."""
    config = copy.deepcopy(policy.config)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=policy.dtype).to(policy.device)
    model.load_state_dict(policy.state_dict())
    return model.eval().requires_grad_(False)


def _token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Prompts as the trainer itself would have them."""
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


def _check(trainer: Any) -> None:
    """Raise ConfigError for a training that is not supported."""
    if hasattr(trainer.processing_class, "tokenizer"):
        raise ConfigError("rollouts take texts only: train models of images and sound without this rollout_func")
    if getattr(trainer.args, "generation_kwargs", None):
        raise ConfigError("generation_kwargs are not honoured here: give temperature, top_p, top_k, min_p and "
                          "repetition_penalty")  # fmt: skip
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise ConfigError("rollouts take a policy's own weights over, not adapters: train the model without peft")
