"""Engines that fail, or say what they are told, for what the real one cannot be made to do; a server around any."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import uvicorn

from server.admission.connections import protocol_within
from server.admission.registry import Tenants
from server.admission.tenant_loader import open_tenants
from server.base.settings import ServerSettings
from server.command.listen import listen, tls_arguments
from server.command.options import NetworkOptions
from server.endpoints.app import create_app
from server.observe.access import SpanSink
from server.observe.metrics import NamespaceStats
from server.running.engine_thread import Worker, WorkerState
from ssd.config import EngineConfig
from ssd.engine import EngineMetrics, FinishReason, Request, RequestOutput, RequestStats
from ssd.engine.speculation import SpeculationStatus
from ssd.errors import ContextTooLong, EngineStopped, QueueFull, RequestError
from ssd.model.target import BatchInvariance
from ssd.text.chat_template import ChatTemplate
from tests.waiting import PATIENCE_S, START_S, wait_until


class CharCodec:
    """One token per character."""

    vocab_size = 0x110000
    special_ids = frozenset[int]()
    pieces: Mapping[tuple[int, int], tuple[str, str]] = {}

    def encode_prompt(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    encode_completion = encode_prompt

    def encode_chat(self, messages: list[dict[str, Any]], **_options: Any) -> list[int]:
        return self.encode_prompt("".join(message["content"] for message in messages))

    def chat_template(self, given: str | None = None, **_options: Any) -> str | None:
        return given

    @lru_cache  # noqa: B019  # as the real one: a template that is asked again is the same object
    def template(self, **_options: Any) -> ChatTemplate | None:
        source = self.chat_template()
        return None if source is None else ChatTemplate(source, apply_to_nothing)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def apply_to_nothing(*_messages: Any, **_options: Any) -> str:
    """A template that refuses everything, so that its source decides what it is taken for."""
    raise ValueError("no such template")


class FailingEngine:
    """Answers with the prompt reversed, one token a step; fails, dawdles or fills up as told."""

    def __init__(self, *, step_s: float = 0.0, max_waiting: int = 100, fail_at_step: int | None = None) -> None:
        self.codec = CharCodec()
        self.width = 1
        self.max_model_len = 512
        self.target = SimpleNamespace(
            backend="in tests", can_roll_back=True, num_slots=4, batch_invariance=BatchInvariance()
        )
        self.config = EngineConfig()
        self.metrics = EngineMetrics()
        self.caches = None
        self.closed = False
        self.is_drafting = self.is_speculating = True
        self.speculation = SpeculationStatus(True, "in tests")
        self.warm_up_gate: threading.Event | None = None
        self.load_error: Exception | None = None
        self._step_s, self._max_waiting, self._fail_at_step = step_s, max_waiting, fail_at_step
        self._work = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[str, tuple[Request, RequestStats]] = {}
        self._cancelled: set[str] = set()
        self._num_steps = 0
        self.num_cancelled = 0
        """Requests that ended because somebody asked for it."""

    def submit(self, request: Request) -> None:
        limit = request.sampling.max_tokens or 1
        if len(request.prompt_token_ids) + limit > self.max_model_len:
            raise ContextTooLong("too long", param="prompt")
        with self._lock:
            if self.closed:
                raise EngineStopped("closed")
            if len(self._running) >= self._max_waiting:
                raise QueueFull(f"{self._max_waiting} requests are waiting already: try again later")
            self._running[request.request_id] = (request, RequestStats(len(request.prompt_token_ids)))
        self._work.set()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._cancelled.add(request_id)
        self._work.set()

    def has_work(self) -> bool:
        return bool(self._running)

    def wait_for_work(self, timeout_s: float) -> bool:
        if not self.has_work():
            self._work.wait(timeout_s)
        self._work.clear()
        return self.has_work()

    def step(self) -> list[RequestOutput]:
        self._num_steps += 1
        if self._num_steps == self._fail_at_step:
            raise RuntimeError("injected")
        time.sleep(self._step_s)
        outputs = []
        with self._lock:
            for request_id, (request, stats) in list(self._running.items()):
                outputs.append(output := self._advance(request, stats))
                if output.finish_reason is not None:
                    self.num_cancelled += output.finish_reason is FinishReason.CANCELLED
                    del self._running[request_id]
            self.metrics.num_running = len(self._running)
        return outputs

    def _answer(self, prompt: Sequence[int], most: int | None) -> tuple[Sequence[int], FinishReason]:
        """All that is said of at most so many tokens, and why it ends."""
        return [prompt[-1 - number % len(prompt)] for number in range(most or len(prompt))], FinishReason.LENGTH

    def _advance(self, request: Request, stats: RequestStats) -> RequestOutput:
        said, reason = self._answer(request.prompt_token_ids, request.sampling.max_tokens)
        is_cancelled = request.request_id in self._cancelled
        token_ids = () if is_cancelled else tuple(said[stats.num_output_tokens :][: self.width])
        stats.num_output_tokens += len(token_ids)
        is_whole = stats.num_output_tokens == len(said)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            text="".join(map(chr, token_ids)),
            finish_reason=FinishReason.CANCELLED if is_cancelled else reason if is_whole else None,
            stats=stats,
        )

    def relative_pass_cost(self, width: int) -> float:
        """What a pass of ``width`` tokens costs: as many passes."""
        return float(width)

    def calibrate(self) -> None:
        """Nothing is timed."""

    def warm_up(self, patience_s: float | None = None) -> None:
        if self.warm_up_gate is not None:
            assert self.warm_up_gate.wait(PATIENCE_S)
        if self.load_error is not None:
            raise self.load_error

    def close(self) -> None:
        self.closed = True


class RefusingEngine(FailingEngine):
    """Cannot follow some choices behind their first token, as where a grammar comes to a dead end."""

    def __init__(self, refused: Collection[int]) -> None:
        super().__init__()
        self.refused = refused

    def _advance(self, request: Request, stats: RequestStats) -> RequestOutput:
        if request.choice_index not in self.refused or not stats.num_output_tokens:
            return super()._advance(request, stats)
        refusal = RequestError("response_format came to a dead end after 1 tokens", param="response_format")
        return RequestOutput(
            request_id=request.request_id,
            token_ids=(),
            text="",
            finish_reason=FinishReason.ERROR,
            refusal=refusal,
            stats=stats,
        )


class SayingCodec(CharCodec):
    """Its prompt is the last message alone."""

    added_tokens: Mapping[str, int] = {}

    def __init__(self, template: str) -> None:
        self._template = template

    def chat_template(self, given: str | None = None, **_options: Any) -> str | None:
        return given or self._template

    def encode_chat(self, messages: list[dict[str, Any]], **_options: Any) -> list[int]:
        return self.encode_prompt(messages[-1]["content"])


class SayingEngine(FailingEngine):
    """Says the prompt, three tokens a step, and ends."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.codec = SayingCodec(template)
        self.width = 3

    def _answer(self, prompt: Sequence[int], most: int | None) -> tuple[Sequence[int], FinishReason]:
        said = prompt[:most]
        return said, FinishReason.LENGTH if len(said) < len(prompt) else FinishReason.STOP


class RunningServer:
    """A worker, and a real server on a real port in front of it."""

    def __init__(self, engine_thread: Worker, port: int, connections: Collection[object]) -> None:
        self.engine_thread = engine_thread
        self._connections = connections
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @property
    def has_connections(self) -> bool:
        """Whether anybody is connected."""
        return bool(self._connections)

    def wait_until(self, state: WorkerState, timeout_s: float = START_S) -> None:
        """Wait for a state; raises what went wrong if the engine cannot be loaded instead."""
        wait_until(lambda: self.engine_thread.state is state or self.engine_thread.load_error is not None, timeout_s)
        if self.engine_thread.state is not state and self.engine_thread.load_error is not None:
            raise self.engine_thread.load_error


@contextmanager
def serving(
    load: Callable[[ExitStack], Any],
    *,
    wait: bool = True,
    sharing_stats: NamespaceStats = dict,
    tenants: Tenants | None = None,
    api_keys: tuple[str, ...] = (),
    span: SpanSink | None = None,
    network: NetworkOptions | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve whatever ``load`` returns; the arguments are those of ServerSettings. ``network`` : else a free port.

    ``api_keys`` : each a tenant of its own, where no ``tenants`` are given.
    """
    given: dict[str, Any] = {"model_names": ("test-model",), "model": "a/model", **settings}
    worker = Worker(load)
    server_settings = ServerSettings(**given)
    if tenants is None:
        tenants = open_tenants(server_settings, secrets.token_bytes(32), keys=api_keys)
    app = create_app(worker, server_settings, tenants, sharing_stats, span)
    listener = socket.create_server(("127.0.0.1", 0)) if network is None else listen(network)
    # What an answer may leave in the system's hands before the server notices that nobody reads.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    tls = {} if network is None else tls_arguments(network)
    protocol = protocol_within(server_settings.limits)
    config = uvicorn.Config(app, http=protocol, log_config=None, access_log=False, timeout_graceful_shutdown=3, **tls)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    port = listener.getsockname()[1] if listener.family != socket.AF_UNIX else 0
    running = RunningServer(worker, port, server.server_state.connections)
    worker.start()
    thread.start()
    try:
        if wait:
            running.wait_until(WorkerState.READY)
            wait_until(lambda: worker.loaded_engine is None or worker.loaded_engine.is_drafting, START_S)
        yield running
    finally:
        server.should_exit = True
        thread.join(20)
        assert worker.stop(20)
