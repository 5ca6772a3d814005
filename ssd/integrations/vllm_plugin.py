"""Entry point ``vllm.general_plugins``: puts our drafters into vLLM, and wraps what tells them of requests.

vLLM calls ``register`` in each of its processes, before it makes its configuration. All hooks of the V2 model runner
are looked at then (``ssd.integrations.vllm_hooks``), in the sources of the installed vLLM and without importing them;
where one is missing nothing is registered and one line says why. Else four things are wrapped::

    init_speculator              makes our speculator where the speculative model is called "ssd"
    GPUModelRunner (V1, V2)      tells it which requests begin and end, and of the shutdown
    Scheduler                    notes of each request that ends how long the client's answer is
    Scheduler.__init__           refuses "ssd" on the V1 runner, where vLLM's n-gram method would draft instead

Nothing is imported here that imports numba or torch: where numba was imported before a worker begins, vLLM 0.32 fails
on CPUs that Triton is made to run on, in bfloat16 for one.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ssd.errors import ConfigError
from ssd.integrations.vllm_hooks import (
    LENGTHS,
    SCHEDULER,
    SPECULATOR,
    V1_RUNNER,
    V2_HOOKS,
    V2_RUNNER,
    is_asked_for,
    log,
    missing,
)

_MARK = "_ssd_is_watched"
_is_registered = False


def register() -> None:
    """Make ours known to this process's vLLM. May be called many times."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    lacks = missing(V2_HOOKS)
    if lacks:
        log.warning("SSD does not draft for the V2 model runner of this vLLM, nothing was registered: %s%s", lacks[0],
                    f", and {len(lacks) - 1} more" if len(lacks) > 1 else "")  # fmt: skip
        return
    package = importlib.import_module(SPECULATOR)
    package.init_speculator = wrapped = _making(package.init_speculator)  # type: ignore[attr-defined]
    if V2_RUNNER in sys.modules:  # has its own name for it
        sys.modules[V2_RUNNER].init_speculator = wrapped  # type: ignore[attr-defined]
    scheduler = importlib.import_module(SCHEDULER).Scheduler
    if not hasattr(scheduler, _MARK):
        scheduler.__init__ = _checking(scheduler.__init__)
        scheduler._free_request = _noting(scheduler._free_request)
        scheduler.schedule = _telling(scheduler.schedule)
        setattr(scheduler, _MARK, True)


def watch_v1(is_ours: Callable[[object], bool]) -> bool:
    """Tell drafters that ``is_ours`` accepts about steps and shutdown. Returns whether the runner could be watched."""
    try:
        runner = importlib.import_module(V1_RUNNER).GPUModelRunner
        methods = runner._update_states, runner.shutdown
    except (ImportError, AttributeError) as error:
        log.warning("vLLM's model runner cannot be watched, nothing is drafted: %s", error)
        return False
    if not hasattr(runner, _MARK):
        runner._update_states = _announcing(methods[0], "drafter", is_ours)
        runner.shutdown = _closing(methods[1], "drafter", is_ours)
        setattr(runner, _MARK, True)
    return True


# -- wrappers ------------------------------------------------------------------------------------------------------


def _making(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def wrapped(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_asked_for(vllm_config):
            return init(vllm_config, device, req_states)
        from ssd.integrations.vllm_v2 import Speculator  # torch and numba: late, see above

        runner = importlib.import_module(V2_RUNNER).GPUModelRunner
        if not hasattr(runner, _MARK):
            runner.add_requests = _adding(runner.add_requests, Speculator)
            runner.finish_requests = _announcing(runner.finish_requests, "speculator", _is_a(Speculator))
            runner.shutdown = _closing(runner.shutdown, "speculator", _is_a(Speculator))
            setattr(runner, _MARK, True)
        return Speculator(vllm_config, device, req_states)

    return wrapped


def _is_a(kind: type) -> Callable[[object], bool]:
    return lambda drafter: isinstance(drafter, kind)


def _adding(add: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(add)
    def wrapped(runner: Any, scheduler_output: Any) -> Any:
        result = add(runner, scheduler_output)
        speculator = getattr(runner, "speculator", None)
        if isinstance(speculator, kind):
            speculator.on_add(scheduler_output)  # type: ignore[attr-defined]
        return result

    return wrapped


def _announcing(step: Callable[..., Any], name: str, is_ours: Callable[[object], bool]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter: Any = getattr(runner, name, None)
        if is_ours(drafter):
            drafter.on_step(runner, scheduler_output)
        return step(runner, scheduler_output, *args, **kwargs)

    return wrapped


def _closing(shutdown: Callable[..., Any], name: str, is_ours: Callable[[object], bool]) -> Callable[..., Any]:
    @functools.wraps(shutdown)
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        drafter: Any = getattr(runner, name, None)
        try:
            return shutdown(runner, *args, **kwargs)
        finally:
            if is_ours(drafter):
                drafter.close()

    return wrapped


def _checking(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def wrapped(scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if is_asked_for(vllm_config) and not vllm_config.use_v2_model_runner:
            raise ConfigError(
                'vLLM runs its V1 model runner here, and "model": "ssd" is for V2: ask for "method": "custom_class", '
                '"model": "ssd.integrations.vllm.SuffixProposer" instead'
            )
        init(scheduler, vllm_config, *args, **kwargs)

    return wrapped


def _noting(free: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(free)
    def wrapped(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.__dict__.setdefault(LENGTHS, {})[request.request_id] = request.num_tokens
        return free(scheduler, request, *args, **kwargs)

    return wrapped


def _telling(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def wrapped(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        if lengths := scheduler.__dict__.pop(LENGTHS, None):
            setattr(output, LENGTHS, lengths)
        return output

    return wrapped
