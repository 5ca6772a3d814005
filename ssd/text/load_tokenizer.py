"""Loads a tokenizer, and finds the token ids that end the output of the tokenizer's model."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ssd.errors import ModelError, first_line

_PATIENCE_S = 3.0  # for the first connection; the hub's own clients retry for most of a minute


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def go_offline_without_a_hub() -> str | None:
    """Set HF_HUB_OFFLINE for this process if the Hugging Face Hub cannot be reached; return the reason, else None."""
    if is_offline():
        return None
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    if proxy is not None:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    failure = _failure_to_connect(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    if failure is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]  # read from the environment only once
    return f"{endpoint} cannot be reached ({failure})"


def _failure_to_connect(host: str, port: int) -> str | None:
    """Try a TCP connection; return the reason if it cannot be made within ``_PATIENCE_S`` seconds, else None."""
    failures: list[str | None] = ["no answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_PATIENCE_S).close()
            failures[0] = None
        except OSError as error:
            failures[0] = error.strerror or str(error)

    # On a thread, because resolving the host name may take longer and cannot be cancelled.
    thread = threading.Thread(target=connect, name="hub", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return failures[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Options for downloading files from the Hugging Face Hub; they do not affect local directories."""

    revision: str | None = None  # a branch, tag or commit; None: main
    cache_dir: Path | None = None  # None: the hub's own cache
    # Whether Python code that comes with the model is run, with all rights of this process.
    trust_remote_code: bool = False

    def file_arguments(self) -> dict[str, Any]:
        return {"revision": self.revision, "cache_dir": None if self.cache_dir is None else str(self.cache_dir)}

    def arguments(self) -> dict[str, Any]:
        return {**self.file_arguments(), "trust_remote_code": self.trust_remote_code}


ROPE_MODULE = "transformers.modeling_rope_utils"


@contextmanager
def errors_only(module: str) -> Iterator[None]:
    """Suppress a transformers module's warnings in a ``with`` block: this project reports their causes itself."""
    logger = logging.getLogger(module)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


_END_OF_TEXT_NAMES = (
    *("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<|return|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]"),
)
_BEGIN_OF_TEXT_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>")
_CONFIGS = ("tokenizer_config.json", "config.json")


def load_tokenizer(name_or_path: str, hub: HubOptions | None = None) -> Any:
    """Load a transformers tokenizer from a directory, a file or the Hub; raise ModelError if it cannot be loaded."""
    hub = hub or HubOptions()
    path = Path(name_or_path)
    lone_file = path if path.is_file() else path / "tokenizer.json"
    if path.is_dir() and not any((path / name).exists() for name in ("tokenizer.json", *_CONFIGS)):
        raise ModelError(f"{name_or_path} contains no tokenizer: it needs a tokenizer.json or a tokenizer_config.json")
    unreachable = None if path.exists() else go_offline_without_a_hub()
    try:
        if path.is_file() or (lone_file.exists() and not any((path / name).exists() for name in _CONFIGS)):
            return _bounded(_load_lone_file(lone_file))
        from transformers import AutoTokenizer

        with errors_only(ROPE_MODULE):
            return _bounded(AutoTokenizer.from_pretrained(name_or_path, **hub.arguments()))
    except Exception as error:  # the libraries' errors have no narrower common base
        if not path.exists():
            raise ModelError(
                f"no tokenizer found for {name_or_path!r}: this is neither a local directory nor a model id that "
                f"can be downloaded ({unreachable or first_line(error)[:300]})"
            ) from error
        raise ModelError(f"the tokenizer in {name_or_path} cannot be loaded: {first_line(error)[:300]}") from error


_MAX_GROWTH = 1 << 12


def _bounded(tokenizer: Any) -> Any:
    """Return the tokenizer unchanged; raise ValueError if its rules make a text thousands of times longer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "post_processor"):
        if (rules := getattr(backend, name, None)) is None:
            continue
        growth, parts = 1, [json.loads(rules.__getstate__())]
        for part in parts:
            parts += part.get("normalizers") or part.get("processors") or ()
            growth *= max(1, len(part.get("content", "")), len(part.get("prepend", "")))
            special = part.get("special_tokens") or {}
            if isinstance(special, dict):  # of a template
                names = [piece["SpecialToken"]["id"] for piece in part.get("single", ()) if "SpecialToken" in piece]
                growth += sum(len(special[name]["ids"]) for name in names if name in special)
        if growth > _MAX_GROWTH:
            raise ValueError(
                f"the {name} in tokenizer.json can make a text more than {_MAX_GROWTH} times as long: use another "
                "tokenizer"
            )
    return tokenizer


def _load_lone_file(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    # Only special tokens: "</s>" is also an HTML tag, and an ordinary token of tokenizers trained on web pages.
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    named = {
        "eos_token": next((name for name in _END_OF_TEXT_NAMES if name in special), None),
        "bos_token": next((name for name in _BEGIN_OF_TEXT_NAMES if name in special), None),
    }
    missing = {key: name for key, name in named.items() if name is not None and getattr(tokenizer, key) is None}
    if missing:
        tokenizer.add_special_tokens(missing)
    return tokenizer


def eos_token_ids_of(tokenizer: Any, model: str, hub: HubOptions | None = None) -> tuple[int, ...]:
    """Return the token ids that end a model's output: first the tokenizer's own, then those in the model's files.

    The model's ids are read from ``generation_config.json`` or, if that file has none, from ``config.json``.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    hub = hub or HubOptions()
    configured = _read_json(find_generation_config(model, hub)).get("eos_token_id")
    if configured is None:
        config = _read_json(_find_file(model, "config.json", hub))
        text = config.get("text_config")
        configured = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    for token_id in configured if isinstance(configured, list) else [configured]:
        if isinstance(token_id, int) and token_id >= 0 and token_id not in ids:
            ids.append(token_id)
    return tuple(ids)


def find_generation_config(name_or_path: str, hub: HubOptions) -> Path | None:
    return _find_file(name_or_path, "generation_config.json", hub)


def _find_file(name_or_path: str, name: str, hub: HubOptions) -> Path | None:
    path = Path(name_or_path)
    if path.exists():
        found = (path if path.is_dir() else path.parent) / name
        return found if found.exists() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name_or_path, name, **hub.file_arguments()))
    except Exception:  # the file is missing, or the network fails
        return None


def _read_json(found: Path | None) -> dict[str, Any]:
    if found is None:
        return {}
    try:
        config = json.loads(found.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{found} cannot be read: {error}. Repair it, or remove it") from error
    return config if isinstance(config, dict) else {}


class _Generation(Extension):
    """A Jinja extension for ``{% generation %} ... {% endgeneration %}``, which templates put around the answer."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def parse_template(text: str) -> None:
    """Raise jinja2's TemplateSyntaxError if transformers cannot compile ``text`` as a chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.compile(text)


def hide_torch() -> bool:
    """Make ``import torch`` fail in this process, so that transformers starts without it; return whether it is hidden.

    If torch is installed, transformers imports it, which takes about one second and 200 MB. A program that only
    tokenizes does not need torch. Call this function only at the entry point of a program: torch cannot be used in
    this process afterwards. It has no effect if torch or transformers is already loaded.
    """
    if sys.modules.get("torch") is not None or "transformers" in sys.modules:
        return "torch" in sys.modules and sys.modules["torch"] is None
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: importing it raises ModuleNotFoundError
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it says that torch is missing
    return True
