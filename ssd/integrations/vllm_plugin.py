"""Entry point ``vllm.general_plugins``: lets the proposer see which request is which, and when one ends.

vLLM calls ``register`` in each of its processes; that is noted, and nothing is imported. When ``SuffixProposer`` is
made, ``watch`` wraps two methods of vLLM's model runner: ``_update_states``, which is told at every step which requests
have ended, and ``shutdown``. Operators who list plugins in ``VLLM_PLUGINS`` and leave ours out get the proposer without
this.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeGuard

log = logging.getLogger(__name__)

_RUNNER = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
_MARK = "_ssd_is_watched"
_is_registered = False


class Watcher(Protocol):
    """What a drafter of ours does with what its runner says."""

    def on_step(self, runner: Any, finished: Iterable[str]) -> None:
        """A step of ``runner`` begins; the requests ``finished`` have ended. Never raises."""

    def close(self) -> None:
        """The runner shuts down."""


IsOurs = Callable[[object], TypeGuard[Watcher]]


def register() -> None:
    """Allow proposers of this process to watch vLLM's model runner. May be called many times."""
    global _is_registered
    _is_registered = True


def is_registered() -> bool:
    """Whether vLLM loaded this plugin in this process."""
    return _is_registered


def watch(is_ours: IsOurs) -> bool:
    """Tell drafters that ``is_ours`` accepts about steps and shutdown. Returns whether the runner could be watched."""
    try:
        runner = getattr(importlib.import_module(_RUNNER[0]), _RUNNER[1])
        update, shutdown = runner._update_states, runner.shutdown
    except (ImportError, AttributeError) as error:
        log.warning("vLLM's model runner cannot be watched, requests are told apart by their text: %s", error)
        return False
    if not getattr(runner, _MARK, False):
        runner._update_states, runner.shutdown = _announcing(update, is_ours), _closing(shutdown, is_ours)
        setattr(runner, _MARK, True)
    return True


def _announcing(update: Callable[..., Any], is_ours: IsOurs) -> Callable[..., Any]:
    @functools.wraps(update)
    def wrapped(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(runner, "drafter", None)
        if is_ours(drafter):
            drafter.on_step(runner, getattr(scheduler_output, "finished_req_ids", ()))
        return update(runner, scheduler_output, *args, **kwargs)

    return wrapped


def _closing(shutdown: Callable[..., Any], is_ours: IsOurs) -> Callable[..., Any]:
    @functools.wraps(shutdown)
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(runner, "drafter", None)
        try:
            return shutdown(runner, *args, **kwargs)
        finally:
            if is_ours(drafter):
                drafter.close()

    return wrapped
