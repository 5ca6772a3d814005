"""``LLM``: a model, its drafts and its cache in one object, for programs that want text from prompts."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, SamplingParams
from ssd.engine.engine import Engine
from ssd.engine.request import FinishReason, Request, RequestOutput, RequestStats
from ssd.errors import CacheLocked, EngineError, QueueFull, RequestError
from ssd.jit.code_cache import kernel_counts
from ssd.model.sampling.sampler import TokenLogprobs
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""Text, or token ids."""

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One output of a prompt. ``stats`` : its passes, drafts and times."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt was answered. ``outputs`` : as many as were asked for; ``text``, ``stats`` : of the first."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """Of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first output."""
        return self.outputs[0].token_ids

    @property
    def stats(self) -> RequestStats:
        """Of the first output."""
        return self.outputs[0].stats


class LLM:
    """Completes prompts on the calling thread, and learns from every answer: what comes again takes fewer passes.

    Outputs never depend on what was learned. Not thread-safe. Close it, or use it as a context manager.
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
        """``model`` : a Hugging Face directory or id; the bundled one where none is given.

        ``cache_dir`` : keeps what is learned; None: in memory, until it is closed. Where another process writes to the
        directory, this one drafts from what is there now and keeps what it learns itself in memory. ``warm`` :
        directories of ``ssd-cache build`` to draft from as well. ``learn`` : whether answers are learned from.
        ``options`` : further arguments of `Engine.from_pretrained`. Kernels are compiled once on each machine, for a
        minute or so. A terminal shows the current stage of the load, unless ``report`` is given.
        Raises ModelError, ConfigError, and CacheError for a directory that cannot be used.
        """
        self._learn = learn
        self._numbers = itertools.count()
        self._arrived: dict[str, deque[RequestOutput]] = {}
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
            _said_if_long(self.engine.warm_up)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Keep what was learned, where there is a directory, and free everything."""
        self._opened.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *, n: int = 1, use_tqdm: bool = True,
    ) -> list[Completion]:  # fmt: skip
        """One `Completion` a prompt, in order; all are decoded together.

        ``prompts`` : a text, token ids, or a list of either. ``sampling`` : for all, or one for each. ``n`` : outputs
        of each prompt. ``use_tqdm`` : show a progress bar if several outputs are requested and stderr is a terminal, or
        in a notebook.
        Raises RequestError for a prompt or a setting that cannot be used, with nothing computed.
        """
        ids = [self._ids_of(prompt) for prompt in _as_list(prompts)]
        return self._complete(ids, sampling, n, goes_on=True, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[Completion]:
        """As `generate`, for a conversation as OpenAI's API has it, or a list of them, by the model's chat template.

        ``template`` : further variables of the template, ``tools`` among them.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.codec.encode_chat(each, template_kwargs=template) for each in conversations]
        ids = [tuple(prompt) for prompt in prompts]
        return self._complete(ids, sampling, n, goes_on=False, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The pieces of one prompt's output as they come; one that is begun and not read to its end is cancelled.

        Several may be read by turns: they are decoded together. Raises RequestError, at the first piece where the
        engine refuses it.
        """
        (request,) = self._requests([self._ids_of(prompt)], [_settings(sampling)], 1, goes_on=True)

        def begun() -> Iterator[RequestOutput]:  # not before it is read: nobody would cancel it
            self._submit(request)
            yield from self._pieces(request.request_id)

        return begun()

    def _complete(
        self, prompts: list[tuple[int, ...]], sampling: SamplingParams | Sequence[SamplingParams] | None, n: int,
        *, goes_on: bool, use_tqdm: bool,
    ) -> list[Completion]:  # fmt: skip
        if isinstance(sampling, Sequence):
            settings = [_settings(each) for each in sampling]
            if len(settings) != len(prompts):
                raise RequestError(f"{len(settings)} sampling settings for {len(prompts)} prompts", param="sampling")
        else:
            settings = [_settings(sampling)] * len(prompts)
        if not isinstance(n, Integral) or n < 1:
            raise RequestError(f"n must be a whole number from 1 on, got {n!r}", param="n")
        requests = self._requests(prompts, settings, int(n), goes_on=goes_on)
        names, said = [request.request_id for request in requests], list[Choice]()
        with _Progress(requests, use_tqdm=use_tqdm) as self._progress:
            try:
                for request in requests:
                    self._submit(request)
                for place, name in enumerate(names):
                    said.append(_joined(place % n, list(self._pieces(name))))
            except BaseException:
                for name in names:
                    self._drop(name)
                raise
        return [Completion(prompt, tuple(said[n * place : n * place + n])) for place, prompt in enumerate(prompts)]

    def _requests(
        self, prompts: list[tuple[int, ...]], settings: list[SamplingParams], n: int, *, goes_on: bool
    ) -> list[Request]:
        """``goes_on`` : outputs continue the prompts' text."""
        is_shared = n > 1 and self.engine.config.coupled_streams
        return [
            Request(
                request_id=f"llm-{next(self._numbers)}",
                prompt_token_ids=prompt,
                sampling=replace(each, continues_prompt=True) if goes_on else each,
                choice_index=choice,
                noise_stream=stream,
                learn=self._learn,
            )
            for prompt, each in zip(prompts, settings, strict=True)
            for choice, stream in enumerate(self.engine.draw_streams(n) if is_shared else [None] * n)
        ]

    def _ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.codec.encode_prompt(prompt))
        if not _is_list(prompt) or not all(isinstance(each, Integral) for each in prompt):
            raise RequestError(f"a prompt is text or token ids, got {type(prompt).__name__}", param="prompts")
        return tuple(int(each) for each in prompt)

    def _submit(self, request: Request) -> None:
        while True:
            try:
                self.engine.submit(request)
            except QueueFull:
                self._step()
            else:
                self._arrived[request.request_id] = deque()
                return

    def _step(self) -> None:
        outputs = self.engine.step()
        self._progress.update(outputs)
        for output in outputs:
            if (arrived := self._arrived.get(output.request_id)) is not None:
                arrived.append(output)

    def _pieces(self, name: str) -> Iterator[RequestOutput]:
        try:
            while True:
                while not self._arrived[name]:
                    self._step()
                output = self._arrived[name].popleft()
                if output.finish_reason is not None:
                    del self._arrived[name]  # it has ended: there is nothing to cancel
                if output.refusal is not None:
                    raise output.refusal
                if output.error is not None:
                    raise EngineError(f"a request failed: {output.error}")
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if self._arrived.pop(name, None) is not None:
            self.engine.cancel(name)


class _Progress:
    """A progress bar for the requests of one call, with the tokens per second of their prompts and outputs."""

    def __init__(self, requests: Sequence[Request], *, use_tqdm: bool) -> None:
        self._request_ids = {request.request_id for request in requests}
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._began = time.monotonic()
        self._bar = tqdm(
            total=len(requests), desc="Processed prompts", dynamic_ncols=True, miniters=0,
            disable=None if use_tqdm and len(requests) > 1 else True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, outputs: Iterable[RequestOutput]) -> None:
        """Count the outputs of one step, and redraw the bar if a tenth of a second has passed since it was drawn."""
        if self._bar.disable:
            return
        num_ended = 0
        for output in outputs:
            if output.request_id in self._request_ids:
                self._num_output_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    self._num_prompt_tokens += output.stats.num_prompt_tokens
                    num_ended += 1
        seconds = time.monotonic() - self._began
        read, generated = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        self._bar.set_postfix_str(f"est. speed input: {read:.2f} toks/s, output: {generated:.2f} toks/s", refresh=False)
        self._bar.update(num_ended)


def _open_caches(directory: str | Path | None, codec: TextCodec) -> CacheManager:
    if directory is None:
        return CacheManager(CacheConfig(), codec.fingerprint)
    try:
        return CacheManager(CacheConfig(directory=Path(directory)), codec.fingerprint)
    except CacheLocked as error:
        log.warning("%s. This process drafts from the text that is there now, but what it learns is not kept", error)
    caches = CacheManager(CacheConfig(), codec.fingerprint)
    try:
        caches.add_prebuilt_directory(Path(directory) / caches.namespace)
    except BaseException:
        caches.close()
        raise
    return caches


def _said_if_long(work: Callable[[], None]) -> None:
    """Do the work; log that kernels are being compiled if they are and it takes long."""

    def say() -> None:
        if kernel_counts().compiled:
            log.warning("compiling kernels, once on each machine and version: a minute or two")

    timer = Timer(_PATIENCE_S, say)
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
        raise RequestError(f"prompts are text or token ids, got {type(prompts).__name__}", param="prompts")
    given: list[Any] = list(prompts)
    return [given] if given and all(isinstance(each, Integral) for each in given) else given


def _is_list(given: object) -> bool:
    """Of whatever kind; the keys of an object and the bytes of a text are no prompt."""
    return isinstance(given, Iterable) and not isinstance(given, Mapping | bytes | bytearray | memoryview)


def _settings(sampling: object) -> SamplingParams:
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling is a SamplingParams, got {type(sampling).__name__}", param="sampling")
    return sampling


def _joined(index: int, outputs: list[RequestOutput]) -> Choice:
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
