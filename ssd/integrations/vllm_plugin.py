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
from collections.abc import Callable, Sequence
from typing import Any

from ssd.errors import ConfigError
from ssd.integrations.vllm_hooks import (
    LENGTHS,
    SCHEDULER,
    SPECULATOR,
    V1_HOOKS,
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
        log.warning("SSD does not draft for the V2 model runner of this vLLM, nothing was registered: %s",
                    _in_short(lacks))  # fmt: skip
        return
    package = importlib.import_module(SPECULATOR)
    _wrap(package, init_speculator=_make)
    if V2_RUNNER in sys.modules:  # has its own name for it
        sys.modules[V2_RUNNER].init_speculator = package.init_speculator  # type: ignore[attr-defined]
    scheduler = importlib.import_module(SCHEDULER).Scheduler
    if not hasattr(scheduler, _MARK):
        _wrap(scheduler, __init__=_check, _free_request=_note, schedule=_tell)
        setattr(scheduler, _MARK, True)


def watch_v1() -> bool:
    """Tell our drafters about steps and shutdown. Returns whether the runner could be watched."""
    if lacks := missing(V1_HOOKS):
        log.warning("SSD does not draft for the V1 model runner of this vLLM: %s", _in_short(lacks))
        return False
    runner = importlib.import_module(V1_RUNNER).GPUModelRunner
    _watch(runner, "drafter", _update_states=_announce, shutdown=_close)
    return True


def _in_short(lacks: Sequence[str]) -> str:
    return lacks[0] + (f", and {len(lacks) - 1} more" if len(lacks) > 1 else "")


# -- wrappers -------------------------------------------------------------------------------------------------------


def _wrap(owner: Any, **wrappers: Callable[..., Any]) -> None:
    """Put ``wrapper(original, *arguments)`` in the place of functions of ``owner``. Raises AttributeError."""

    def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    made = {name: wrapped(getattr(owner, name), wrapper) for name, wrapper in wrappers.items()}
    for name, function in made.items():
        setattr(owner, name, function)


def _watch(runner: Any, attribute: str, **wrappers: Callable[..., Any]) -> None:
    """`_wrap`, once, methods of a class of runners: ``wrapper(drafter, original, runner, *arguments)`` for those whose
    ``attribute`` is a drafter of ours."""
    from ssd.integrations.vllm_core import VllmDrafter  # numba: late, see above

    def for_ours(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def call(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
            drafter = getattr(runner, attribute, None)
            if not isinstance(drafter, VllmDrafter):
                return original(runner, *args, **kwargs)
            return wrapper(drafter, original, runner, *args, **kwargs)

        return call

    if not hasattr(runner, _MARK):
        _wrap(runner, **{name: for_ours(wrapper) for name, wrapper in wrappers.items()})
        setattr(runner, _MARK, True)


def _make(init: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any) -> Any:
    if not is_asked_for(vllm_config):
        return init(vllm_config, device, req_states)
    from ssd.integrations.vllm_v2 import Speculator  # torch and numba: late, see above

    runner = importlib.import_module(V2_RUNNER).GPUModelRunner
    _watch(runner, "speculator", add_requests=_add, finish_requests=_announce, shutdown=_close)
    return Speculator(vllm_config, device, req_states)


def _add(speculator: Any, add: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    result = add(runner, scheduler_output)
    speculator.on_add(scheduler_output)
    return result


def _announce(
    drafter: Any, step: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    drafter.on_step(runner, scheduler_output)
    return step(runner, scheduler_output, *args, **kwargs)


def _close(drafter: Any, shutdown: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return shutdown(runner, *args, **kwargs)
    finally:
        drafter.close()


def _check(init: Callable[..., Any], scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    if is_asked_for(vllm_config) and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            'vLLM runs its V1 model runner here, and "model": "ssd" is for V2: ask for "method": "custom_class", '
            '"model": "ssd.integrations.vllm.SuffixProposer" instead'
        )
    init(scheduler, vllm_config, *args, **kwargs)


def _note(free: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    scheduler.__dict__.setdefault(LENGTHS, {})[request.request_id] = request.num_tokens
    return free(scheduler, request, *args, **kwargs)


def _tell(schedule: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = schedule(scheduler, *args, **kwargs)
    if lengths := scheduler.__dict__.pop(LENGTHS, None):
        setattr(output, LENGTHS, lengths)
    return output
