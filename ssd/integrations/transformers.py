"""Our drafter in plain ``model.generate``::

    from ssd.integrations.transformers import generate

    with CacheManager(CacheConfig(), TextCodec.load(path).fingerprint) as caches:
        output = generate(model, input_ids, cache=caches.get(), max_new_tokens=128)

transformers verifies the drafts, in its own assisted decoding. Logits processors are called and tokens are drawn as in
``model.generate``: once for each token of the output, in order, and never behind a rejected draft token. So processors
may keep state, and greedy and sampled output is that of ``model.generate``, for a seed too, up to the rounding of
passes of another width.

With ``coupled=CoupledSampling(secret, stream)`` a sampled token is drawn with noise that all calls of one secret and
stream share, see `ssd.drafting.noise`: its law is the same, but a text that was said before comes again where
the same is asked again, and so it is drafted nearly whole. Drafts are judged by that noise too.
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
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, SamplingRow, TokenIds
from ssd.errors import RequestError
from ssd.model.sampling.sampler import argmax_with_noise
from ssd.retrieval.cache_manager import NamespaceCache

_NOT_OURS = ("custom_generate", "assistant_model", "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit")
_ids = itertools.count()
_MOST_WINDOW = 64


@dataclass(frozen=True, slots=True)
class CoupledSampling:
    """Noise to draw with that other calls share; each token has the model's law all the same.

    ``secret`` : any 64 bits; who knows them can foresee the noise. ``stream`` : below 2^32, of the same secret; texts
    of different streams are independent, those of one are alike where the contexts are. ``window`` : tokens before a
    token that its noise depends on, 1 to 64. An engine of ours says the same, up to rounding, where these three are
    those of a request. Raises RequestError for other numbers.
    """

    secret: int
    stream: int = 0
    window: int = WINDOW

    def __post_init__(self) -> None:
        for name, most in (("secret", (1 << 64) - 1), ("stream", (1 << 32) - 1), ("window", _MOST_WINDOW)):
            least = int(name == "window")
            if not least <= getattr(self, name) <= most:
                raise RequestError(f"{name} must be within {least}..{most}, got {getattr(self, name)}", param=name)

    def noise(self, prompt_length: int) -> SequenceNoise:
        """That of one sequence, whose prompt has so many tokens."""
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
    """What ``model.generate(input_ids, **generate_kwargs)`` returns, with drafts of ours.

    ``input_ids`` : int64[1, n]. ``cache`` : drafted from, and unless ``learn`` is False the finished text is appended
    to it; None drafts from the prompt and the output alone. ``drafter`` : to keep what it learned between calls; None
    makes a new one. ``num_speculative_tokens`` : draft limit. ``coupled`` : noise to draw with instead of the global
    generator's. None: as ``model.generate`` does.
    Stopping criteria are asked about drafted text too, without scores: they should look at the text alone.

    Raises RequestError for more than one row, beams, several returned sequences or another assistant, for ``coupled``
    without sampling, for encoder-decoders, for models and KV caches that cannot take tokens back (Mamba and hybrids;
    static and quantized caches, ``use_cache=False``); and whatever ``model.generate`` raises.
    """
    config = DraftConfig(num_speculative_tokens=num_speculative_tokens)
    _check(model, input_ids, generate_kwargs)
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
        if prepared.get("streamer") is None:  # transformers keeps it from functions like this one
            prepared["streamer"] = streamer
        _check_cache(prepared)
        config = prepared["generation_config"]
        proposer.stopping_criteria = prepared["stopping_criteria"]
        choose: Choose = _draw if config.do_sample else _take_best
        if coupled is not None:
            if not config.do_sample:
                raise RequestError("coupled says how tokens are drawn: pass do_sample=True too", param="coupled")
            noise = coupled.noise(input_ids.shape[1])
            proposer.sampling = SamplingRow(params=_params_of(config), noise=noise)
            choose = partial(_draw_with, noise)
        if config.do_sample or prepared["logits_processor"]:
            proposer.choices = _Choices(prepared["logits_processor"], choose, keep_scores=config.output_scores)
            prepared["logits_processor"] = LogitsProcessorList([proposer.choices])
            prepared["generation_config"] = config = copy.copy(config)
            config.do_sample = False
        return GenerationMixin._assisted_decoding(cast(Any, _Assisted(model, proposer)), input_ids, **prepared)

    try:
        output = model.generate(input_ids, custom_generate=decode, **_with_stop_strings(model, generate_kwargs))
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        proposer.note(sequence)
    finally:
        proposer.close()
    if learn and cache is not None:
        cache.append(sequence[0].cpu().numpy(), prompt_length=input_ids.shape[1])
    return output


class SuffixCandidateGenerator(CandidateGenerator):  # type: ignore[misc]  # transformers is not typed
    """Drafts for one sequence; made for each call of ``generate``. A drafter that fails proposes nothing."""

    def __init__(
        self, drafter: Drafter, cache: NamespaceCache | None, *, prompt_length: int, limit: int, vocab_size: int
    ) -> None:
        """``prompt_length`` : tokens of the context that are the prompt. ``limit`` : most tokens of a draft.
        ``vocab_size`` : of the model; a draft with an id beyond it is none."""
        self.num_failures = 0
        self.stopping_criteria = StoppingCriteriaList()
        """What ends the output. transformers asks them about the end of what it accepted and not about what is within
        that, so drafts end one token before they would hold: that one is left to the model."""
        self.sampling: SamplingRow | None = None
        """How tokens are drawn, where drafters can know: with coupled noise."""
        self.allow_caching = False
        """Whether what is said may reach other calls."""
        self.choices: _Choices | None = None
        """The chooser of tokens, if transformers' own argmax of the logits does not choose them."""
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
        """``input_ids``, int64[1, n], with the draft behind it; no scores, so transformers samples and compares."""
        context = self.note(input_ids)
        try:
            draft = self._propose(context)
            tokens = torch.from_numpy(draft.token_ids.astype(np.int64)).to(input_ids.device)
            candidates = self._before_end(torch.cat([input_ids, tokens[None]], dim=-1), len(context))
            self._draft = draft.cut(candidates.shape[1] - len(context))
        except Exception:  # a drafter must not fail the request
            self.num_failures += 1
            self._draft, candidates = EMPTY_DRAFT, input_ids
        self._drafted_at = time.perf_counter()
        return candidates, None

    def note(self, input_ids: torch.Tensor) -> TokenIds:
        """The text so far, of which nothing is taken back: int32[n] of int64[1, n]."""
        context = _on_host(input_ids)
        if self.sampling is not None:
            self.sampling.noise.advance(context)
        return context

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """``input_ids`` : int64[1, m], with what this step gave. ``scores`` : [1, k, V], which transformers returns
        where they are asked for. ``num_matches`` : of the draft, accepted."""
        if self.choices is not None:
            self.choices.restore_scores(scores)
        num_positions = len(self._draft.token_ids) + 1
        seconds = time.perf_counter() - self._drafted_at
        self._cost_model.observe(num_positions, int(num_matches) + 1, seconds, is_wide=num_positions > 1)
        try:
            self._drafter.observe(self._request_id, self._draft, int(num_matches))
        except Exception:
            self.num_failures += 1

    def close(self) -> None:
        """The sequence has ended."""
        try:
            self._drafter.finish(self._request_id)
            getattr(self._drafter, "publish", lambda: None)()
        except Exception:
            self.num_failures += 1

    def _before_end(self, candidates: torch.Tensor, length: int) -> torch.Tensor:
        """int64[1, m], the first ``length`` of them the context, cut before the first drafted one that would end it."""
        for size in range(length, candidates.shape[1]):
            if self.stopping_criteria(candidates[:, : size + 1], None).all():
                return candidates[:, :size]
        return candidates

    def _propose(self, context: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Draft:
        price = self._cost_model.token_cost(1)
        request = DraftRequest(
            request_id=self._request_id,
            context=context,
            prompt_length=self._prompt_length,
            snapshot=None if self._cache is None else self._cache.snapshot(),
            learned=None if self._cache is None else self._cache.learned,
            limit=self._limit,
            token_costs=np.array([price]) if price else None,
            sampling=self.sampling,
            allow_caching=self.allow_caching,
        )
        draft = self._drafter.propose([request])[0]
        if ((draft.token_ids < 0) | (draft.token_ids >= self._vocab_size)).any():
            return EMPTY_DRAFT
        return (
            draft.cut(self._cost_model.best_draft_length(draft.path_probabilities())) if len(draft.token_ids) else draft
        )


Choose = Callable[[torch.Tensor, torch.Tensor], int]
"""Gives the token that follows ``input_ids``, int64[1, n], by the processed scores [1, V]."""


class _Choices(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Takes the place of all processors: calls them and chooses a token, of which alone the score is left finite.

    transformers asks about every position of a draft. One that follows a rejected draft token is passed over, so the
    processors see the calls that ``model.generate`` makes, whatever state they keep and whatever is drafted.
    """

    def __init__(self, processors: LogitsProcessorList, choose: Choose, *, keep_scores: bool) -> None:
        self._processors, self._choose, self._keep_scores = processors, choose, keep_scores
        self._length = 0
        self._token: int | None = None
        self._scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """``input_ids`` : int64[1, n], the text before the position, as far as it is drafted. ``scores`` : [1, V]."""
        length = input_ids.shape[1]
        if self._token is not None and (length != self._length + 1 or int(input_ids[0, -1]) != self._token):
            return scores
        scores = self._processors(input_ids, scores)
        if self._keep_scores:
            self._scores.append(scores.clone())
        self._length, self._token = length, self._choose(input_ids, scores)
        chosen = torch.full_like(scores, float("-inf"))
        chosen[0, self._token] = 0
        return chosen

    def restore_scores(self, scores: torch.Tensor) -> None:
        """Write the processed scores of the pass that has ended into [1, k, V], for who asked for them."""
        for position, row in enumerate(self._scores):
            scores[:, position] = row
        self._scores.clear()


def _take_best(input_ids: torch.Tensor, scores: torch.Tensor) -> int:
    return int(scores.argmax(dim=-1))


def _draw(input_ids: torch.Tensor, scores: torch.Tensor) -> int:
    """Draw as ``model.generate`` does, with as many numbers of the global generator."""
    return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))


def _draw_with(noise: SequenceNoise, input_ids: torch.Tensor, scores: torch.Tensor) -> int:
    return int(argmax_with_noise(scores, noise.keys(_on_host(input_ids)))[0])


def _on_host(input_ids: torch.Tensor) -> TokenIds:
    ids: TokenIds = input_ids[0].to("cpu", torch.int32).numpy()
    return ids


def _params_of(config: GenerationConfig) -> SamplingParams:
    """What a drafter may know of the law: nothing that depends on the text."""
    return SamplingParams(
        temperature=min(config.temperature or 1.0, 2.0),
        top_k=config.top_k or 0,
        top_p=config.top_p or 1.0,
        min_p=config.min_p or 0.0,
    )


class _Assisted:
    """A model as assisted decoding sees it: all its own, but for the candidates. The model itself is not changed."""

    def __init__(self, model: PreTrainedModel, candidates: CandidateGenerator) -> None:
        self._model = model
        self._candidates = candidates

    def _get_candidate_generator(self, **_: Any) -> CandidateGenerator:
        return self._candidates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _with_stop_strings(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Stop strings as a criterion of one's own: a function like ours is not given the tokenizer they are made with."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    strings = kwargs.get("stop_strings") or next((c.stop_strings for c in configs if c and c.stop_strings), None)
    if not strings or kwargs.get("tokenizer") is None:
        return {**kwargs}
    criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(kwargs["tokenizer"], strings)]
    return {**kwargs, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


def _check(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise RequestError(
            f"input_ids must be one prompt of shape [1, n], got {list(input_ids.shape)}: assisted decoding in "
            "transformers takes one sequence at a time; ssd.Engine takes batches",
            param="input_ids",
        )
    for name in _NOT_OURS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise RequestError(f"{name} makes drafts of its own: leave it out, or call model.generate", param=name)
    config = kwargs.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        if (kwargs.get(name) or getattr(config, name, None) or 1) != 1:
            raise RequestError(f"{name} must be 1: a draft continues one sequence", param=name)
    if model.config.is_encoder_decoder:
        raise RequestError(f"{type(model).__name__} is an encoder-decoder: drafts continue the prompt, so it needs one")
    if getattr(model, "_is_stateful", False):
        raise RequestError(f"{type(model).__name__} cannot take tokens back, so it cannot verify drafts")


def _check_cache(prepared: Mapping[str, Any]) -> None:
    """Refuse what transformers is about to decode with where drafts cannot be taken back."""
    cache = prepared.get("past_key_values")
    if not prepared["use_cache"]:
        found, param = "use_cache=False", "use_cache"
    elif isinstance(cache, StaticCache | QuantizedCache):
        found, param = type(cache).__name__, "cache_implementation"
    else:
        return
    raise RequestError(
        f"{found} cannot take drafts back: leave {param} out (or past_key_values), or call model.generate", param=param
    )
