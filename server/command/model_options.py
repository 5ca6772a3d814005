"""Options of the model: which, where it runs, how many requests at once and how long."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ssd.config import SCHEDULING_POLICIES, EngineConfig
from ssd.errors import ConfigError

BUNDLED_NAME = "ssd-bundled"
"""Name of the model that comes with the package."""

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Options of ``vllm serve`` that are understood and must be 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Checked."""

    path: str
    """A directory or an id."""
    name: str
    """What it is called where the service says nothing else."""
    dtype: str
    device: str
    generation_config: str
    share_prefix_cache: bool
    engine: EngineConfig


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, and the group "model"."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face model directory or id (default: the bundled model)"
    )
    engine = EngineConfig()
    add = parser.add_argument_group("model").add_argument
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="(default: %(default)s)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: %(default)s)")
    for name in _PARALLEL:
        add(f"--{name.replace('_', '-')}", type=int, default=1, help=argparse.SUPPRESS)
    add("--max-num-seqs", type=int, default=engine.max_num_seqs, metavar="S", help="slots (default: %(default)s)")
    add("--max-model-len", type=int, metavar="L", help="prompt and output tokens together (default: the model's limit)")
    add(
        "--max-waiting", type=int, default=engine.max_waiting, metavar="N",
        help="requests that may wait for a slot; more are answered 503 (default: %(default)s)",
    )  # fmt: skip
    add(
        "--max-num-batched-tokens", type=int, default=engine.prefill_chunk_tokens, metavar="N",
        help="prompt tokens computed in one step beside running requests (default: %(default)s)",
    )  # fmt: skip
    add(
        "--kv-cache-memory-bytes", type=int, metavar="B",
        help="memory for keys and values; fewer slots where not all fit (default: half of what is free)",
    )  # fmt: skip
    add(
        "--scheduling-policy", default=engine.scheduling_policy, choices=SCHEDULING_POLICIES,
        help="fcfs: first come, first served; priority: honour the field `priority` of requests, lower is earlier, "
        "whoever sends it (default: %(default)s)",
    )  # fmt: skip
    add(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=engine.enable_prefix_caching,
        help="keep the keys and values of ended requests for those that begin alike (default: on)",
    )  # fmt: skip
    add(
        "--share-prefix-cache", action="store_true",
        help="also among requests of different API keys, which can then find out what others have asked",
    )  # fmt: skip
    add(
        "--enforce-eager", action="store_true",
        help="record no CUDA graphs: slower steps, less memory (default: graphs where there is a GPU)",
    )  # fmt: skip
    add(
        "--fuse-linears", action="store_true",
        help="on a GPU compute query, key and value, and gate and up, as one product each (a CPU always does)",
    )  # fmt: skip
    add(
        "--generation-config", default="auto", metavar="auto|vllm|DIR",
        help="sampling defaults: the model's generation_config.json, OpenAI's, or another directory's",
    )  # fmt: skip


def model_options_of(found: argparse.Namespace) -> ModelOptions:
    """What was asked for; raises ConfigError."""
    _require_one_device(found)
    path, name = (found.model, found.model) if found.model is not None else _bundled()
    return ModelOptions(
        path=path,
        name=name,
        dtype=found.dtype,
        device=found.device,
        generation_config=found.generation_config,
        share_prefix_cache=found.share_prefix_cache,
        engine=EngineConfig(
            max_num_seqs=found.max_num_seqs,
            max_model_len=found.max_model_len,
            max_waiting=found.max_waiting,
            prefill_chunk_tokens=found.max_num_batched_tokens,
            kv_cache_memory_bytes=found.kv_cache_memory_bytes,
            scheduling_policy=found.scheduling_policy,
            enable_prefix_caching=found.enable_prefix_caching,
            enforce_eager=found.enforce_eager,
            fuse_linears=found.fuse_linears,
        ),
    )


def _require_one_device(found: argparse.Namespace) -> None:
    for name in _PARALLEL:
        size = getattr(found, name)
        if size != 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {size}: this server drives one device. For one model over several, run "
                "vLLM with ssd.integrations.vllm, which drafts from the same cache; for more throughput, run several "
                "servers with one --redis"
            )


def _bundled() -> tuple[str, str]:
    from ssd.bundled import MODEL_PATH

    return str(MODEL_PATH), BUNDLED_NAME
