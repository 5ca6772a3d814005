"""The plugin entry point ``vllm.general_plugins``: installs SSD's drafters in vLLM and wraps the methods they need.

vLLM calls ``register`` in each of its processes, before the configuration is created. ``register`` checks in the source
files of the installed vLLM, without importing them, that they have all functions that the drafter for the V2 model
runner needs (``ssd.integrations.vllm_hooks``). If one is missing, nothing is registered, and a log line states the
reason. Otherwise these functions are wrapped::

    init_speculator              creates SSD's speculator if the speculative model is "ssd"
    GPUModelRunner (V1, V2)      notifies the speculator of new and finished requests and of the shutdown
    Scheduler                    records the number of tokens of each finished request's answer
    Scheduler.__init__           rejects "ssd" on the V1 runner, which would run vLLM's n-gram method instead

Nothing here imports numba or torch: if numba was imported before a worker starts, vLLM 0.32 fails on CPUs on which
Triton is used, e.g. with bfloat16.
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
    log,
    missing_hooks,
    selects_ssd,
)

_WRAPPED_MARK = "_ssd_is_watched"
_is_registered = False


def register() -> None:
    """Install SSD's drafters in vLLM, in this process; further calls do nothing.

    vLLM calls this function, the entry point of the plug-in, in each of its processes.
    """
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    missing = missing_hooks(V2_HOOKS)
    if missing:
        log.warning(
            "SSD does not support the V2 model runner of the installed vLLM: %s. vLLM's own n-gram method "
            "drafts instead",
            _summarise(missing),
        )
        return
    package = importlib.import_module(SPECULATOR)
    _wrap(package, init_speculator=_init_speculator)
    if V2_RUNNER in sys.modules:  # the runner has imported the original function
        sys.modules[V2_RUNNER].init_speculator = package.init_speculator  # type: ignore[attr-defined]
    scheduler = importlib.import_module(SCHEDULER).Scheduler
    if not hasattr(scheduler, _WRAPPED_MARK):
        _wrap(scheduler, __init__=_refuse_v1_runner, _free_request=_record_length, schedule=_attach_lengths)
        setattr(scheduler, _WRAPPED_MARK, True)


def wrap_v1_runner() -> bool:
    """Wrap methods of vLLM's V1 model runner, so that SSD's drafter learns which requests have finished.

    Returns False, and logs a warning, if the installed vLLM lacks one of the methods.
    """
    if missing := missing_hooks(V1_HOOKS):
        log.warning(
            "SSD does not support the V1 model runner of the installed vLLM: %s. Requests are served without drafts",
            _summarise(missing),
        )
        return False
    runner = importlib.import_module(V1_RUNNER).GPUModelRunner
    _wrap_runner(runner, "drafter", _update_states=_notify_finished, shutdown=_close)
    return True


def _summarise(missing: Sequence[str]) -> str:
    return missing[0] + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")


# -- wrappers -------------------------------------------------------------------------------------------------------


def _wrap(owner: Any, **wrappers: Callable[..., Any]) -> None:
    """Replace functions of a class or module by functions that call ``wrapper(original, *arguments)``.

    Raises:
        AttributeError: The class or module lacks a function; nothing was replaced.
    """

    def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    made = {name: wrapped(getattr(owner, name), wrapper) for name, wrapper in wrappers.items()}
    for name, function in made.items():
        setattr(owner, name, function)


def _wrap_runner(runner: Any, attribute: str, **wrappers: Callable[..., Any]) -> None:
    """Wrap methods of a vLLM runner class so that they notify SSD's drafter. A second call for a class does nothing.

    ``attribute`` is the name of the attribute in which a runner keeps its drafter. If it is one of SSD's drafters, a
    wrapped method calls ``wrapper(drafter, original, runner, *arguments)``, and otherwise the original method.
    """
    from ssd.integrations.vllm_core import VllmDrafter  # imported late because of numba, see above

    def for_ssd_runner(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def call(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
            drafter = getattr(runner, attribute, None)
            if not isinstance(drafter, VllmDrafter):
                return original(runner, *args, **kwargs)
            return wrapper(drafter, original, runner, *args, **kwargs)

        return call

    if not hasattr(runner, _WRAPPED_MARK):
        _wrap(runner, **{name: for_ssd_runner(wrapper) for name, wrapper in wrappers.items()})
        setattr(runner, _WRAPPED_MARK, True)


def _init_speculator(init: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any) -> Any:
    if not selects_ssd(vllm_config):
        return init(vllm_config, device, req_states)
    from ssd.integrations.vllm_v2 import Speculator  # imported late because of torch and numba, see above

    runner = importlib.import_module(V2_RUNNER).GPUModelRunner
    _wrap_runner(runner, "speculator", add_requests=_notify_added, finish_requests=_notify_finished, shutdown=_close)
    return Speculator(vllm_config, device, req_states)


def _notify_added(speculator: Any, add: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    result = add(runner, scheduler_output)
    speculator.on_add(scheduler_output)
    return result


def _notify_finished(
    drafter: Any, step: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    drafter.on_finished(runner, scheduler_output)
    return step(runner, scheduler_output, *args, **kwargs)


def _close(drafter: Any, shutdown: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return shutdown(runner, *args, **kwargs)
    finally:
        drafter.close()


def _refuse_v1_runner(init: Callable[..., Any], scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    if selects_ssd(vllm_config) and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            'vLLM uses its V1 model runner, but "model": "ssd" requires the V2 model runner: set "method": '
            '"custom_class" and "model": "ssd.integrations.vllm.SuffixProposer" instead'
        )
    init(scheduler, vllm_config, *args, **kwargs)


def _record_length(free: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    scheduler.__dict__.setdefault(LENGTHS, {})[request.request_id] = request.num_tokens
    return free(scheduler, request, *args, **kwargs)


def _attach_lengths(schedule: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = schedule(scheduler, *args, **kwargs)
    if lengths := scheduler.__dict__.pop(LENGTHS, None):
        setattr(output, LENGTHS, lengths)
    return output
