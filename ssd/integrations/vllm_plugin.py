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
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from ssd.errors import ConfigError, ModelError
from ssd.integrations.settings import IntegrationSettings, read_settings

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec


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


TESTED_VERSIONS = ("0.32",)
"""Of vLLM, major and minor. Others get a warning in the log."""


def settings_of(vllm_config: Any) -> IntegrationSettings:
    additional = getattr(vllm_config, "additional_config", None)
    overrides = additional.get("ssd") if isinstance(additional, dict) else None
    if overrides is not None and not isinstance(overrides, dict):
        raise ConfigError(f'additional_config["ssd"] must be an object of settings, got {overrides!r}')
    settings = read_settings(overrides)
    parallel = getattr(vllm_config, "parallel_config", None)
    if settings.cache_dir is not None and getattr(parallel, "data_parallel_size", 1) > 1:
        return settings.below(f"rank-{getattr(parallel, 'data_parallel_rank', 0)}")
    return settings


def num_pipeline_stages(vllm_config: Any) -> int:
    """Batches that are in the pipeline at once: a request is in every so many calls only."""
    return max(1, int(getattr(getattr(vllm_config, "parallel_config", None), "pipeline_parallel_size", 1)))


def is_first_rank() -> bool:
    try:
        state = importlib.import_module("vllm.distributed.parallel_state")
        return int(state.get_tensor_model_parallel_rank()) == 0
    except (ImportError, AttributeError, AssertionError):  # not there, or not initialised: there is one rank
        return True


def load_codec(name: str, settings: IntegrationSettings) -> TextCodec | None:
    from ssd.text.codec import TextCodec

    try:
        return TextCodec.load(str(name))
    except ModelError as error:
        if settings.is_shared:
            raise ModelError(
                f"the cache is shared, so what its ids mean must be known, but {error}. Name the tokenizer with "
                'SSD_TOKENIZER or additional_config["ssd"]["tokenizer"]'
            ) from error
        log.warning("no tokenizer, the end of text is not known: %s", error)
        return None


def warn_if_untested() -> None:
    try:
        version = str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        log.warning(
            "vLLM %s: this proposer was tested with %s. Its interface is experimental; where it differs, requests get "
            "no drafts", version, ", ".join(f"{tested}.x" for tested in TESTED_VERSIONS),
        )  # fmt: skip
