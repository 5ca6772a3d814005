"""One HTTP request's outputs while the engine generates them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram

from server.admission.fair_executor import FairExecutor
from server.admission.quotas import Reservation
from server.base.counting import common_tokens
from server.base.errors import RequestFailed
from server.base.request_record import current_record
from server.running.engine_thread import Inbox, Worker
from server.running.generation_plan import GenerationPlan
from ssd.errors import EngineStopped, RequestError

if TYPE_CHECKING:
    from ssd.config import SamplingParams
    from ssd.engine import Request, RequestOutput, RequestStats, TokenLogprobs


LABELS = ["model_name", "engine"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class Latencies:
    """Prometheus histograms of the choices per request, of each choice's latencies, and of the event loop's delays."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=registry).labels(*labels)

        self.num_choices = histogram(
            "vllm:request_params_n", "The field n of a request that was submitted.", (1, 2, 5, 10, 20)
        )
        text = "From the arrival of a request to the first token of a choice."
        self.time_to_first_token = histogram("vllm:time_to_first_token_seconds", text, _SECONDS)
        text = "From the arrival of a request to the last token of a choice."
        self.end_to_end = histogram("vllm:e2e_request_latency_seconds", text, _SECONDS)
        text = "Mean time per token of a choice after the first."
        self.time_per_output_token = histogram("vllm:request_time_per_output_token_seconds", text, _TOKEN_SECONDS)
        text = "By how much the event loop was late, four times a second."
        self.loop_lag = histogram("ssd:event_loop_lag_seconds", text, _LAG_SECONDS)


_MAX_AT_ONCE = 32
"""The maximum number of waiting outputs that are processed before the event loop gets a chance to run other tasks."""


@dataclass(slots=True)
class ChoiceState:
    """The output of one choice so far, with log-probabilities if requested."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    refusal: RequestError | None = None
    """The error that ended this choice; None if it had no error. Other choices of the request may continue."""
    stats: RequestStats | None = None
    """The engine's statistics of this choice, which the engine keeps updating. None before the first output."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of an HTTP request for the field ``usage``. A prompt counts once for all of its choices.

    Attributes:
        cached_tokens: Prompt tokens that were found in the prefix cache. If a prompt has several choices, the smallest
            number counts.
        accepted_prediction_tokens: Tokens of the prediction that occur in the outputs, see `common_tokens`.
            None: the request had no prediction.
        reasoning_tokens: The reasoning tokens of all choices. None: the model does not reason.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        details = {
            "accepted_prediction_tokens": self.accepted_prediction_tokens,
            "rejected_prediction_tokens": self.rejected_prediction_tokens,
            "reasoning_tokens": self.reasoning_tokens,
        }
        if known := {name: count for name, count in details.items() if count is not None}:
            counts["completion_tokens_details"] = known
        return counts


class Generation:
    """Submits one engine request per choice of an HTTP request and collects the outputs.

    ``close`` must be called in any case; it also releases ``reservation``. If the client wants only the
    log-probabilities of its prompts, one token is generated and dropped. ``aside`` is the thread pool for slow
    functions.
    """

    def __init__(
        self, worker: Worker, latencies: Latencies, plan: GenerationPlan, aside: FairExecutor, reservation: Reservation
    ) -> None:
        # The plan itself is not kept, because the body may be large and a stream may last long.
        self.prompts, self.prediction, self.aside = plan.prompts, plan.prediction, aside
        self._num_prompt_tokens, self._only_scores = plan.num_prompt_tokens, plan.body.only_scores
        self._count_reasoning = plan.answer.count_reasoning
        self.choices: list[ChoiceState] = []
        self.sampling: SamplingParams | None = None
        self._worker, self._latencies, self._reservation = worker, latencies, reservation
        self._inbox = Inbox()
        self._index: dict[str, int] = {}
        self._running: set[str] = set()
        self._record = current_record()
        self._record.response_id, self._record.is_stream = plan.answer_id, plan.body.stream
        self._first_token: dict[str, float] = {}
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._cached: list[list[int]] = [[] for _ in plan.prompts]
        self._num_accepted: int | None = None
        self._num_reasoning: int | None = None

    def submit(self, requests: list[Request]) -> None:
        """Submit all choices to the engine. After an exception, ``close`` cancels the choices already submitted."""
        record, first = self._record, requests[0]
        record.sampling, record.namespace, record.num_choices = first.sampling, first.namespace, len(requests)
        for request in requests:
            self.sampling = request.sampling
            self._worker.submit(request, self._inbox)
            self._index[request.request_id] = len(self.choices)
            self._running.add(request.request_id)
            self.choices.append(ChoiceState())
        self._reservation.mark_accepted()

    def close(self) -> None:
        """Cancel all running choices, so that their slots become free at the next step, and release the reservation."""
        self._note_counts()
        for request_id in self._running:
            self._worker.cancel(request_id)
        self._running.clear()
        not_taken = sum(len(each.token_ids) for each in self._inbox.pop_all() if not isinstance(each, Exception))
        self._reservation.release(self._num_completion_tokens + not_taken)

    def _note_counts(self) -> None:
        record, known = self._record, [choice.stats for choice in self.choices if choice.stats is not None]
        record.finish_reasons = tuple(each.finish_reason for each in self.choices if each.finish_reason is not None)
        record.num_prompt_tokens = self._num_prompt_tokens
        record.num_cached_tokens = self.usage.cached_tokens
        record.num_output_tokens = sum(stats.num_output_tokens for stats in known)
        record.num_steps = sum(stats.num_verify_steps for stats in known)
        record.num_draft_tokens = sum(stats.num_draft_tokens for stats in known)
        record.num_accepted_tokens = sum(stats.num_accepted_tokens for stats in known)
        record.accepted_by_source = sum((Counter(stats.accepted_by_source) for stats in known), Counter[str]())
        record.is_coupled = any(stats.is_coupled for stats in known)
        record.submitted_s = min((stats.submitted_s for stats in known), default=0.0)
        record.started_s = min((stats.started_s for stats in known if stats.started_s), default=0.0)
        record.first_token_s = min((stats.first_token_s for stats in known if stats.first_token_s), default=0.0)
        record.last_token_s = max((stats.last_token_s for stats in known), default=0.0)

    @property
    def usage(self) -> Usage:
        """Return the token counts so far.

        Cached tokens are known when all choices have started, accepted prediction tokens when all choices have ended.
        """
        rejected = None
        if self.prediction is not None and self._num_accepted is not None:
            rejected = len(self.prediction) * len(self.choices) - self._num_accepted
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            cached_tokens=self._num_cached_tokens,
            accepted_prediction_tokens=self._num_accepted,
            rejected_prediction_tokens=rejected,
            reasoning_tokens=self._num_reasoning,
        )

    @property
    def has_more_now(self) -> bool:
        """Whether another output has already arrived, so that it can be sent together with the previous output."""
        return bool(self._running) and len(self._inbox) > 0

    async def outputs(self, wait_s: float | None = None) -> AsyncIterator[tuple[int, RequestOutput] | None]:
        """Yield each new output with the index of its choice, until all choices have ended.

        Yields None after ``wait_s`` seconds without output. Raises the error of a choice that failed.
        """
        num_at_once = 0
        while self._running:
            is_here = len(self._inbox) > 0
            arrived = await self._inbox.get(wait_s)
            if arrived is None:
                yield None
                continue
            num_at_once += is_here
            if is_here and num_at_once % _MAX_AT_ONCE == 0:  # many outputs may wait for a slow client
                await asyncio.sleep(0)
            request_id, delivery = arrived
            if isinstance(delivery, Exception):
                self._running.discard(request_id)
                raise delivery
            if self._only_scores:
                logprobs = None if delivery.logprobs is None else ()
                delivery = replace(delivery, token_ids=(), text="", logprobs=logprobs)
            self._record_output(request_id, delivery)
            yield self._index[request_id], delivery
        refused = [each.refusal for each in self.choices if each.refusal is not None]
        if refused and len(refused) == len(self.choices):
            raise refused[0]
        if (count := self._count_reasoning) is not None:
            self._num_reasoning = await self.aside.run(lambda: sum(count(each.token_ids) for each in self.choices))
        if (prediction := self.prediction) is not None:
            self._num_accepted = await self.aside.run(
                lambda: sum(common_tokens(prediction, each.token_ids) for each in self.choices)
            )

    async def finish(self) -> None:
        async for _ in self.outputs():
            pass

    def _count_cached_tokens(self, index: int, num_tokens: int) -> None:
        per_prompt = len(self.choices) // len(self.prompts)
        cached = self._cached[index // per_prompt]
        cached.append(num_tokens)
        if len(cached) == per_prompt:
            self._num_cached_tokens += min(cached)

    def _record_output(self, request_id: str, output: RequestOutput) -> None:
        index = self._index[request_id]
        choice = self.choices[index]
        if choice.stats is None:
            self._count_cached_tokens(index, output.stats.num_cached_tokens)
        choice.text.append(output.text)
        choice.token_ids.extend(output.token_ids)
        self._num_completion_tokens += len(output.token_ids)
        choice.stats = output.stats
        choice.logprobs.extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            choice.prompt_logprobs = output.prompt_logprobs
        now = time.perf_counter()
        if output.token_ids and request_id not in self._first_token:
            self._first_token[request_id] = now
            self._latencies.time_to_first_token.observe(now - self._record.received_s)
        if output.finish_reason is None:
            return
        self._running.discard(request_id)
        if output.refusal is not None and len(self.choices) == 1:
            raise output.refusal
        choice.refusal = output.refusal
        if output.finish_reason == "error" and output.refusal is None:
            raise RequestFailed(f"this request failed: {output.error}; see the server's log")
        if output.finish_reason == "cancelled":
            raise EngineStopped("the request was cancelled by the server")
        choice.finish_reason = "length" if self._only_scores else str(output.finish_reason)
        choice.stop_reason = None if self._only_scores else output.stop_reason
        self._latencies.end_to_end.observe(now - self._record.received_s)
        if len(choice.token_ids) > 1:
            decoding_s = now - self._first_token[request_id]
            self._latencies.time_per_output_token.observe(decoding_s / (len(choice.token_ids) - 1))
