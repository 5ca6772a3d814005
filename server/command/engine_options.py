"""Options of the engine: how many sequences at once, how long, in how much memory."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from server.command.sizes import count, num_bytes
from ssd.config import EXACT, MAX_COUPLED_STREAMS, SCHEDULING_POLICIES, EngineConfig
from ssd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Checked."""

    seed: int | None
    config: EngineConfig


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The group "engine"."""
    engine = EngineConfig()
    add = parser.add_argument_group("engine").add_argument
    add("--max-num-seqs", type=int, default=engine.max_num_seqs, metavar="S", help="slots (default: %(default)s)")
    add(
        "--max-model-len", type=_length, metavar="L",
        help="prompt and output tokens together, 32k for instance (default: the model's limit, or less "
        "where memory lacks)",
    )  # fmt: skip
    add(
        "--max-waiting", type=count, default=engine.max_waiting, metavar="N",
        help="requests that may wait for a slot; more are answered 503 (default: %(default)s)",
    )  # fmt: skip
    add(
        "--max-num-batched-tokens", type=count, default=engine.prefill_chunk_tokens, metavar="N",
        help="prompt tokens computed in one step beside running requests (default: %(default)s)",
    )  # fmt: skip
    add(
        "--kv-cache-memory-bytes", type=num_bytes, metavar="B",
        help="memory for keys and values, 4GiB for instance; fewer slots where not all fit (default: half of what is "
        "free)",
    )  # fmt: skip
    add(
        "--gpu-memory-utilization", type=float, metavar="SHARE",
        help="or: share of the device's memory, on a CPU of main memory, that may be in use once keys and values have "
        "theirs, whatever uses the rest (default: see above)",
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
        "--exact", default=engine.exact, choices=EXACT,
        help="outputs equal to the bit, whatever is drafted or decoded beside them. auto: where that takes at most 5%% "
        "more time; on: or the model is not served; off: each pass as fast as it can be (default: %(default)s)",
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
        "--seed", type=int, metavar="N",
        help="requests that bring no seed get theirs from a sequence that begins here: the same requests in the same "
        "order give the same outputs (default: drawn at random)",
    )  # fmt: skip
    add(
        "--coupled-sampling", type=count, default=engine.coupled_streams, metavar="S",
        help="sampled requests without a seed draw with one of S streams of noise that they share, so that what was "
        "answered before can be drafted. Each answer has the model's law, but answers to one question come from S "
        "streams: two may be equal. 0: each request has noise of its own (default: %(default)s)",
    )  # fmt: skip


def engine_options_of(found: argparse.Namespace) -> EngineOptions:
    """What was asked for; raises ConfigError."""
    if found.coupled_sampling > MAX_COUPLED_STREAMS:
        raise ConfigError(f"--coupled-sampling must be within 0..{MAX_COUPLED_STREAMS}, got {found.coupled_sampling}")
    return EngineOptions(
        seed=found.seed,
        config=EngineConfig(
            max_num_seqs=found.max_num_seqs,
            max_model_len=found.max_model_len,
            max_waiting=found.max_waiting,
            prefill_chunk_tokens=found.max_num_batched_tokens,
            kv_cache_memory_bytes=found.kv_cache_memory_bytes,
            gpu_memory_utilization=found.gpu_memory_utilization,
            scheduling_policy=found.scheduling_policy,
            enable_prefix_caching=found.enable_prefix_caching,
            exact=found.exact,
            enforce_eager=found.enforce_eager,
            fuse_linears=found.fuse_linears,
            coupled_streams=found.coupled_sampling,
        ),
    )


def _length(text: str) -> int | None:
    return None if text in ("auto", "-1") else count(text)
