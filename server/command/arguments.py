"""The command line of ``ssd-serve``; names and meanings are those of ``vllm serve`` where it has them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from server.base.limits import Limits
from server.base.settings import OBFUSCATION_INTERVAL_S, VERSION
from server.command.keys import FILE_OPTION, KEY_OPTION, PIPE_OPTION, checked_keys, read_pipe
from server.command.limit_options import add_limit_options, limits_of
from server.tenants.rules_file import OPTION as TENANTS_OPTION
from server.tenants.secret import OPTION as SECRET_OPTION
from server.tenants.secret import VARIABLE as SECRET_VARIABLE
from ssd.config import (
    DRAFT_ACCEPTANCES,
    DRAFT_SHAPES,
    EVICTION_POLICIES,
    SCHEDULING_POLICIES,
    CacheConfig,
    DraftConfig,
    EngineConfig,
    IndexConfig,
)
from ssd.errors import ConfigError
from ssd.sharing.connection import URL_VARIABLE

API_KEY_VARIABLE = "SSD_API_KEY"
BUNDLED_NAME = "ssd-bundled"
"""Name of the model that comes with the package."""

_MOST_OBFUSCATION_INTERVAL_S = 60

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Options of ``vllm serve`` that are understood and must be 1."""

_EXAMPLES = """\
examples:
  ssd-serve                                   the bundled model on http://127.0.0.1:8000
  ssd-serve Qwen/Qwen3-0.6B --cache-dir cache/
  ssd-serve Qwen/Qwen3-0.6B --warm warm/ --redis redis://localhost:6379/0 --namespace support
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A checked command line."""

    host: str
    port: int
    model: str
    draft_model: str | None
    model_names: tuple[str, ...]
    dtype: str
    device: str
    generation_config: str
    namespace: str
    warm_directories: tuple[Path, ...]
    api_keys: tuple[str, ...]
    api_key_file: Path | None
    tenants_file: Path | None
    secret_file: Path | None
    secret: str | None
    share_cache_across_keys: bool
    share_prefix_cache: bool
    trust_request_chat_template: bool
    allow_special_tokens: bool
    obfuscation_interval_s: float
    log_level: str
    engine: EngineConfig
    draft: DraftConfig
    cache: CacheConfig
    limits: Limits


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parse_arguments(arguments: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> Options:
    """Read the command line; ends the process with status 2 and one line when it cannot be used."""
    parser = build_parser()
    found = parser.parse_args(arguments)
    try:
        draft = DraftConfig()
        limit = draft.num_speculative_tokens if found.num_speculative_tokens is None else found.num_speculative_tokens
        _require_one_device(found)
        keys = checked_keys([*(found.api_key or []), *_piped_keys(found)], KEY_OPTION)
        if environment.get(API_KEY_VARIABLE):
            keys += checked_keys([environment[API_KEY_VARIABLE]], f"${API_KEY_VARIABLE}")
        if not 0 <= found.obfuscation_interval <= _MOST_OBFUSCATION_INTERVAL_S:
            raise ConfigError(
                f"--obfuscation-interval must be within 0..{_MOST_OBFUSCATION_INTERVAL_S} seconds, "
                f"got {found.obfuscation_interval}"
            )
        if found.draft_acceptance == "rejection" and found.draft_model is None:
            raise ConfigError("--draft-acceptance rejection needs --draft-model: no other drafts are drawn at random")
        model, name = (found.model, found.model) if found.model is not None else _bundled()
        return Options(
            host=found.host,
            port=found.port,
            model=model,
            draft_model=None if found.no_speculation else found.draft_model,
            model_names=tuple(found.served_model_name or [name]),
            dtype=found.dtype,
            device=found.device,
            generation_config=found.generation_config,
            namespace=found.namespace,
            warm_directories=tuple(found.warm or ()),
            api_keys=keys,
            api_key_file=found.api_key_file,
            tenants_file=found.tenants,
            secret_file=found.secret_file,
            secret=environment.get(SECRET_VARIABLE) or None,
            share_cache_across_keys=found.share_cache_across_keys,
            share_prefix_cache=found.share_prefix_cache,
            trust_request_chat_template=found.trust_request_chat_template,
            allow_special_tokens=found.allow_special_tokens,
            obfuscation_interval_s=found.obfuscation_interval,
            log_level=found.log_level,
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
            draft=DraftConfig(
                num_speculative_tokens=0 if found.no_speculation else limit,
                max_match_length=found.max_match_length,
                lookup_threads=found.lookup_threads,
                draft_acceptance=found.draft_acceptance,
                draft_shape=found.draft_shape,
            ),
            cache=CacheConfig(
                index=IndexConfig(
                    capacity_tokens=found.cache_tokens,
                    rebuild_interval_s=found.rebuild_interval,
                    eviction=found.cache_eviction,
                ),
                directory=found.cache_dir,
                memory_bytes=found.cache_memory_bytes,
                redis_url=found.redis or environment.get(URL_VARIABLE) or None,
            ),
            limits=limits_of(found),
        )
    except ConfigError as error:
        parser.error(str(error))


def _require_one_device(found: argparse.Namespace) -> None:
    for name in _PARALLEL:
        size = getattr(found, name)
        if size != 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {size}: this server drives one device. For one model over several, run "
                "vLLM with ssd.integrations.vllm, which drafts from the same cache; for more throughput, run several "
                "servers with one --redis"
            )


def _piped_keys(found: argparse.Namespace) -> list[str]:
    return [] if found.api_key_fd is None else read_pipe(found.api_key_fd)


def _bundled() -> tuple[str, str]:
    from ssd.bundled import MODEL_PATH

    return str(MODEL_PATH), BUNDLED_NAME


def build_parser() -> argparse.ArgumentParser:
    """The command line, with defaults and help."""
    parser = _Parser(
        prog="ssd-serve",
        description="OpenAI-compatible server that gets faster the more it is used and never changes the output.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    index, draft, engine, cache = IndexConfig(), DraftConfig(), EngineConfig(), CacheConfig()
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="Hugging Face model directory or id (default: the bundled model)")
    add("--version", action="version", version=f"ssd-serve {VERSION}")

    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names requests call the model by (default: MODEL)")
    add(
        FILE_OPTION, type=Path, metavar="FILE",
        help="API keys, one a line, # begins a comment; requests without one of them get /live, /health, /version, "
        "/metrics and /docs alone",
    )  # fmt: skip
    add(
        KEY_OPTION, action="append", metavar="KEY",
        help=f"one more key; repeatable; it shows in the process list for the first moment (also: ${API_KEY_VARIABLE})",
    )  # fmt: skip
    add(PIPE_OPTION, type=int, help=argparse.SUPPRESS)
    add(
        TENANTS_OPTION, type=Path, metavar="FILE",
        help="tenants, their keys and quotas, and who is an operator, see docs/tenants.md; read again when it changes",
    )  # fmt: skip
    add(
        SECRET_OPTION, type=Path, metavar="FILE",
        help="what the names of tenants' caches are derived from, the same for all servers of one --redis (also: "
        f"${SECRET_VARIABLE}; default: made once and kept in --cache-dir)",
    )  # fmt: skip
    add(
        "--share-cache-across-keys", action="store_true",
        help="all API keys draft from one cache and teach it (default: each tenant has its own)",
    )  # fmt: skip
    add("--trust-request-chat-template", action="store_true", help="run chat templates that requests bring")
    add(
        "--allow-special-tokens", action="store_true",
        help="special tokens that messages spell out are control tokens, as those of the chat template (default: text)",
    )  # fmt: skip
    add(
        "--obfuscation-interval", type=float, default=OBFUSCATION_INTERVAL_S, metavar="SECONDS",
        help="obfuscated streams get one event of 16 tokens this often, so that times tell nothing: not less than the "
        "model takes for them without drafts; 0 sends each when it is complete (default: %(default)s)",
    )  # fmt: skip
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="(default: %(default)s)")

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

    add_limit_options(parser)

    add = parser.add_argument_group("speculation").add_argument
    add(
        "--num-speculative-tokens", type=int, metavar="K",
        help=f"most draft tokens per step (default: {draft.num_speculative_tokens})",
    )  # fmt: skip
    add(
        "--max-match-length", type=int, default=draft.max_match_length, metavar="N",
        help="longest context tail looked up, in tokens (default: %(default)s)",
    )  # fmt: skip
    add(
        "--lookup-threads", type=int, default=draft.lookup_threads, metavar="N",
        help="threads that look up the sequences of a batch of 64 or more, the engine's own among them (default: "
        "%(default)s)",
    )  # fmt: skip
    add(
        "--draft-model",
        metavar="MODEL",
        help="smaller model with the same tokenizer that drafts where the cache does not",
    )
    add(
        "--draft-acceptance", default=draft.draft_acceptance, choices=DRAFT_ACCEPTANCES,
        help="how a sampled draft of the draft model is verified; rejection accepts more, but the tokens of a request "
        "without a seed then depend on the drafts (default: %(default)s)",
    )  # fmt: skip
    add(
        "--draft-shape", default=draft.draft_shape, choices=DRAFT_SHAPES,
        help="whether drafts may branch where the next token is uncertain (default: %(default)s)",
    )  # fmt: skip
    add("--no-speculation", action="store_true", help="plain decoding: no drafts")

    add = parser.add_argument_group("cache").add_argument
    add("--cache-tokens", type=int, default=index.capacity_tokens, metavar="N", help="capacity (default: %(default)s)")
    add(
        "--rebuild-interval", type=float, default=index.rebuild_interval_s, metavar="SECONDS",
        help="new text is indexed at the latest after this time (default: %(default)s)",
    )  # fmt: skip
    add(
        "--cache-eviction", default=index.eviction, choices=EVICTION_POLICIES,
        help="what stays when the cache is full: used: half of it may be what outputs said again; fifo: the newest "
        "text (default: %(default)s)",
    )  # fmt: skip
    add("--cache-dir", type=Path, metavar="DIR", help="keep the cache here (default: nothing outlives the process)")
    add(
        "--cache-memory-bytes", type=int, default=cache.memory_bytes, metavar="N",
        help="keep private copies of the cache's files up to this much; what is beyond, large --warm directories for "
        "instance, is mapped and shared with other servers (default: %(default)s)",
    )  # fmt: skip
    add("--warm", type=Path, action="append", metavar="DIR", help="draft from what `ssd-cache build` wrote; repeatable")
    add(
        "--redis", metavar="URL",
        help=f"learn from other servers, and they from this one (default: ${URL_VARIABLE}, not in the process list)",
    )  # fmt: skip
    add(
        "--namespace",
        default="default",
        metavar="NAME",
        help="what this server's cache is called (default: %(default)s)",
    )
    return parser


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"a port is a number within 0..65535, got {text!r}")
    return int(text)
