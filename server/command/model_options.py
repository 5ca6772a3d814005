"""Options of the model: which, from where, how it is read."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from server.command.adapter_names import read_adapters
from ssd.errors import ConfigError
from ssd.text.load_tokenizer import HubOptions

BUNDLED_NAME = "ssd-bundled"
"""Name of the model that comes with the package."""

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
"""Names that ``vllm serve`` has besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Checked."""

    path: str
    """A directory or an id."""
    name: str
    """What it is called where the service says nothing else."""
    hub: HubOptions
    tokenizer: str
    """A directory, a file or an id."""
    tokenizer_hub: HubOptions
    chat_template: str | None
    """A template in place of the tokenizer's."""
    adapters: dict[str, str]
    """LoRA adapters, directories or ids, by their names."""
    dtype: str
    device: str
    generation_config: str


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, and the group "model"."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face model directory or id (default: the bundled model)"
    )
    add = parser.add_argument_group("model").add_argument
    add("--model", dest="model_option", metavar="MODEL", help=argparse.SUPPRESS)
    add("--revision", metavar="NAME", help="branch, tag or commit of a model from the hub (default: main)")
    add("--tokenizer", metavar="MODEL", help="directory, tokenizer.json or id of another tokenizer than the model's")
    add("--tokenizer-revision", metavar="NAME", help="its branch, tag or commit (default: as --revision)")
    add(
        "--chat-template", metavar="FILE",
        help="chat template, a file or the text itself, in place of the tokenizer's",
    )  # fmt: skip
    add(
        "--download-dir", type=Path, metavar="DIR",
        help="where models from the hub are kept (default: its own cache); $HF_TOKEN opens those that need it",
    )  # fmt: skip
    add(
        "--trust-remote-code", action="store_true",
        help="run Python code that comes with a model; who wrote it can then do here what you can",
    )  # fmt: skip
    add(
        "--lora-modules", nargs="+", default=(), metavar="NAME=PATH",
        help="LoRA adapters, each a model name and a cache namespace of its own; JSON as for vLLM too",
    )  # fmt: skip
    add(
        "--dtype", type=lambda name: _DTYPE_NAMES.get(name, name), default="auto", choices=_DTYPES,
        help="half and float are understood too (default: the checkpoint's; on a CPU float32 if that is as fast)",
    )  # fmt: skip
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: cuda where there is one)")
    add(
        "--generation-config", default="auto", metavar="auto|vllm|DIR",
        help="sampling defaults: the model's generation_config.json, OpenAI's, or another directory's",
    )  # fmt: skip


def model_options_of(found: argparse.Namespace) -> ModelOptions:
    """What was asked for; raises ConfigError."""
    if found.model is not None and found.model_option is not None:
        raise ConfigError(f"MODEL is given twice, {found.model} and --model {found.model_option}: leave one out")
    model = found.model if found.model is not None else found.model_option
    if model is not None and not model.strip():
        raise ConfigError("MODEL is empty: give a directory or an id, or leave it out for the bundled model")
    path, name = (model, model) if model is not None else _bundled()
    hub = HubOptions(revision=found.revision, cache_dir=found.download_dir, trust_remote_code=found.trust_remote_code)
    return ModelOptions(
        path=path,
        name=name,
        hub=hub,
        tokenizer=path if found.tokenizer is None else found.tokenizer,
        tokenizer_hub=HubOptions(
            revision=found.tokenizer_revision or (found.revision if found.tokenizer is None else None),
            cache_dir=found.download_dir,
            trust_remote_code=found.trust_remote_code,
        ),
        chat_template=None if found.chat_template is None else read_template(found.chat_template),
        adapters=read_adapters(found.lora_modules, model_names=(*(found.served_model_name or [name]),)),
        dtype=found.dtype,
        device=found.device,
        generation_config=found.generation_config,
    )


def read_template(text: str) -> str:
    """The template of a file, or ``text`` itself where it can only be one; raises ConfigError."""
    path = Path(text)
    if any(mark in text for mark in ("{{", "{%", "\n")):
        return text
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--chat-template {text[:200]} is no template, and as a file: {reason}") from error


def _bundled() -> tuple[str, str]:
    from ssd.bundled import MODEL_PATH

    return str(MODEL_PATH), BUNDLED_NAME
