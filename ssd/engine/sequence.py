"""One request while the engine works on it, from its checks and its noise to the text that it says."""

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
from ssd.drafting.protocol import Draft, DraftRequest, SamplingRow
from ssd.drafting.suffix_drafter import RequestRow
from ssd.engine.request import FinishReason, Request, RequestOutput, RequestStats, Row, VerifiedDraft
from ssd.errors import ContextTooLong, RequestError, shown
from ssd.jit.addresses import Records, address
from ssd.model.sampling.sampler import TokenLogprobs, token_logprobs
from ssd.model.sampling.target_tokens import depends_on_prefix, has_only_temperature, sampling_scores
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.namespace import NamespaceLease
from ssd.text.codec import TextCodec
from ssd.text.grammar import GrammarState
from ssd.text.grammar_compiler import GrammarCompiler
from ssd.text.stream import TextStream


class Coupling:
    """The noise of an engine's requests: of their seeds, or of ``num_streams`` streams that they share.

    Streams are those of a namespace: what a request says depends on the secret of its namespace, on its stream and on
    its own text, and on nothing that another request said. Safe from any thread.
    """

    def __init__(self, num_streams: int, window: int, root: Callable[[], bytes] | None = None) -> None:
        """``root`` : what the secrets of all namespaces are made of, asked at each request; None: drawn at random."""
        self.num_streams = num_streams
        self._window = window
        drawn = secrets.token_bytes(32)
        self._root = root or (lambda: drawn)

    def warm_up(self) -> None:
        """Compile what asks for noise in a pass, and what only coupled requests run, where there can be any."""
        SequenceNoise.seeded_keys([SequenceNoise.seeded(0)], [1], 1)
        if self.num_streams:
            SequenceNoise.coupled(0, 0, self._window).advance(np.zeros(2, np.int32))

    def different_streams(self, count: int, seed: int) -> list[int]:
        """Streams for ``count`` outputs of one prompt, no two the same; all of the engine's where there are as many.

        ``seed`` : what they are drawn with. O(count).
        """
        return random.Random(seed).sample(range(max(self.num_streams, count)), count)

    def noise_of(self, request: Request, seed: int) -> SequenceNoise:
        """What a request is sampled with. ``seed`` : drawn for it; its stream, too, where it names none."""
        sampling = request.sampling
        if sampling.seed is not None:
            return SequenceNoise.seeded(sampling.seed, request.choice_index)
        if not self.num_streams or sampling.greedy or not sampling.coupled or request.namespace is None:
            return SequenceNoise.seeded(seed, request.choice_index)
        stream = request.noise_stream
        if stream is None:
            stream = request_key(seed, request.choice_index) % self.num_streams
        secret, prompt_length = secret_of(self._root(), request.namespace), len(request.prompt_token_ids)
        return SequenceNoise.coupled(secret, stream, self._window, prompt_length=prompt_length)


def secret_of(root: bytes, namespace: str) -> int:
    """The secret of a namespace: 64 bits that say nothing of the root or of another's (HMAC, RFC 2104)."""
    return int.from_bytes(hmac.digest(root, b"noise of " + namespace.encode(), hashlib.sha256)[:8], "little")


class Committed(NamedTuple):
    """What one pass added to a sequence.

    ``spelled`` : the tokens of which text is still to be made. ``text`` : what was made already. The rest as in
    `RequestOutput`.
    """

    token_ids: tuple[int, ...]
    spelled: list[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Sequence:
    """Prompt, output and everything that decides when the output ends.

    ``tokens[:num_tokens]`` is the context. ``stop_token_ids`` and ``eos_token_ids`` end the output. The slot's KV cache
    holds all of the context but its last token, which the next pass feeds.
    ``slot`` : -1 while it waits. ``turn`` : lower goes first; the scheduler sets it.
    ``noise`` : what it is sampled with. ``grammar`` : at its beginning.
    ``namespace`` : what it is drafted for from and teaches; None where it does neither.
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
        self._memory = Records(Row)
        self.row, self.address = self._memory[0], self._memory.address
        asked = max_length if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        self.max_length = self.row.end = min(max_length, asked)
        self.tokens: npt.NDArray[np.int32] = np.empty(self.max_length, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.row.tokens, self.row.length, self.row.prompt_length = address(self.tokens), len(prompt), len(prompt)
        self.row.drafting.params.context = self.row.tokens
        most = request.num_speculative_tokens
        self.row.most_drafted = MAX_SPECULATIVE_TOKENS if most is None else most
        self.row.may_branch, self.row.kind = (
            sampling.structured_output is None,
            temperature_bucket_of(sampling.temperature),
        )
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self._is_coupled = noise.is_coupled
        self._endings = np.array(sorted(self.eos_token_ids | self.stop_token_ids), np.int32)
        self.row.endings, self.row.num_endings = address(self._endings), len(self._endings)
        self.sampling = SamplingRow(
            params=sampling,
            noise=noise,
            forbidden_ids=tuple(sorted({*eos_token_ids, *sampling.stop_token_ids})),
        )
        is_free = grammar is None and not depends_on_prefix(sampling)
        self.is_plain = sampling.greedy and is_free
        """Whether its tokens are the most probable ones, whatever its text."""
        self.is_drawn_by_position = is_free and not noise.is_coupled and has_only_temperature(self.sampling)
        """Whether its tokens are the most probable ones with noise of their positions, whatever its text."""
        self.slot = -1
        self.turn = (0, 0)
        self.num_preemptions = 0
        self.is_suspect = False
        """It was in a pass that failed, and is yet to be computed alone: only then is it known whose fault that was."""
        self.may_copy = True
        """Whether keys and values of others may be copied: not any more once that failed."""
        self.stats = RequestStats(len(prompt), self.row.counts)
        self.stats.steps = [] if request.keeps_steps else None
        self.stats.submitted_s, self.stats.is_coupled = time.perf_counter(), noise.is_coupled
        self.asking: DraftRequest | None = None
        """What the drafter is asked, the same object at every step."""
        self.kept: RequestRow | None = None
        """What the suffix drafter keeps of it, once it was asked."""
        self.draft: VerifiedDraft | None = None
        """What was drafted for the last pass, until its output is made."""
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self.grammar = grammar
        self.row.is_simple = grammar is None and sampling.logprobs is None and (stream is None or not stream.may_stop)
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._prompt_logprobs_sent = sampling.prompt_logprobs is None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.row.length

    @property
    def context(self) -> npt.NDArray[np.int32]:
        """Prompt and output so far: a view, int32[num_tokens]."""
        return self.tokens[: self.num_tokens]

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - self.num_tokens

    def forget_drafts(self) -> None:
        """Nothing was drafted for it: it is not drafted for any more, or as if it were new."""
        self.asking = self.kept = None
        self.row.prepared_at = self.row.used_begin = 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's passes must be scored, see ``score_prompt``: all of them, from the first token on."""
        return self.request.sampling.prompt_logprobs is not None

    def score_prompt(self, logits: torch.Tensor, first: int) -> None:
        """Note what the model says after prompt tokens ``first``, ``first + 1``, ...: [n, V]. Comes in order.

        What is scored again, because it had to be computed again, changes nothing.
        """
        num_top = self.request.sampling.prompt_logprobs
        start = len(self._prompt_logprobs)
        assert num_top is not None and first < start
        following = self.tokens[start : min(first + len(logits) + 1, self.num_prompt_tokens)].tolist()
        self._prompt_logprobs += token_logprobs(logits[start - 1 - first :][: len(following)], following, num_top)

    def note_context(self) -> None:
        """Have the noise take note of the context: nothing of it is taken back."""
        if self._is_coupled:
            self.sampling.noise.advance(self.context)

    def sampling_row(self, draft: Draft) -> SamplingRow:
        """What choosing this sequence's next tokens needs."""
        self.note_context()
        return self.sampling.with_text(self.context, self.num_prompt_tokens, draft, self.grammar)

    @property
    def asks_logprobs(self) -> bool:
        """Whether `take` needs logits."""
        return self.request.sampling.logprobs is not None

    def take(self, token_ids: list[int], logits: torch.Tensor | None) -> Committed:
        """Append verified tokens up to the first that ends the output; nothing after it is sent, counted or kept.

        logits : [>= n, V], the model's own, row i for token i; may be None where it ``asks_logprobs`` not. Text is made
        here only as far as it may end the output: `output` must follow, for one after the other.
        """
        before = self.num_tokens
        emitted: list[int] = []
        spelled: list[int] = []
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
                spelled.append(token_id)
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
        return Committed(tuple(emitted), spelled, "".join(text), self.finish_reason, stop_reason, logprobs)

    def output(self, taken: Committed) -> RequestOutput:
        """The output of a pass: what was taken, with its text."""
        text, stream = taken.text, self._stream
        if stream is not None and not stream.may_stop:
            text = stream.push(taken.spelled)
            if taken.finish_reason is not None:
                text += stream.finish()
        return self._output(taken, text)

    def end(self, reason: FinishReason, error: str | None = None, refusal: RequestError | None = None) -> RequestOutput:
        """Close the output without another token."""
        self.finish_reason, self.row.is_simple = reason, 0
        return self._output(Committed((), [], finish_reason=reason), "", error, refusal)

    def _output(
        self, taken: Committed, text: str, error: str | None = None, refusal: RequestError | None = None
    ) -> RequestOutput:
        prompt_logprobs = None if self._prompt_logprobs_sent else tuple(self._prompt_logprobs)
        self._prompt_logprobs_sent = True
        draft, self.draft = self.draft, None
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=taken.token_ids,
            text=text,
            finish_reason=taken.finish_reason,
            stop_reason=taken.stop_reason,
            error=error,
            refusal=refusal,
            logprobs=taken.logprobs,
            prompt_logprobs=prompt_logprobs,
            draft=draft,
            stats=self.stats,
        )


_MOST_PRIORITY = 100


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
    takes_priority: bool,
) -> Sequence:
    """The sequence of a request, before its first step.

    Raises RequestError, which names the field and says what to do, where it cannot be served.
    """
    if request.adapter is not None and request.adapter not in adapters:
        raise RequestError(f"there is no adapter {shown(request.adapter)} here", param="model")
    _check(
        request,
        vocab_size=vocab_size,
        max_model_len=max_length,
        has_tokenizer=codec is not None,
        takes_priority=takes_priority,
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


def _check(request: Request, *, vocab_size: int, max_model_len: int, has_tokenizer: bool, takes_priority: bool) -> None:
    sampling = request.sampling
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("prediction", request.prediction_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        *sampling.rules.greatest_ids(),  # at hand, however many there are: each choice of a request is checked
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise RequestError(f"{name} has a token id outside 0..{vocab_size - 1}", param=name)
    if len(request.prediction_token_ids) > max_model_len:
        raise RequestError(
            f"prediction has {len(request.prediction_token_ids)} tokens, and no output has more than {max_model_len}: "
            "shorten it",
            param="prediction",
        )
    room = max_model_len - num_prompt
    if room < (sampling.max_tokens or 1):
        wanted = f" and {sampling.max_tokens} to generate" if sampling.max_tokens else ""
        raise ContextTooLong(
            f"this model's maximum context length is {max_model_len} tokens, but the request has "
            f"{num_prompt} prompt tokens{wanted}: shorten the prompt or lower max_tokens",
            param="prompt" if room < 1 else "max_tokens",
        )
    stream = request.noise_stream
    if stream is not None and not 0 <= stream < MAX_COUPLED_STREAMS:
        raise RequestError(
            f"noise_stream must be within 0..{MAX_COUPLED_STREAMS - 1}, got {shown(stream)}", param="noise_stream"
        )
    if abs(request.priority) > _MOST_PRIORITY:
        raise RequestError(
            f"priority must be within -{_MOST_PRIORITY}..{_MOST_PRIORITY}, got {shown(request.priority)}",
            param="priority",
        )
    if request.priority and not takes_priority:
        raise RequestError(
            'priorities are off here: leave priority out or 0 (the scheduling policy "priority" takes them)',
            param="priority",
        )
    limit = request.num_speculative_tokens
    if limit is not None and not 0 <= limit <= MAX_SPECULATIVE_TOKENS:
        raise RequestError(
            f"num_speculative_tokens must be within 0..{MAX_SPECULATIVE_TOKENS}, got {shown(limit)}",
            param="num_speculative_tokens",
        )
    if sampling.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer", param="stop")


def _namespace_of(request: Request, caches: CacheManager | None) -> NamespaceLease | None:
    if caches is None or request.namespace is None:
        return None
    return caches.acquire(request.namespace, request.namespace_policy)


def _grammar_of(request: Request, grammars: GrammarCompiler | None) -> GrammarState | None:
    output = request.sampling.structured_output
    if output is None:
        return None
    if grammars is None:
        raise RequestError(f"{output.param} needs a tokenizer", param=output.param)
    return grammars.compile(output, request.tenant)
