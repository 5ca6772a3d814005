"""``LLM``: offline inference in Python programs; it owns the model, the drafter and the retrieval cache."""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, EngineConfig, SamplingParams
from ssd.engine.engine import Engine
from ssd.engine.request import FinishReason, Request, RequestOutput, RequestStats
from ssd.errors import CacheLocked, ConfigError, EngineError, QueueFull, RequestError
from ssd.jit.code_cache import kernel_counts
from ssd.model.sampling.sampler import TokenLogprobs
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""A prompt, as text or as token ids."""

_LOG_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the outputs generated for a prompt, as in the OpenAI API.

    Attributes:
        index: The index among the outputs of the prompt.
        text: The generated text.
        token_ids: The generated token ids.
        finish_reason: Why generation ended.
        stop_reason: The stop string or stop token id that ended the output; None for end of text.
        logprobs: The log-probabilities of the tokens; None if they were not requested.
        stats: The numbers of forward passes and draft tokens, and the times of the request.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt with the outputs generated for it.

    Attributes:
        prompt_token_ids: The token ids of the prompt.
        outputs: The ``n`` outputs, see `LLM.generate`.
    """

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def stats(self) -> RequestStats:
        """The statistics of the first output."""
        return self.outputs[0].stats


class LLM:
    """Completes prompts on the calling thread, with speculative decoding: draft tokens are taken from earlier outputs.

    Every output is added to a cache. If a later output repeats cached text, it needs fewer forward passes. The content
    of the cache never changes an output. Not thread-safe. Close the object after use, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | Path = MODEL_PATH,
        *,
        cache_dir: str | Path | None = None,
        warm: Sequence[str | Path] = (),
        learn: bool = True,
        **options: Any,
    ) -> None:
        """Load a model and compile the kernels, which takes a minute or two the first time on a machine.

        In a terminal, the current stage of loading is shown. The argument ``report`` of `Engine.from_pretrained`
        replaces this.

        Args:
            model: A Hugging Face directory or id; the bundled model by default.
            cache_dir: The directory in which the cache is stored; None keeps the cache in memory until the LLM is
                closed. If another process writes to the directory, this process reads the text stored now and keeps new
                text in memory.
            warm: Directories made by ``ssd-cache build`` that are searched for drafts too.
            learn: Whether outputs are added to the cache.
            **options: Fields of `EngineConfig` and further arguments of `Engine.from_pretrained`. Other arguments of
                vLLM's ``LLM`` are accepted with the only value that is supported, e.g. ``tensor_parallel_size=1``.

        Raises:
            ModelError: The model cannot be loaded.
            ConfigError: An argument is invalid.
            CacheError: A directory cannot be used.
        """
        options = _engine_options(options)
        self._learn = learn
        self._numbers = itertools.count()
        self._outputs: dict[str, deque[RequestOutput]] = {}
        self._progress = _Progress([], use_tqdm=False)
        stage = tqdm(desc=f"loading {model}", bar_format="{desc}", leave=False, disable=None)
        with stage, ExitStack() as opened:
            self.codec = TextCodec.load(str(model), options.get("hub"))
            self.caches = opened.enter_context(_open_caches(cache_dir, self.codec))
            for directory in warm:
                self.caches.add_prebuilt_directory(Path(directory))
            options = {"report": stage.set_description_str, **options}
            self.engine = Engine.from_pretrained(model, caches=self.caches, codec=self.codec, **options)
            opened.callback(self.engine.close)
            stage.close()
            _log_if_slow(self.engine.warm_up)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Store the retrieval cache if it has a directory, and free all resources."""
        self._opened.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete all prompts in one batch, and return one `Completion` for each prompt, in order.

        Args:
            prompts: A text, token ids, or a list of texts or lists of token ids.
            sampling_params: The sampling parameters of all prompts, or a list with the parameters of each prompt.
            n: The number of outputs of each prompt; by default that of its sampling parameters.
            use_tqdm: Whether to show a progress bar. It is shown only for several outputs, in a terminal or a notebook.

        Raises:
            RequestError: A prompt or a parameter is invalid; nothing was computed.
        """
        ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._complete(ids, sampling_params, n, continues_prompt=True, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[Completion]:
        """Complete conversations with `generate`, after formatting them with the model's chat template.

        Args:
            messages: A list of messages in the format of the OpenAI API, or a list of such lists.
            sampling_params: The sampling parameters of all conversations, or a list with those of each conversation.
            n: The number of outputs of each conversation, see `generate`.
            use_tqdm: Whether to show a progress bar, see `generate`.
            **template: Further variables of the chat template, e.g. ``tools``.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.codec.encode_chat(each, template_kwargs=template) for each in conversations]
        ids = [tuple(prompt) for prompt in prompts]
        return self._complete(ids, sampling_params, n, continues_prompt=False, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the output of one prompt while it is generated; the request is cancelled if the caller stops iterating.

        Several streams can be read alternately; their prompts are then decoded in one batch.

        Raises:
            RequestError: The prompt or a parameter is invalid. Some errors are detected only when the first output is
                read.
        """
        settings = [_check_sampling(sampling_params)]
        (request,) = self._requests([self._encode(prompt)], settings, [1], continues_prompt=True)

        def start_when_read() -> Iterator[RequestOutput]:  # an unread stream would never be cancelled
            self._submit(request)
            yield from self._stream_outputs(request.request_id)

        return start_when_read()

    def _complete(
        self,
        prompts: list[tuple[int, ...]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int | None,
        *,
        continues_prompt: bool,
        use_tqdm: bool,
    ) -> list[Completion]:
        if isinstance(sampling, Sequence):
            settings = [_check_sampling(each) for each in sampling]
            if len(settings) != len(prompts):
                message = (
                    f"got {len(settings)} SamplingParams for {len(prompts)} prompts: give one for all, or one for each"
                )
                raise RequestError(message, param="sampling_params")
        else:
            settings = [_check_sampling(sampling)] * len(prompts)
        if n is not None and (not isinstance(n, Integral) or n < 1):
            raise RequestError(f"n must be an integer of at least 1, got {n!r}", param="n")
        counts = [each.n if n is None else int(n) for each in settings]
        requests = self._requests(prompts, settings, counts, continues_prompt=continues_prompt)
        choices = list[Choice]()
        with _Progress(requests, use_tqdm=use_tqdm) as self._progress:
            try:
                for request in requests:
                    self._submit(request)
                for request in requests:
                    outputs = list(self._stream_outputs(request.request_id))
                    choices.append(_join_outputs(request.choice_index, outputs))
            except BaseException:
                for request in requests:
                    self._cancel(request.request_id)
                raise
        of_prompts = iter(choices)
        return [
            Completion(prompt, tuple(itertools.islice(of_prompts, count)))
            for prompt, count in zip(prompts, counts, strict=True)
        ]

    def _requests(
        self,
        prompts: list[tuple[int, ...]],
        settings: list[SamplingParams],
        counts: list[int],
        *,
        continues_prompt: bool,
    ) -> list[Request]:

        def streams(count: int) -> Sequence[int | None]:
            is_shared = count > 1 and self.engine.config.coupled_streams
            return self.engine.draw_streams(count) if is_shared else [None] * count

        return [
            Request(
                request_id=f"llm-{next(self._numbers)}",
                prompt_token_ids=prompt,
                sampling=replace(each, n=1, continues_prompt=continues_prompt or each.continues_prompt),
                choice_index=choice,
                noise_stream=stream,
                learn=self._learn,
            )
            for prompt, each, count in zip(prompts, settings, counts, strict=True)
            for choice, stream in enumerate(streams(count))
        ]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.codec.encode_prompt(prompt))
        if not _is_list(prompt) or not all(isinstance(each, Integral) for each in prompt):
            raise RequestError(f"a prompt must be text or token ids, got {type(prompt).__name__}", param="prompts")
        return tuple(int(each) for each in prompt)

    def _submit(self, request: Request) -> None:
        while True:
            try:
                self.engine.submit(request)
            except QueueFull:
                self._step()
            else:
                self._outputs[request.request_id] = deque()
                return

    def _step(self) -> None:
        outputs = self.engine.step()
        self._progress.update(outputs)
        for output in outputs:
            if (queue := self._outputs.get(output.request_id)) is not None:
                queue.append(output)

    def _stream_outputs(self, name: str) -> Iterator[RequestOutput]:
        try:
            while True:
                while not self._outputs[name]:
                    self._step()
                output = self._outputs[name].popleft()
                if output.finish_reason is not None:
                    del self._outputs[name]  # it has ended, so there is nothing to cancel
                if output.refusal is not None:
                    raise output.refusal
                if output.error is not None:
                    raise EngineError(f"a request failed: {output.error}")
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._cancel(name)

    def _cancel(self, name: str) -> None:
        if self._outputs.pop(name, None) is not None:
            self.engine.cancel(name)


class _Progress:
    """A progress bar over the requests of one call of ``generate``, with input and output tokens per second."""

    def __init__(self, requests: Sequence[Request], *, use_tqdm: bool) -> None:
        self._request_ids = {request.request_id for request in requests}
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._started = time.monotonic()
        self._bar = tqdm(
            total=len(requests),
            desc="Processed prompts",
            dynamic_ncols=True,
            miniters=0,
            disable=None if use_tqdm and len(requests) > 1 else True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, outputs: Iterable[RequestOutput]) -> None:
        if self._bar.disable:
            return
        num_ended = 0
        for output in outputs:
            if output.request_id in self._request_ids:
                self._num_output_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    self._num_prompt_tokens += output.stats.num_prompt_tokens
                    num_ended += 1
        seconds = time.monotonic() - self._started
        read, generated = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        self._bar.set_postfix_str(f"est. speed input: {read:.2f} toks/s, output: {generated:.2f} toks/s", refresh=False)
        self._bar.update(num_ended)


_ENGINE_FIELDS = frozenset(each.name for each in fields(EngineConfig))
_ONE_PROCESS = "this library runs a model on one device; for several GPUs, use SSD inside vLLM"
_VLLM_ARGUMENTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), ((1, None), _ONE_PROCESS)
    ),
    "quantization": ((None, "auto"), "omit it, because a quantised checkpoint declares its own quantisation"),
    "kv_cache_dtype": ((None, "auto"), "omit it, because the KV cache always has the model's dtype"),
    "load_format": ((None, "auto", "hf", "safetensors"), "omit it, because transformers reads the weights"),
    "swap_space": ((None, 0), "omit it, because nothing is swapped to main memory"),
    "cpu_offload_gb": ((None, 0), "omit it, because all weights stay on the device"),
    "seed": ((None,), "give each request a seed by SamplingParams(seed=...)"),
    "tokenizer": ((None,), "pass codec=TextCodec.load(TOKENIZER)"),
    "tokenizer_mode": ((None, "auto", "hf"), "omit it, because tokenizers are those of transformers"),
    "revision": ((None,), "pass hub=HubOptions(revision=...) from ssd.text.load_tokenizer"),
    "trust_remote_code": ((None, False), "pass hub=HubOptions(trust_remote_code=True) from ssd.text.load_tokenizer"),
    "speculative_config": ((None,), "pass draft=DraftConfig(...), draft_model=... or draft_head=..."),
    "disable_log_stats": ((None, True, False), ""),
}
"""The arguments of vLLM's ``LLM`` that this project's ``LLM`` accepts only with certain values.

Each entry has these values and a hint for the error message: why no other value is supported, or what to use instead.
"""


def _engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keyword arguments of ``LLM`` to those of `Engine.from_pretrained`, and check them.

    Fields of `EngineConfig` become its argument ``config``. Raises ConfigError for unknown or unsupported arguments.
    """
    known = inspect.signature(Engine.from_pretrained).parameters.keys() - {"model", "caches"}
    found, settings = dict[str, Any](), dict[str, Any]()
    for name, value in options.items():
        if name in known:
            found[name] = value
        elif name in _ENGINE_FIELDS:
            settings[name] = value
        elif name not in _VLLM_ARGUMENTS:
            near = get_close_matches(name, [*known, *_ENGINE_FIELDS, "cache_dir", "warm", "learn"], n=1)
            raise ConfigError(f"LLM has no argument {name}{f': did you mean {near[0]}?' if near else ''}")
        elif value not in _VLLM_ARGUMENTS[name][0]:
            raise ConfigError(f"{name}={value!r} is not supported: {_VLLM_ARGUMENTS[name][1]}")
    if settings:
        found["config"] = replace(found.get("config") or EngineConfig(), **settings)
    return found


def _open_caches(directory: str | Path | None, codec: TextCodec) -> CacheManager:
    if directory is None:
        return CacheManager(CacheConfig(), codec.fingerprint)
    try:
        return CacheManager(CacheConfig(directory=Path(directory)), codec.fingerprint)
    except CacheLocked as error:
        log.warning(
            "%s. This process therefore only reads the cache directory: it drafts from the stored text, but "
            "stores no new text",
            error,
        )
    caches = CacheManager(CacheConfig(), codec.fingerprint)
    try:
        caches.add_prebuilt_directory(Path(directory) / caches.namespace)
    except BaseException:
        caches.close()
        raise
    return caches


def _log_if_slow(work: Callable[[], None]) -> None:

    def log_compilation() -> None:
        if kernel_counts().compiled:
            log.warning("compiling kernels: this takes a minute or two, once per machine and version")

    timer = Timer(_LOG_AFTER_S, log_compilation)
    timer.daemon = True
    timer.start()
    try:
        work()
    finally:
        timer.cancel()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts must be texts or lists of token ids, got {type(prompts).__name__}", param="prompts"
        )
    given: list[Any] = list(prompts)
    return [given] if given and all(isinstance(each, Integral) for each in given) else given


def _is_list(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, Mapping | bytes | bytearray | memoryview)


def _check_sampling(sampling: object) -> SamplingParams:
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        message = f"sampling_params must be a SamplingParams, got {type(sampling).__name__}"
        raise RequestError(message, param="sampling_params")
    return sampling


def _join_outputs(index: int, outputs: list[RequestOutput]) -> Choice:
    last = outputs[-1]
    assert last.finish_reason is not None
    logprobs = [each for output in outputs for each in output.logprobs or ()]
    return Choice(
        index,
        "".join(output.text for output in outputs),
        tuple(token for output in outputs for token in output.token_ids),
        last.finish_reason,
        last.stop_reason,
        tuple(logprobs) if last.logprobs is not None or logprobs else None,
        last.stats,
    )
