"""Entry point ``vllm.general_plugins``: what of vLLM our drafters rely on, and the wrappers around it.

vLLM calls ``register`` in each of its processes, before it makes its configuration. All hooks of the V2 model runner
are looked at then, in the sources of the installed vLLM and without importing them; where one is missing nothing is
registered and one line says why. Else four things are wrapped::

    init_speculator              makes our speculator where the speculative model is called "ssd"
    GPUModelRunner (V1, V2)      tells it which requests begin and end, and of the shutdown
    Scheduler                    notes of each request that ends how long the client's answer is
    Scheduler.__init__           refuses "ssd" on the V1 runner, where vLLM's n-gram method would draft instead

Nothing here imports numba or torch: a plugin is loaded before vLLM has prepared its libraries.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from ssd.errors import ConfigError

log = logging.getLogger("vllm.ssd")
"""Below vLLM's own logger, which is the one that its operators see."""

TESTED_VERSIONS: Final = ("0.32",)
"""Of vLLM, major and minor: those that every hook below was tried with. Others get a warning in the log."""

METHOD: Final = "ngram_gpu"
MODEL: Final = "ssd"
"""Speculative method and model that ask for our speculator: a method that vLLM's checks and its asynchronous scheduling
know, and a model that nothing else is called."""

LENGTHS: Final = "ssd_lengths"
"""Attribute that a scheduler's output carries to the runner: tokens of the requests that have ended, by their id."""


class Hook(NamedTuple):
    """Something of vLLM: a function with its first parameters, or a class with fields, attributes and properties."""

    module: str
    attribute: str
    names: tuple[str, ...]


_PROPOSE = (
    "self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled",
    "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds", "dp_sync_state", "dummy_run",
    "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens",
)  # fmt: skip
_STEP = ("self", "scheduler_output")
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode"
_V2 = "vllm.v1.worker.gpu.model_runner"
_V1 = "vllm.v1.worker.gpu_model_runner"

V2_HOOKS: Final = (
    Hook(_SPECULATOR, "init_speculator", ("vllm_config", "device", "req_states")),
    Hook(f"{_SPECULATOR}.speculator", "BaseSpeculator.propose", _PROPOSE),
    Hook(_V2, "GPUModelRunner.add_requests", _STEP),
    Hook(_V2, "GPUModelRunner.finish_requests", _STEP),
    Hook(_V2, "GPUModelRunner.shutdown", ("self",)),
    Hook("vllm.v1.worker.gpu.states", "RequestState", ("all_token_ids", "total_len")),
    Hook("vllm.v1.worker.gpu.input_batch", "InputBatch", (
        "req_ids", "num_reqs", "idx_mapping", "num_scheduled_tokens", "num_computed_tokens_np", "prefill_len_np",
    )),
    Hook(_SCHEDULER, "Scheduler.__init__", ("self", "vllm_config")),
    Hook(_SCHEDULER, "Scheduler.schedule", ("self",)),
    Hook(_SCHEDULER, "Scheduler._free_request", ("self", "request")),
    Hook("vllm.v1.request", "Request", ("request_id", "num_tokens")),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput", ("scheduled_new_reqs", "finished_req_ids")),
    Hook("vllm.v1.core.sched.output", "NewRequestData", (
        "req_id", "prompt_len", "prefill_token_ids", "sampling_params",
    )),
    Hook("vllm.config.speculative", "SpeculativeConfig", (
        "method", "model", "num_speculative_tokens", "enable_adaptive_verification",
    )),
    Hook("vllm.config.vllm", "VllmConfig", ("use_v2_model_runner", "speculative_config", "additional_config")),
)  # fmt: skip
V1_HOOKS: Final = (
    Hook(_V1, "GPUModelRunner._update_states", _STEP),
    Hook(_V1, "GPUModelRunner.shutdown", ("self",)),
)

_MARK = "_ssd_is_watched"
_is_registered = False


def missing(hooks: Iterable[Hook]) -> list[str]:
    """What the installed vLLM lacks of these, one line each. Reads its sources and imports no more than packages."""
    trees: dict[str, ast.Module | None] = {}
    lacks = []
    for module, attribute, names in hooks:
        if module not in trees:
            trees[module] = _tree_of(module)
        tree = trees[module]
        node = None if tree is None else _found(tree, attribute)
        if isinstance(node, ast.FunctionDef):
            parameters = tuple(parameter.arg for parameter in node.args.args)
            if parameters[: len(names)] != names:
                lacks.append(f"{module}:{attribute} has the parameters {', '.join(parameters)}")
        elif isinstance(node, ast.ClassDef):
            if absent := [name for name in names if name not in _members(node)]:
                lacks.append(f"{module}:{attribute} has no {', '.join(absent)}")
        else:
            lacks.append(f"there is no {module}:{attribute}")
    return lacks


def _tree_of(module: str) -> ast.Module | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_text())


def _found(tree: ast.Module, attribute: str) -> ast.AST | None:
    found: ast.AST | None = tree
    for name in attribute.split("."):
        body: list[ast.AST] = getattr(found, "body", [])
        found = next((node for node in body if getattr(node, "name", None) == name), None)
    return found


def _members(node: ast.ClassDef) -> set[str]:
    """Fields, methods and properties, and what ``__init__`` sets."""
    members = {
        inner.target.id
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    }
    for function in (inner for inner in node.body if isinstance(inner, ast.FunctionDef)):
        members.add(function.name)
        if function.name == "__init__":
            members |= {
                inner.attr for inner in ast.walk(function)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            }  # fmt: skip
    return members


class Watcher(Protocol):
    """What a drafter of ours does with what its runner says."""

    def on_step(self, runner: Any, scheduler_output: Any) -> None:
        """A step of ``runner`` begins; requests may have ended. Never raises."""

    def close(self) -> None:
        """The runner shuts down."""


class AddWatcher(Watcher, Protocol):
    """The same, of the V2 runner."""

    def on_add(self, scheduler_output: Any) -> None:
        """Requests begin, or come back. Never raises."""


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
    package = importlib.import_module(_SPECULATOR)
    package.init_speculator = wrapped = _making(package.init_speculator)  # type: ignore[attr-defined]
    if _V2 in sys.modules:  # has its own name for it
        sys.modules[_V2].init_speculator = wrapped  # type: ignore[attr-defined]
    scheduler = importlib.import_module(_SCHEDULER).Scheduler
    if not hasattr(scheduler, _MARK):
        scheduler.__init__ = _checking(scheduler.__init__)
        scheduler._free_request = _noting(scheduler._free_request)
        scheduler.schedule = _telling(scheduler.schedule)
        setattr(scheduler, _MARK, True)


def is_registered() -> bool:
    """Whether vLLM loaded this plugin in this process."""
    return _is_registered


def is_asked_for(vllm_config: Any) -> bool:
    """Whether the speculative configuration asks for our speculator."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return (getattr(speculative, "method", None), getattr(speculative, "model", None)) == (METHOD, MODEL)


def lengths_of(scheduler_output: Any) -> Mapping[str, int]:
    """Tokens of the requests that have ended, by their id, as far as the scheduler said so."""
    lengths: Mapping[str, int] = getattr(scheduler_output, LENGTHS, {})
    return lengths


def watch_v1(is_ours: Callable[[object], bool]) -> bool:
    """Tell drafters that ``is_ours`` accepts about steps and shutdown. Returns whether the runner could be watched."""
    try:
        runner = importlib.import_module(_V1).GPUModelRunner
        methods = runner._update_states, runner.shutdown
    except (ImportError, AttributeError) as error:
        log.warning("vLLM's model runner cannot be watched, requests are told apart by their text: %s", error)
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

        runner = importlib.import_module(_V2).GPUModelRunner
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
