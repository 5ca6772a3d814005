"""The state of one request in the engine: validation, sampling noise, tokens, stop conditions and text."""

from __future__ import annotations

import hashlib
import hmac
import random
import secrets
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ssd.config import MAX_COUPLED_STREAMS, MAX_SPECULATIVE_TOKENS
from ssd.cost_model.calibration import temperature_bucket_of
from ssd.drafting.noise import SequenceNoise, request_key
from ssd.drafting.protocol import Draft, DraftRequest, SamplingContext
from ssd.drafting.suffix_drafter import RequestState
from ssd.engine.request import FinishReason, Request, RequestOutput, RequestStats, SequenceRecord, VerifiedDraft
from ssd.errors import ContextTooLong, RequestError, quote_value
from ssd.jit.addresses import Records, address
from ssd.model.sampling.sampler import TokenLogprobs, token_logprobs
from ssd.model.sampling.target_tokens import depends_on_prefix, has_only_temperature, sampling_scores
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.namespace import NamespaceLease
from ssd.text.codec import TextCodec
from ssd.text.detokenizer import TextStream
from ssd.text.grammar import GrammarState
from ssd.text.grammar_compiler import GrammarCompiler


class Coupling:
    """Creates the Gumbel noise with which requests are sampled: from the request's seed, or from a shared noise stream.

    Sampling from a shared noise stream is coupled sampling: requests with the same stream and prompt get the same
    answer, so earlier answers can be drafted. Each cache namespace has a secret on which its noise depends, so that
    outputs do not reveal those of other namespaces. Other requests never change an output. Thread-safe.
    """

    def __init__(self, num_streams: int, window: int, root: Callable[[], bytes] | None = None) -> None:
        """Create the source of an engine's sampling noise.

        Args:
            num_streams: The number of noise streams that requests share; with 0, each request has its own noise.
            window: The number of preceding tokens on which the shared noise of a token depends.
            root: A function, called for each request, that returns the secret from which the secrets of the namespaces
                are derived; None draws a secret at random.
        """
        self.num_streams = num_streams
        self._window = window
        drawn = secrets.token_bytes(32)
        self._root = root or (lambda: drawn)

    def warm_up(self) -> None:
        SequenceNoise.seeded_keys([SequenceNoise.seeded(0)], [1], 1)
        if self.num_streams:
            SequenceNoise.coupled(0, 0, self._window).advance(np.zeros(2, np.int32))

    def distinct_streams(self, count: int, seed: int) -> list[int]:
        """Draw the numbers of ``count`` different noise streams, one for each output of a prompt. O(count).

        The numbers are below ``num_streams``, unless the engine has fewer streams than ``count``.
        """
        return random.Random(seed).sample(range(max(self.num_streams, count)), count)

    def make_noise(self, request: Request, seed: int) -> SequenceNoise:
        """Return the sampling noise of a request: from its seed, from a shared noise stream, or its own random noise.

        ``seed`` is a random number that the engine draws for the request. It selects the noise stream if the request
        names none, and seeds the request's own noise if the request has no seed.
        """
        sampling = request.sampling
        if sampling.seed is not None:
            return SequenceNoise.seeded(sampling.seed, request.choice_index)
        if not self.num_streams or sampling.greedy or not sampling.coupled or request.namespace is None:
            return SequenceNoise.seeded(seed, request.choice_index)
        stream = request.noise_stream
        if stream is None:
            stream = request_key(seed, request.choice_index) % self.num_streams
        secret, prompt_length = namespace_secret(self._root(), request.namespace), len(request.prompt_token_ids)
        return SequenceNoise.coupled(secret, stream, self._window, prompt_length=prompt_length)


def namespace_secret(root: bytes, namespace: str) -> int:
    """Derive the secret of a namespace's sampling noise, a 64-bit number, from the secret ``root`` by HMAC (RFC 2104).

    The result reveals neither ``root`` nor the secrets of other namespaces.
    """
    return int.from_bytes(hmac.digest(root, b"noise of " + namespace.encode(), hashlib.sha256)[:8], "little")


class Committed(NamedTuple):
    """The tokens that one forward pass added to a sequence; some of them may not be detokenized yet."""

    token_ids: tuple[int, ...]
    pending_ids: list[int]  # the tokens that are not detokenized yet
    text: str = ""  # the text of the other tokens
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Sequence:
    """A request that the engine has accepted, with its tokens, stop conditions and sampling state.

    After prefill, the KV cache holds all tokens but the last one, which is the first input of the next forward pass.
    """

    def __init__(
        self,
        request: Request,
        *,
        max_length: int,
        eos_token_ids: tuple[int, ...],
        stream: TextStream | None,
        noise: SequenceNoise,
        grammar: GrammarState | None = None,
        namespace: NamespaceLease | None = None,
    ) -> None:
        sampling = request.sampling
        prompt = np.array(request.prompt_token_ids, np.int32)
        self.request = request
        self.namespace = namespace
        self.prediction = np.array(request.prediction_token_ids, np.int32) if request.prediction_token_ids else None
        self.num_prompt_tokens = len(prompt)
        self._memory = Records(SequenceRecord)
        self.row, self.address = self._memory[0], self._memory.address
        max_length_of_request = max_length if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        self.max_length = self.row.end = min(max_length, max_length_of_request)
        # Prompt and output; the first ``num_tokens`` are the context.
        self.tokens: npt.NDArray[np.int32] = np.empty(self.max_length, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.row.tokens, self.row.length = address(self.tokens), len(prompt)
        params = self.row.draft_row.params
        params.context, params.prompt_length = self.row.tokens, len(prompt)
        max_draft_length = request.num_speculative_tokens
        self.row.max_draft_length = MAX_SPECULATIVE_TOKENS if max_draft_length is None else max_draft_length
        self.row.allow_tree, self.row.temperature_bucket = (
            sampling.structured_output is None,
            temperature_bucket_of(sampling.temperature),
        )
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self._is_coupled = noise.is_coupled
        self._stop_ids = np.array(sorted(self.eos_token_ids | self.stop_token_ids), np.int32)
        self.row.stop_ids, self.row.num_stop_ids = address(self._stop_ids), len(self._stop_ids)
        self.sampling = SamplingContext(
            params=sampling,
            noise=noise,
            forbidden_ids=tuple(sorted({*eos_token_ids, *sampling.stop_token_ids})),
        )
        is_free = grammar is None and not depends_on_prefix(sampling)
        # Whether each token is the argmax of the logits, whatever the text is.
        self.is_greedy = sampling.greedy and is_free
        # Whether each token is the argmax of the logits plus the noise of its position, whatever the text is.
        self.is_sampled_by_position = is_free and not noise.is_coupled and has_only_temperature(self.sampling)
        self.slot = -1  # -1 while the sequence waits
        self.queue_key = (0, 0)  # lower keys are admitted first; set by the scheduler
        self.num_preemptions = 0
        self.needs_solo_retry = False  # after a batched pass failed, until the sequence has run alone
        self.allow_prefix_copy = True  # False after copying the KV cache of another slot failed
        self.stats = RequestStats(len(prompt), self.row.counts)
        self.stats.steps = [] if request.record_steps else None
        self.stats.submitted_s, self.stats.is_coupled = time.perf_counter(), noise.is_coupled
        self.draft_request: DraftRequest | None = None  # the request to the drafter, the same object at every step
        self.request_state: RequestState | None = None  # the suffix drafter's state, set before the first draft
        self.draft: VerifiedDraft | None = None  # the draft of the last pass, until its output is made
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self.grammar = grammar
        self.row.uses_fast_path = (
            grammar is None and sampling.logprobs is None and (stream is None or not stream.may_stop)
        )
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._prompt_logprobs_sent = sampling.prompt_logprobs is None

    @property
    def num_tokens(self) -> int:
        return self.row.length

    @property
    def context(self) -> npt.NDArray[np.int32]:
        return self.tokens[: self.num_tokens]

    @property
    def num_remaining(self) -> int:
        return self.max_length - self.num_tokens

    def drop_drafts(self) -> None:
        self.draft_request = self.request_state = None
        self.row.prepared_length = self.row.used_offset = 0

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    def score_prompt(self, logits: torch.Tensor, first: int) -> None:
        """Record the log-probabilities of prompt tokens from the logits of a prefill chunk; chunks must come in order.

        Tokens that were recorded before, e.g. before a failure, are ignored. ``logits``, [n, V], are those after the
        prompt tokens with the indices ``first``, ``first + 1``, ...
        """
        num_top = self.request.sampling.prompt_logprobs
        start = len(self._prompt_logprobs)
        assert num_top is not None and first < start
        following = self.tokens[start : min(first + len(logits) + 1, self.num_prompt_tokens)].tolist()
        self._prompt_logprobs += token_logprobs(logits[start - 1 - first :][: len(following)], following, num_top)

    def advance_noise(self) -> None:
        """Pass the tokens appended since the last call to the shared sampling noise, which depends on preceding tokens.

        Requests with their own noise need no update.
        """
        if self._is_coupled:
            self.sampling.noise.advance(self.context)

    def sampling_context(self, draft: Draft) -> SamplingContext:
        self.advance_noise()
        return self.sampling.with_text(self.context, self.num_prompt_tokens, draft, self.grammar)

    @property
    def needs_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None

    def append_tokens(self, token_ids: list[int], logits: torch.Tensor | None) -> Committed:
        """Append output tokens up to the first one that ends the output; drop the tokens after it.

        The tokens are detokenized here only if stop strings must be searched. Otherwise `make_output`, which must be
        called for each result in order, detokenizes them. ``logits``, [>= n, V] with a row for each token, are needed
        only if ``needs_logprobs``.
        """
        before = self.num_tokens
        emitted: list[int] = []
        pending_ids: list[int] = []
        stop_reason: str | int | None = None
        stopping = self._stream if self._stream is not None and self._stream.may_stop else None
        text: list[str] = []
        hides_ending = not self.request.sampling.include_stop_str_in_output
        for token_id in token_ids:
            emitted.append(token_id)
            self.tokens[self.num_tokens] = token_id
            self.row.length += 1
            if token_id in self.eos_token_ids:
                self.finish_reason = FinishReason.STOP
            elif token_id in self.stop_token_ids:
                self.finish_reason, stop_reason = FinishReason.STOP, token_id
            if self.finish_reason is not None and hides_ending:
                break
            if stopping is None:
                pending_ids.append(token_id)
            else:
                text.append(stopping.push_token(token_id))
                if stopping.stop_hit is not None and self.finish_reason is None:
                    self.finish_reason, stop_reason = FinishReason.STOP, stopping.stop_hit
            if self.finish_reason is None and self.num_remaining == 0:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        if stopping is not None and self.finish_reason is not None:
            text.append(stopping.finish())
            if stop_reason is None and stopping.stop_hit is not None:  # completed by the last flush
                self.finish_reason, stop_reason = FinishReason.STOP, stopping.stop_hit
        self.stats.num_output_tokens += len(emitted)
        logprobs = None
        num_top = self.request.sampling.logprobs
        if num_top is not None:
            assert logits is not None
            if self.request.sampling.drawn_logprobs:
                draft = Draft(self.tokens[before : self.num_tokens - 1])
                logits = sampling_scores(
                    logits, self.sampling.with_text(self.tokens[:before], self.num_prompt_tokens, draft, self.grammar)
                )
            logprobs = token_logprobs(logits, emitted, num_top)
        if self.grammar is not None:
            self.grammar.advance(emitted)
        return Committed(tuple(emitted), pending_ids, "".join(text), self.finish_reason, stop_reason, logprobs)

    def make_output(self, committed: Committed) -> RequestOutput:
        """Detokenize the tokens that a forward pass added, and return them as the output for the client."""
        text, stream = committed.text, self._stream
        if stream is not None and not stream.may_stop:
            text = stream.push(committed.pending_ids)
            if committed.finish_reason is not None:
                text += stream.finish()
        return self._output(committed, text)

    def end(self, reason: FinishReason, error: str | None = None, refusal: RequestError | None = None) -> RequestOutput:
        """End the sequence without another token, e.g. after an error, and return its last output."""
        self.finish_reason, self.row.uses_fast_path = reason, 0
        return self._output(Committed((), [], finish_reason=reason), "", error, refusal)

    def _output(
        self, committed: Committed, text: str, error: str | None = None, refusal: RequestError | None = None
    ) -> RequestOutput:
        prompt_logprobs = None if self._prompt_logprobs_sent else tuple(self._prompt_logprobs)
        self._prompt_logprobs_sent = True
        draft, self.draft = self.draft, None
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=committed.token_ids,
            text=text,
            finish_reason=committed.finish_reason,
            stop_reason=committed.stop_reason,
            error=error,
            refusal=refusal,
            logprobs=committed.logprobs,
            prompt_logprobs=prompt_logprobs,
            draft=draft,
            stats=self.stats,
        )


_MAX_PRIORITY = 100


def open_sequence(
    request: Request,
    *,
    codec: TextCodec | None,
    grammars: GrammarCompiler | None,
    caches: CacheManager | None,
    vocab_size: int,
    adapters: Collection[str],
    max_length: int,
    eos_token_ids: tuple[int, ...],
    noise: SequenceNoise,
    allows_priority: bool,
) -> Sequence:
    """Validate a request and create its sequence.

    Raises:
        RequestError: The request is invalid; the message names the field and the remedy.
    """
    if request.adapter is not None and request.adapter not in adapters:
        raise RequestError(
            f"there is no adapter {quote_value(request.adapter)}: use the name of a loaded adapter, or omit the "
            "adapter",
            param="model",
        )
    _check(
        request,
        vocab_size=vocab_size,
        max_model_len=max_length,
        has_tokenizer=codec is not None,
        allows_priority=allows_priority,
    )
    sampling = request.sampling
    stream = None if codec is None else TextStream.following(codec, sampling, request.prompt_token_ids)
    return Sequence(
        request,
        max_length=max_length,
        eos_token_ids=eos_token_ids,
        stream=stream,
        noise=noise,
        grammar=_grammar_of(request, grammars),
        namespace=_namespace_of(request, caches),
    )


def _check(
    request: Request, *, vocab_size: int, max_model_len: int, has_tokenizer: bool, allows_priority: bool
) -> None:
    sampling = request.sampling
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    if sampling.n != 1:
        raise RequestError(f"n must be 1, got {sampling.n}: submit a request for each output", param="n")
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("prediction", request.prediction_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        *sampling.rules.greatest_ids(),  # precomputed, because every choice of a request is checked
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise RequestError(f"{name} has a token id outside 0..{vocab_size - 1}, the ids of the model", param=name)
    if len(request.prediction_token_ids) > max_model_len:
        raise RequestError(
            f"prediction has {len(request.prediction_token_ids)} tokens, but the model's context has only "
            f"{max_model_len}: shorten it",
            param="prediction",
        )
    room = max_model_len - num_prompt
    if room < (sampling.max_tokens or 1):
        requested = f" and {sampling.max_tokens} to generate" if sampling.max_tokens else ""
        raise ContextTooLong(
            f"this model's maximum context length is {max_model_len} tokens, but the request has "
            f"{num_prompt} prompt tokens{requested}: shorten the prompt or lower max_tokens",
            param="prompt" if room < 1 else "max_tokens",
        )
    stream = request.noise_stream
    if stream is not None and not 0 <= stream < MAX_COUPLED_STREAMS:
        raise RequestError(
            f"noise_stream must be within 0..{MAX_COUPLED_STREAMS - 1}, got {quote_value(stream)}", param="noise_stream"
        )
    if abs(request.priority) > _MAX_PRIORITY:
        raise RequestError(
            f"priority must be within -{_MAX_PRIORITY}..{_MAX_PRIORITY}, got {quote_value(request.priority)}",
            param="priority",
        )
    if request.priority and not allows_priority:
        raise RequestError(
            'priorities are disabled: omit priority, or set the scheduling policy to "priority"',
            param="priority",
        )
    limit = request.num_speculative_tokens
    if limit is not None and not 0 <= limit <= MAX_SPECULATIVE_TOKENS:
        raise RequestError(
            f"num_speculative_tokens must be within 0..{MAX_SPECULATIVE_TOKENS}, got {quote_value(limit)}",
            param="num_speculative_tokens",
        )
    if sampling.stop and not has_tokenizer:
        raise RequestError(
            "stop strings need a tokenizer, but this engine has none: use stop_token_ids instead", param="stop"
        )


def _namespace_of(request: Request, caches: CacheManager | None) -> NamespaceLease | None:
    if caches is None or request.namespace is None:
        return None
    return caches.acquire(request.namespace, request.namespace_policy)


def _grammar_of(request: Request, grammars: GrammarCompiler | None) -> GrammarState | None:
    output = request.sampling.structured_output
    if output is None:
        return None
    if grammars is None:
        raise RequestError(
            f"{output.param} needs a tokenizer, but this engine has none: omit {output.param}", param=output.param
        )
    return grammars.compile(output, request.tenant)
