"""The command line of ``ssd-serve``: its option groups, and checks that involve several groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from server.base.limits import Limits
from server.base.settings import VERSION, CorsOptions, ObfuscationOptions, RequestOptions, ToolOptions, WebUIOptions
from server.command.flags import CONFIG_OPTION, DEFAULTS, check_range, group, read_values, run_app, show_help
from server.command.listen import check_tls
from server.command.options import (
    CacheOptions,
    EngineOptions,
    ModelOptions,
    NetworkOptions,
    ObserveOptions,
    ServiceOptions,
    SpeculationOptions,
    read_adapters,
)
from server.observe.logs import report_start
from ssd.errors import ConfigError
from ssd.replication.connection import URL_VARIABLE

_ONE_DEVICE = (
    "this server drives one device. For one model over several, run vLLM with ssd.integrations.vllm, which drafts from "
    "the same cache; for more throughput, run several servers with one --redis"
)
_ONE_VALUE: dict[str, tuple[tuple[str, ...], str]] = {
    "tensor-parallel-size": (("1",), _ONE_DEVICE),
    "pipeline-parallel-size": (("1",), _ONE_DEVICE),
    "data-parallel-size": (("1",), _ONE_DEVICE),
    "task": (("auto", "generate"), "this server generates text"),
    "runner": (("auto", "generate"), "this server generates text"),
    "tokenizer-mode": (("auto", "hf"), "this server uses the tokenizers of transformers"),
    "load-format": (("auto", "hf", "safetensors"), "this server loads weights with transformers"),
    "model-impl": (("auto", "transformers"), "this server uses the models of transformers"),
    "kv-cache-dtype": (("auto",), "the KV cache has the data type of the model"),
    "quantization": (("auto",), "the checkpoint itself declares its quantization"),
    "response-role": (("assistant",), "responses always have the role assistant"),
    "chat-template-content-format": (("auto", "string"), "chat templates get message contents as text"),
    "swap-space": (("0",), "this server does not swap the KV cache"),
    "cpu-offload-gb": (("0",), "this server keeps all weights on the device"),
    "nnodes": (("1",), "this server is one process on one machine"),
    "api-server-count": (("1",), "this server is one process"),
}
"""Options of ``vllm serve`` that this server accepts only with certain values, usually vLLM's default.

The dictionary maps each option to its accepted values, and to the reason why another value is rejected.
"""
_MEANINGLESS = """enable-chunked-prefill disable-frontend-multiprocessing enable-request-id-headers async-scheduling
    no-async-scheduling enable-lora enable-auto-tool-choice""".split()
"""Options of ``vllm serve`` that are accepted without effect. They concern a behaviour that this server always has, or
a feature that it does not have.
"""
_ELSEWHERE = {
    "hf-token": "other users can read the command line: set $HF_TOKEN",
    "speculative-config": "speculation is on by default: use --draft-model and --num-speculative-tokens instead",
    "block-size": "the KV cache has one slot per sequence and no blocks: set --max-num-seqs and --max-model-len",
}
_UNSHOWN = Parameter(show=False)
_VllmOptions = make_dataclass(
    "_VllmOptions",
    [
        *((name.replace("-", "_"), Annotated[str | None, _UNSHOWN], None) for name in (*_ONE_VALUE, *_ELSEWHERE)),
        *((name.replace("-", "_"), Annotated[bool, _UNSHOWN], False) for name in _MEANINGLESS),
    ],
    frozen=True,
    kw_only=True,
    namespace={"__module__": __name__},  # else it passes for one of Python's own, whose fields are no flags
)


def _check_vllm_options(found: object) -> None:
    for name, (values, reason) in _ONE_VALUE.items():
        value = getattr(found, name.replace("-", "_"))
        if value is not None and value not in values:
            raise ConfigError(f"--{name} {value}: {reason}; omit the option, or set it to {' or '.join(values)}")
    for name, advice in _ELSEWHERE.items():
        if getattr(found, name.replace("-", "_")) is not None:
            raise ConfigError(f"--{name}: {advice}")


_GROUPS = {
    title: group(title)
    for title in (
        *"model network service engine streams".split(),
        "web UI",
        *"tools speculation cache limits".split(),
        "logs and traces",
    )
}
_VLLM = group("vllm", show=False)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a parsed command line, divided into groups."""

    model: Annotated[ModelOptions, _GROUPS["model"]] = field(default_factory=ModelOptions)
    network: Annotated[NetworkOptions, _GROUPS["network"]] = field(default_factory=NetworkOptions)
    cors: Annotated[CorsOptions, _GROUPS["network"]] = field(default_factory=CorsOptions)
    service: Annotated[ServiceOptions, _GROUPS["service"]] = field(default_factory=ServiceOptions)
    requests: Annotated[RequestOptions, _GROUPS["service"]] = field(default_factory=RequestOptions)
    engine: Annotated[EngineOptions, _GROUPS["engine"]] = field(default_factory=EngineOptions)
    streams: Annotated[ObfuscationOptions, _GROUPS["streams"]] = field(default_factory=ObfuscationOptions)
    web_ui: Annotated[WebUIOptions, _GROUPS["web UI"]] = field(default_factory=WebUIOptions)
    tools: Annotated[ToolOptions, _GROUPS["tools"]] = field(default_factory=ToolOptions)
    speculation: Annotated[SpeculationOptions, _GROUPS["speculation"]] = field(default_factory=SpeculationOptions)
    cache: Annotated[CacheOptions, _GROUPS["cache"]] = field(default_factory=CacheOptions)
    limits: Annotated[Limits, _GROUPS["limits"]] = field(default_factory=Limits)
    observe: Annotated[ObserveOptions, _GROUPS["logs and traces"]] = field(default_factory=ObserveOptions)

    def check(self) -> None:
        model, streams = self.model, self.streams
        if model.model is not None and not model.model.strip():
            raise ConfigError("MODEL is empty: give a model directory or id, or omit it to serve the bundled model")
        names = self.service.model_names or (model.name,)
        read_adapters(model.lora_modules, model_names=names)
        self.network.check()
        check_tls(self.network)
        if self.cors.allow_credentials and "*" in self.cors.allowed_origins:
            raise ConfigError(
                "--allow-credentials with --allowed-origins * would let every web site send requests in the name "
                "of its visitors: list the allowed origins instead of *"
            )
        self.tools.check()
        _ = self.engine.config, self.speculation.draft, self.cache.config  # these properties check the options
        check_range("--obfuscation-tokens", streams.obfuscation_tokens, 1, 4096)
        check_range("--obfuscation-interval", streams.obfuscation_interval_s, 0, 60, " seconds")
        if self.observe.spec_decode_metrics != "none" and streams.obfuscation == "always":
            raise ConfigError(
                "--per-request-spec-decode-metrics reveals what --obfuscation always hides: omit one of the two options"
            )


_GENERAL = Group("options", sort_key=0)
_NOTHING, _NO_VLLM = Options(), _VllmOptions()


def build_app(environment: Mapping[str, str] = os.environ) -> App:
    """Return the command line parser (a cyclopts app), which returns `Options` when called."""
    app = App(
        name="ssd-serve",
        version=f"ssd-serve {VERSION}",
        usage="Usage: ssd-serve [doctor] [MODEL] [--option VALUE ...]",
        help="OpenAI-compatible server that gets faster the more it is used and never changes the output.\n\n"
        "Options that `vllm serve` has too have the same name and meaning here.",
        help_epilogue=_EXAMPLES,
        help_format="plaintext",
        help_formatter=show_help,
        group_parameters=_GENERAL,
        group_commands=_GENERAL,
        default_parameter=DEFAULTS,
        config=read_values,
        result_action="return_value",
    )

    @app.default
    def options(
        given: Annotated[str | None, Parameter(name="MODEL", help=_MODEL_HELP)] = None,
        /,
        *,
        config: Annotated[Path | None, Parameter(name=CONFIG_OPTION, help=_CONFIG_HELP)] = None,
        found: Options = _NOTHING,
        vllm: Annotated[_VllmOptions, _VLLM] = _NO_VLLM,  # type: ignore[valid-type]
    ) -> Options:
        model, cache = found.model, found.cache
        if given is not None and model.model is not None:
            raise ConfigError(f"MODEL is given twice, {given} and --model {model.model}: omit one of them")
        template = None if model.chat_template is None else read_template(model.chat_template)
        checked = replace(
            found,
            model=replace(model, model=model.model if given is None else given, chat_template=template),
            service=found.service.with_environment(environment),
            cache=replace(cache, redis=cache.redis or environment.get(URL_VARIABLE) or None),
        )
        _check_vllm_options(vllm)
        checked.check()
        return checked

    return app


_MODEL_HELP = "Hugging Face model directory or id (default: the bundled model)"
_CONFIG_HELP = "YAML or TOML file that contains options; options on the command line take precedence"
_EXAMPLES = """\
examples:
  ssd-serve    # serves the bundled model on http://127.0.0.1:8000
  ssd-serve Qwen/Qwen3-0.6B --cache-dir cache/
  ssd-serve Qwen/Qwen3-0.6B --warm warm/ --redis redis://localhost:6379/0
  ssd-serve --config ssd.yaml --port 8001
  ssd-serve doctor Qwen/Qwen3-0.6B    # checks machine, model, cache and Redis
"""


def parse_arguments(arguments: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> Options:
    """Parse the command line. If it is invalid, print one line and exit with status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:  # as in `vllm serve`; a directory of that name is ./serve
        del words[0]
    try:
        options = run_app(build_app(environment), words)
    except ConfigError as error:
        report_start("error", f"{error} (see ssd-serve --help)")
        sys.exit(2)
    if not isinstance(options, Options):
        sys.exit(0)  # it was help, or the version
    return options


def read_template(text: str) -> str:
    """Return a chat template: the content of the file ``text``, or ``text`` itself if it looks like a template.

    Raises ConfigError if the file cannot be read.
    """
    if any(mark in text for mark in ("{{", "{%", "\n")):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"--chat-template {text[:200]} is neither a template nor a readable file: {reason}"
        ) from error
