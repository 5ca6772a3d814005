"""The functions and classes of vLLM on which SSD's drafters rely, and a check that the installed vLLM has them.

This module imports neither numba nor torch, because plugins are loaded before vLLM has prepared these libraries.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, Final, NamedTuple

log = logging.getLogger("vllm.ssd")  # below vLLM's own logger, so that vLLM's log settings apply

TESTED_VERSIONS: Final = ("0.32",)
"""The versions of vLLM (major and minor) with which SSD's drafters were tested; any other version causes a warning."""

METHOD: Final = "ngram_gpu"
MODEL: Final = "ssd"
"""The value of "model" in vLLM's speculative configuration that, with the method ``METHOD``, selects SSD's drafter.

``METHOD`` is the name of vLLM's own n-gram method, because vLLM's checks and its asynchronous scheduling accept it. No
real model has the name "ssd".
"""

LENGTHS: Final = "ssd_lengths"
"""The name of an attribute that SSD adds to vLLM's ``SchedulerOutput``.

It maps the ids of finished requests to their numbers of tokens, so that only text that clients received is stored.
"""


class Hook(NamedTuple):
    """A part of vLLM or SGLang that SSD requires: a function with its first parameters, or a class with members."""

    module: str
    attribute: str  # the qualified name in the module
    names: tuple[str, ...]  # the names of the parameters or members


_PROPOSE = (
    *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
    *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds", "dp_sync_state"),
    *("dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens"),
)
_STEP = ("self", "scheduler_output")
SCHEDULER = "vllm.v1.core.sched.scheduler"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"

_INPUTS = ("req_ids", "num_reqs", "idx_mapping", "num_scheduled_tokens", "num_computed_tokens_np", "prefill_len_np")
_NEW_REQUEST = ("req_id", "prompt_len", "prefill_token_ids", "sampling_params", "prompt_embeds")
_SPECULATION = ("method", "model", "num_speculative_tokens", "enable_adaptive_verification")
_V1_INPUTS = ("req_ids", "token_ids_cpu", "num_prompt_tokens", "req_prompt_embeds")

V2_HOOKS: Final = (
    Hook(SPECULATOR, "init_speculator", ("vllm_config", "device", "req_states")),
    Hook(f"{SPECULATOR}.speculator", "BaseSpeculator.propose", _PROPOSE),
    Hook(V2_RUNNER, "GPUModelRunner.add_requests", _STEP),
    Hook(V2_RUNNER, "GPUModelRunner.finish_requests", _STEP),
    Hook(V2_RUNNER, "GPUModelRunner.shutdown", ("self",)),
    Hook("vllm.v1.worker.gpu.states", "RequestState", ("all_token_ids", "total_len")),
    Hook("vllm.v1.worker.gpu.input_batch", "InputBatch", _INPUTS),
    Hook(SCHEDULER, "Scheduler.__init__", ("self", "vllm_config")),
    Hook(SCHEDULER, "Scheduler.schedule", ("self",)),
    Hook(SCHEDULER, "Scheduler._free_request", ("self", "request")),
    Hook("vllm.v1.request", "Request", ("request_id", "num_tokens")),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput", ("scheduled_new_reqs", "finished_req_ids")),
    Hook("vllm.v1.core.sched.output", "NewRequestData", _NEW_REQUEST),
    Hook("vllm.config.speculative", "SpeculativeConfig", _SPECULATION),
    Hook("vllm.config.vllm", "VllmConfig", ("use_v2_model_runner", "speculative_config", "additional_config")),
)
V1_HOOKS: Final = (
    Hook(V1_RUNNER, "GPUModelRunner._update_states", _STEP),
    Hook(V1_RUNNER, "GPUModelRunner.shutdown", ("self",)),
    Hook(V1_RUNNER, "GPUModelRunner", ("input_batch", "requests")),
    Hook("vllm.v1.worker.gpu_input_batch", "InputBatch", _V1_INPUTS),
    Hook("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("output_token_ids", "sampling_params")),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput", ("finished_req_ids", "num_spec_tokens_to_schedule")),
)


def selects_ssd(vllm_config: Any) -> bool:
    speculative = getattr(vllm_config, "speculative_config", None)
    return (getattr(speculative, "method", None), getattr(speculative, "model", None)) == (METHOD, MODEL)


def finished_lengths(scheduler_output: Any) -> Mapping[str, int]:
    """Return the numbers of tokens of finished requests, as far as SSD's wrapper of vLLM's scheduler recorded them."""
    lengths: Mapping[str, int] = getattr(scheduler_output, LENGTHS, {})
    return lengths


def missing_hooks(hooks: Iterable[Hook]) -> list[str]:
    """Return a line of text for each function or class member that SSD requires and the installed engine lacks.

    The engine's source files are parsed, not imported; only the packages that contain them are imported.
    """
    trees: dict[str, ast.Module | None] = {}
    missing = []
    for module, attribute, names in hooks:
        if module not in trees:
            trees[module] = _tree_of(module)
        tree = trees[module]
        node = None if tree is None else _find_node(tree, attribute)
        if isinstance(node, ast.FunctionDef):
            parameters = tuple(parameter.arg for parameter in node.args.args)
            if parameters[: len(names)] != names:
                missing.append(
                    f"{module}:{attribute} has the parameters {', '.join(parameters)}, not {', '.join(names)}"
                )
        elif isinstance(node, ast.ClassDef):
            if absent := [name for name in names if name not in _members(node)]:
                missing.append(f"{module}:{attribute} has no {', '.join(absent)}")
        else:
            missing.append(f"there is no {module}:{attribute}")
    return missing


def _tree_of(module: str) -> ast.Module | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, KeyError, ValueError):  # KeyError: the import of a parent package failed
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_text())


def _find_node(tree: ast.Module, attribute: str) -> ast.AST | None:
    found: ast.AST | None = tree
    for name in attribute.split("."):
        body: list[ast.AST] = getattr(found, "body", [])
        found = next((node for node in body if getattr(node, "name", None) == name), None)
    return found


def _members(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, methods and properties, and of the attributes set in ``__init__``."""
    members = {
        inner.target.id
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    }
    for function in (inner for inner in node.body if isinstance(inner, ast.FunctionDef)):
        members.add(function.name)
        if function.name == "__init__":
            members |= {
                inner.attr
                for inner in ast.walk(function)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            }
    return members


def main() -> int:
    """Print for each model runner whether the installed vLLM has what SSD needs. Returns 1 if neither runner has."""
    names = packages_distributions().get("vllm")  # the distribution for CPUs has another name
    if not names:
        print("vLLM is not installed in this environment")
        return 1
    installed = version(names[0])
    num_supported = 0
    for runner, hooks in (("V2", V2_HOOKS), ("V1", V1_HOOKS)):
        missing = missing_hooks(hooks)
        num_supported += not missing
        found = "; ".join(missing) if missing else f"the {runner} model runner has all functions that SSD needs"
        print(f"vLLM {installed}: {found}")
    if ".".join(installed.split(".")[:2]) not in TESTED_VERSIONS:
        print(f"SSD was tested with vLLM {', '.join(f'{tested}.x' for tested in TESTED_VERSIONS)}")
    return 0 if num_supported else 1


if __name__ == "__main__":
    sys.exit(main())
