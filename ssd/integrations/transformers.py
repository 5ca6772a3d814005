"""Use of SSD's drafter in transformers' ``model.generate``.

::

    from ssd.integrations.transformers import generate

    with CacheManager(CacheConfig(), TextCodec.load(path).fingerprint) as caches:
        output = generate(model, input_ids, cache=caches.get(), max_new_tokens=128)

transformers verifies the drafts in its own assisted decoding. Logits processors are called and tokens are sampled as in
``model.generate``: once for each token of the output, in order, and never after a rejected draft token. So processors
may keep state. Greedy outputs and outputs sampled with a seed equal those of ``model.generate``, up to the rounding of
forward passes of a different width.

With ``coupled=CoupledSampling(secret, stream)``, all calls with the same secret and stream share their sampling noise,
see `ssd.drafting.noise`. The distribution of tokens does not change, but a repeated request generates nearly the same
text, which is then drafted almost completely. The shared noise is also used to predict which drafts are accepted.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.candidate_generator import CandidateGenerator

from ssd.config import DraftConfig, SamplingParams
from ssd.cost_model.cost_model import CostModel
from ssd.drafting import Drafter, DraftRequest, make_drafter
from ssd.drafting.noise import WINDOW, SequenceNoise
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftOutcome, SamplingContext, TokenIds
from ssd.errors import RequestError
from ssd.model.sampling.sampler import argmax_with_noise
from ssd.retrieval.cache_manager import NamespaceCache

_OTHER_ASSISTANTS = (
    "custom_generate",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
)
_ids = itertools.count()
_MAX_WINDOW = 64


@dataclass(frozen=True, slots=True)
class CoupledSampling:
    """Sampling noise that calls of ``generate`` share, so that they generate nearly the same text for the same prompt.

    Each token still has the model's distribution. SSD's own engine generates the same text, up to rounding, for a
    request with the same secret, stream and window.

    Attributes:
        secret: 64 secret bits; anyone who knows them can predict the noise.
        stream: The number of the noise stream, below 2^32. Texts of different streams are independent; texts of the
            same stream are similar if their contexts are similar.
        window: The number of preceding tokens on which the noise of a token depends, 1 to 64.

    Raises:
        RequestError: A value is out of range.
    """

    secret: int
    stream: int = 0
    window: int = WINDOW

    def __post_init__(self) -> None:
        for name, limit in (("secret", (1 << 64) - 1), ("stream", (1 << 32) - 1), ("window", _MAX_WINDOW)):
            least = int(name == "window")
            if not least <= getattr(self, name) <= limit:
                raise RequestError(f"{name} must be within {least}..{limit}, got {getattr(self, name)}", param=name)

    def noise(self, prompt_length: int) -> SequenceNoise:
        return SequenceNoise.coupled(self.secret, self.stream, self.window, prompt_length=prompt_length)


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    cache: NamespaceCache | None = None,
    drafter: Drafter | None = None,
    num_speculative_tokens: int = 16,
    learn: bool = True,
    coupled: CoupledSampling | None = None,
    **generate_kwargs: Any,
) -> Any:
    """Return the result of ``model.generate(input_ids, **generate_kwargs)``, computed with speculative decoding.

    Stopping criteria are also called with draft tokens and without scores, so they should depend on the text alone.

    Args:
        model: The model.
        input_ids: The prompt, int64[1, n].
        cache: The cache from which drafts come and to which the finished text is added. With None, drafts come only
            from the prompt and the output.
        drafter: A drafter that several calls use, so that it keeps its acceptance statistics; None creates a new one.
        num_speculative_tokens: The maximum draft length.
        learn: Whether the finished text is added to the cache.
        coupled: The sampling noise; None uses torch's global generator, as ``model.generate`` does.
        **generate_kwargs: The arguments of ``model.generate``.

    Raises:
        RequestError: The call has more than one row, beams, several returned sequences, another assistant, or
            ``coupled`` without sampling; or the model is an encoder-decoder; or the model or its KV cache cannot remove
            tokens (Mamba and hybrid models, static and quantized caches, ``use_cache=False``).
    """
    config = DraftConfig(num_speculative_tokens=num_speculative_tokens)
    _check_supported(model, input_ids, generate_kwargs)
    streamer = generate_kwargs.get("streamer")
    proposer = SuffixCandidateGenerator(
        drafter or make_drafter("ssd", config),
        cache,
        prompt_length=input_ids.shape[1],
        limit=num_speculative_tokens,
        vocab_size=model.config.get_text_config().vocab_size,
    )
    proposer.allow_caching = learn

    def decode(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
        if prepared.get("streamer") is None:  # transformers does not pass it to custom functions
            prepared["streamer"] = streamer
        _check_cache(prepared)
        config = prepared["generation_config"]
        proposer.stopping_criteria = prepared["stopping_criteria"]
        sample: SampleToken = _sample_multinomial if config.do_sample else _argmax
        if coupled is not None:
            if not config.do_sample:
                raise RequestError("coupled requires sampling: pass do_sample=True too", param="coupled")
            noise = coupled.noise(input_ids.shape[1])
            proposer.sampling = SamplingContext(params=_sampling_params_of(config), noise=noise)
            sample = partial(_sample_with_noise, noise)
        if config.do_sample or prepared["logits_processor"]:
            proposer.token_sampler = _TokenSampler(
                prepared["logits_processor"], sample, keep_scores=config.output_scores
            )
            prepared["logits_processor"] = LogitsProcessorList([proposer.token_sampler])
            prepared["generation_config"] = config = copy.copy(config)
            config.do_sample = False
        return GenerationMixin._assisted_decoding(cast(Any, _AssistedModel(model, proposer)), input_ids, **prepared)

    try:
        output = model.generate(input_ids, custom_generate=decode, **_with_stop_criteria(model, generate_kwargs))
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        proposer.read_context(sequence)
    finally:
        proposer.close()
    if learn and cache is not None:
        cache.append(sequence[0].cpu().numpy(), prompt_length=input_ids.shape[1])
    return output


class SuffixCandidateGenerator(CandidateGenerator):  # type: ignore[misc]  # transformers is not typed
    """Provides the draft tokens of transformers' assisted decoding during one call of ``generate``.

    If the drafter raises an exception, decoding continues without a draft.
    """

    def __init__(
        self, drafter: Drafter, cache: NamespaceCache | None, *, prompt_length: int, limit: int, vocab_size: int
    ) -> None:
        """Create a candidate generator; drafts with token ids of ``vocab_size`` or more are discarded."""
        self.num_failures = 0
        self.stopping_criteria = StoppingCriteriaList()  # set by `generate`
        self.sampling: SamplingContext | None = None  # set if noise is shared, so that drafters can know it
        self.allow_caching = False  # whether the generated text may be used in other calls
        self.token_sampler: _TokenSampler | None = None  # None if transformers takes the argmax of the logits
        self._drafter = drafter
        self._cache = cache
        self._prompt_length = prompt_length
        self._limit = limit
        self._vocab_size = vocab_size
        self._request_id = f"generate-{next(_ids)}"
        self._draft = EMPTY_DRAFT
        self._cost_model = CostModel()
        self._drafted_at = 0.0

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return ``input_ids``, int64[1, n], followed by draft tokens, and None for the draft tokens' scores.

        Without scores, transformers samples a token at every position and accepts the draft tokens that are equal.
        """
        context = self.read_context(input_ids)
        try:
            draft = self._propose(context)
            tokens = torch.from_numpy(draft.token_ids.astype(np.int64)).to(input_ids.device)
            candidates = self._cut_before_stop(torch.cat([input_ids, tokens[None]], dim=-1), len(context))
            self._draft = draft.cut(candidates.shape[1] - len(context))
        except Exception:  # a drafter must not fail the request
            self.num_failures += 1
            self._draft, candidates = EMPTY_DRAFT, input_ids
        self._drafted_at = time.perf_counter()
        return candidates, None

    def read_context(self, input_ids: torch.Tensor) -> TokenIds:
        """Return the text so far, int32[n], and advance the sampling noise, which depends on the preceding tokens."""
        context = _on_host(input_ids)
        if self.sampling is not None:
            self.sampling.noise.advance(context)
        return context

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Let the drafter and the cost model learn from the last verification. transformers calls this after each step.

        ``num_matches`` is the number of accepted draft tokens. ``scores``, [1, k, V], receives the processed scores,
        which transformers returns to the caller on request.
        """
        if self.token_sampler is not None:
            self.token_sampler.restore_scores(scores)
        num_positions = len(self._draft.token_ids) + 1
        seconds = time.perf_counter() - self._drafted_at
        self._cost_model.observe(num_positions, int(num_matches) + 1, seconds, is_wide=num_positions > 1)
        try:
            self._drafter.observe([DraftOutcome(self._request_id, self._draft, int(num_matches))])
        except Exception:
            self.num_failures += 1

    def close(self) -> None:
        try:
            self._drafter.finish(self._request_id)
            getattr(self._drafter, "publish", lambda: None)()
        except Exception:
            self.num_failures += 1

    def _cut_before_stop(self, candidates: torch.Tensor, length: int) -> torch.Tensor:
        """Cut a draft before the first token that would end the output.

        transformers checks the stopping criteria only after the last accepted token. So the draft ends one token before
        the token at which the criteria hold, and the model generates that token. The first ``length`` tokens of
        ``candidates`` are the context.
        """
        for size in range(length, candidates.shape[1]):
            if self.stopping_criteria(candidates[:, : size + 1], None).all():
                return candidates[:, :size]
        return candidates

    def _propose(self, context: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Draft:
        token_cost = self._cost_model.token_cost(1)
        request = DraftRequest(
            request_id=self._request_id,
            context=context,
            prompt_length=self._prompt_length,
            snapshot=None if self._cache is None else self._cache.snapshot(),
            learned=None if self._cache is None else self._cache.learned,
            limit=self._limit,
            token_costs=np.array([token_cost]) if token_cost else None,
            sampling=self.sampling,
            allow_caching=self.allow_caching,
        )
        draft = self._drafter.propose([request])[0]
        if ((draft.token_ids < 0) | (draft.token_ids >= self._vocab_size)).any():
            return EMPTY_DRAFT
        if not len(draft.token_ids):
            return draft
        return draft.cut(self._cost_model.num_steps_to_verify(draft.path_probabilities()))


SampleToken = Callable[[torch.Tensor, torch.Tensor], int]
"""A function that samples the token after ``input_ids``, int64[1, n], from its processed scores [1, V]."""


class _TokenSampler(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """A logits processor that samples the next token itself: it sets the scores of all other tokens to -inf.

    It first calls all other logits processors. transformers calls it for every position of a draft, but it does nothing
    at the positions after a rejected draft token. So processors with a state, and the random generator, are used as
    often as in ``model.generate`` without drafts.
    """

    def __init__(self, processors: LogitsProcessorList, sample: SampleToken, *, keep_scores: bool) -> None:
        self._processors, self._sample, self._keep_scores = processors, sample, keep_scores
        self._length = 0
        self._token: int | None = None
        self._scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Return scores that are finite only for the token sampled from ``scores``, [1, V].

        ``input_ids``, int64[1, n], is the text before the position, including draft tokens.
        """
        length = input_ids.shape[1]
        if self._token is not None and (length != self._length + 1 or int(input_ids[0, -1]) != self._token):
            return scores
        scores = self._processors(input_ids, scores)
        if self._keep_scores:
            self._scores.append(scores.clone())
        self._length, self._token = length, self._sample(input_ids, scores)
        one_hot = torch.full_like(scores, float("-inf"))
        one_hot[0, self._token] = 0
        return one_hot

    def restore_scores(self, scores: torch.Tensor) -> None:
        """Replace the one-hot scores of the last step, [1, k, V], by the processed scores for ``output_scores``."""
        for position, row in enumerate(self._scores):
            scores[:, position] = row
        self._scores.clear()


def _argmax(input_ids: torch.Tensor, scores: torch.Tensor) -> int:
    return int(scores.argmax(dim=-1))


def _sample_multinomial(input_ids: torch.Tensor, scores: torch.Tensor) -> int:
    """Sample a token with torch's global random generator, which advances as in ``model.generate``."""
    return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))


def _sample_with_noise(noise: SequenceNoise, input_ids: torch.Tensor, scores: torch.Tensor) -> int:
    return int(argmax_with_noise(scores, noise.keys(_on_host(input_ids)))[0])


def _on_host(input_ids: torch.Tensor) -> TokenIds:
    ids: TokenIds = input_ids[0].to("cpu", torch.int32).numpy()
    return ids


def _sampling_params_of(config: GenerationConfig) -> SamplingParams:
    """Return the parameters of ``generate`` as SSD's sampling parameters, with which a drafter predicts sampled tokens.

    Parameters whose effect depends on the text, such as ``repetition_penalty``, are left out.
    """
    return SamplingParams(
        temperature=min(config.temperature or 1.0, 2.0),
        top_k=config.top_k or 0,
        top_p=config.top_p or 1.0,
        min_p=config.min_p or 0.0,
    )


class _AssistedModel:
    """A proxy of a model whose assisted decoding in transformers uses SSD's drafts; the model itself is not changed."""

    def __init__(self, model: PreTrainedModel, candidates: CandidateGenerator) -> None:
        self._model = model
        self._candidates = candidates

    def _get_candidate_generator(self, **_: Any) -> CandidateGenerator:
        return self._candidates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _with_stop_criteria(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``generate`` with the stop strings replaced by a stopping criterion.

    To create this criterion itself, transformers would need the tokenizer, but it does not pass the tokenizer on if
    ``custom_generate`` is given.
    """
    configs = (kwargs.get("generation_config"), model.generation_config)
    strings = kwargs.get("stop_strings") or next((c.stop_strings for c in configs if c and c.stop_strings), None)
    if not strings or kwargs.get("tokenizer") is None:
        return {**kwargs}
    criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(kwargs["tokenizer"], strings)]
    return {**kwargs, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


def _check_supported(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise RequestError(
            f"input_ids must be one prompt of shape [1, n], got {list(input_ids.shape)}: assisted decoding in "
            "transformers takes one sequence at a time; ssd.Engine takes batches",
            param="input_ids",
        )
    for name in _OTHER_ASSISTANTS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise RequestError(f"{name} makes drafts of its own: omit {name}, or call model.generate", param=name)
    config = kwargs.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        if (kwargs.get(name) or getattr(config, name, None) or 1) != 1:
            raise RequestError(f"{name} must be 1: a draft continues one sequence", param=name)
    if model.config.is_encoder_decoder:
        raise RequestError(
            f"{type(model).__name__} is an encoder-decoder model, which is not supported: call model.generate"
        )
    if getattr(model, "_is_stateful", False):
        raise RequestError(
            f"{type(model).__name__} cannot remove tokens from its state, so it cannot verify drafts: call "
            "model.generate"
        )


def _check_cache(prepared: Mapping[str, Any]) -> None:
    """Raise RequestError if rejected draft tokens cannot be removed from the KV cache that transformers would use."""
    cache = prepared.get("past_key_values")
    if not prepared["use_cache"]:
        found, param = "use_cache=False", "use_cache"
    elif isinstance(cache, StaticCache | QuantizedCache):
        found, param = type(cache).__name__, "cache_implementation"
    else:
        return
    raise RequestError(
        f"with {found}, rejected draft tokens cannot be removed: omit {param} (or past_key_values), or call "
        "model.generate",
        param=param,
    )
