"""Options of ``vllm serve`` that are understood and have one value here, which is the one people mean mostly."""

from __future__ import annotations

import argparse

from ssd.errors import ConfigError

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")

_ONE_VALUE: dict[str, tuple[tuple[str, ...], str]] = {
    "task": (("auto", "generate"), "this server generates text"),
    "runner": (("auto", "generate"), "this server generates text"),
    "tokenizer-mode": (("auto", "hf"), "tokenizers are transformers'"),
    "load-format": (("auto", "hf", "safetensors"), "weights are read by transformers"),
    "model-impl": (("auto", "transformers"), "models are transformers'"),
    "kv-cache-dtype": (("auto",), "keys and values have the model's dtype"),
    "quantization": (("auto",), "a quantised checkpoint says itself how it is quantised"),
    "response-role": (("assistant",), "answers are the assistant's"),
    "chat-template-content-format": (("auto", "string"), "templates get text"),
    "swap-space": (("0",), "nothing is swapped"),
    "cpu-offload-gb": (("0",), "weights stay on the device"),
    "nnodes": (("1",), "this server is one process on one machine"),
    "api-server-count": (("1",), "this server is one process"),
}
_MEANINGLESS = (
    "enable-chunked-prefill", "disable-frontend-multiprocessing", "enable-request-id-headers", "async-scheduling",
    "no-async-scheduling", "enable-lora",
)  # fmt: skip
"""Flags that say what is so anyway, or that is nobody's business here."""

_ELSEWHERE = {
    "hf-token": "others can read a command line: set $HF_TOKEN",
    "speculative-config": "speculation is on: --draft-model adds a draft model, --num-speculative-tokens limits drafts",
    "block-size": "keys and values are kept in slots, one for each sequence: see --max-num-seqs and --max-model-len",
}


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """All of them, without help."""
    for name in _PARALLEL:
        parser.add_argument(f"--{name}", type=int, default=1, help=argparse.SUPPRESS)
    for name in _ONE_VALUE:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in _MEANINGLESS:
        parser.add_argument(f"--{name}", dest=f"unused_{name}", action="store_true", help=argparse.SUPPRESS)
    for name in _ELSEWHERE:
        parser.add_argument(f"--{name}", nargs="?", const="", help=argparse.SUPPRESS)


def check_vllm_options(found: argparse.Namespace) -> None:
    """Raise ConfigError for a value that this server does not have."""
    for name in _PARALLEL:
        size = getattr(found, name.replace("-", "_"))
        if size != 1:
            raise ConfigError(
                f"--{name} {size}: this server drives one device. For one model over several, run "
                "vLLM with ssd.integrations.vllm, which drafts from the same cache; for more throughput, run several "
                "servers with one --redis"
            )
    for name, (values, reason) in _ONE_VALUE.items():
        value = getattr(found, name.replace("-", "_"))
        if value is not None and value not in values:
            raise ConfigError(f"--{name} {value}: {reason}; leave the option out or say {' or '.join(values)}")
    for name, advice in _ELSEWHERE.items():
        if getattr(found, name.replace("-", "_")) is not None:
            raise ConfigError(f"--{name}: {advice}")
