"""The command line of ``ssd-serve``; names and meanings are those of ``vllm serve`` where it has them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.base.limits import Limits
from server.base.settings import VERSION
from server.command.cache_options import CacheOptions, add_cache_options, cache_options_of
from server.command.config_file import CONFIG_OPTION, words_of
from server.command.engine_options import EngineOptions, add_engine_options, engine_options_of
from server.command.limit_options import add_limit_options, limits_of
from server.command.model_options import ModelOptions, add_model_options, model_options_of
from server.command.network_options import NetworkOptions, add_network_options, network_options_of
from server.command.observe_options import ObserveOptions, add_observe_options, observe_options_of
from server.command.page_options import PageOptions, add_page_options, page_options_of
from server.command.parser import Parser
from server.command.service_options import ServiceOptions, add_service_options, service_options_of
from server.command.speculation_options import SpeculationOptions, add_speculation_options, speculation_options_of
from server.command.stream_options import StreamOptions, add_stream_options, stream_options_of
from server.command.tool_options import ToolOptions, add_tool_options, tool_options_of
from server.command.vllm_options import add_vllm_options, check_vllm_options
from ssd.errors import ConfigError

_EXAMPLES = """\
examples:
  ssd-serve                                   the bundled model on http://127.0.0.1:8000
  ssd-serve Qwen/Qwen3-0.6B --cache-dir cache/
  ssd-serve Qwen/Qwen3-0.6B --warm warm/ --redis redis://localhost:6379/0 --namespace support
  ssd-serve --config ssd.yaml --port 8001
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A checked command line, a part for each group of options."""

    network: NetworkOptions
    service: ServiceOptions
    streams: StreamOptions
    tools: ToolOptions
    observe: ObserveOptions
    model: ModelOptions
    engine: EngineOptions
    speculation: SpeculationOptions
    cache: CacheOptions
    page: PageOptions
    limits: Limits


def parse_arguments(arguments: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> Options:
    """Read the command line; ends the process with status 2 and one line when it cannot be used."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:  # as in `vllm serve`; a directory of that name is ./serve
        del words[0]
    parser = build_parser()
    try:
        found = parser.parse_whole(words)
        if found.config is not None:
            filed = words_of(found.config, parser, _given(words))
            found = parser.parse_whole([*filed.positional, *words, *filed.options])
        check_vllm_options(found)
        return Options(
            network=network_options_of(found),
            service=service_options_of(found, environment),
            streams=stream_options_of(found),
            tools=tool_options_of(found),
            observe=observe_options_of(found),
            model=model_options_of(found),
            engine=engine_options_of(found),
            speculation=speculation_options_of(found),
            cache=cache_options_of(found, environment),
            page=page_options_of(found),
            limits=limits_of(found),
        )
    except ConfigError as error:
        parser.error(str(error))


def _given(words: Sequence[str]) -> set[str]:
    given = build_parser().given(words)
    return given | {"model"} if "model_option" in given else given


def build_parser() -> Parser:
    """The command line, with defaults and help."""
    parser = Parser(
        prog="ssd-serve",
        usage="ssd-serve [MODEL] [--option VALUE ...]",
        description="OpenAI-compatible server that gets faster the more it is used and never changes the output.\n"
        "Names and meanings of options are those of `vllm serve` where it has them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ssd-serve {VERSION}")
    parser.add_argument(
        CONFIG_OPTION, type=Path, metavar="FILE",
        help="take options from a YAML or TOML file, by their names; the command line wins",
    )  # fmt: skip
    add_model_options(parser)
    add_network_options(parser)
    add_service_options(parser)
    add_engine_options(parser)
    add_stream_options(parser)
    add_page_options(parser)
    add_tool_options(parser)
    add_speculation_options(parser)
    add_cache_options(parser)
    add_limit_options(parser)
    add_observe_options(parser)
    add_vllm_options(parser)
    return parser
