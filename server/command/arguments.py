"""The command line of ``ssd-serve``; names and meanings are those of ``vllm serve`` where it has them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from server.base.limits import Limits
from server.base.settings import VERSION
from server.command.cache_options import CacheOptions, add_cache_options, cache_options_of
from server.command.limit_options import add_limit_options, limits_of
from server.command.model_options import ModelOptions, add_model_options, model_options_of
from server.command.page_options import PageOptions, add_page_options, page_options_of
from server.command.service_options import ServiceOptions, add_service_options, service_options_of
from server.command.speculation_options import SpeculationOptions, add_speculation_options, speculation_options_of
from ssd.errors import ConfigError

_EXAMPLES = """\
examples:
  ssd-serve                                   the bundled model on http://127.0.0.1:8000
  ssd-serve Qwen/Qwen3-0.6B --cache-dir cache/
  ssd-serve Qwen/Qwen3-0.6B --warm warm/ --redis redis://localhost:6379/0 --namespace support
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A checked command line, a part for each group of options."""

    service: ServiceOptions
    model: ModelOptions
    speculation: SpeculationOptions
    cache: CacheOptions
    page: PageOptions
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
        return Options(
            service=service_options_of(found, environment),
            model=model_options_of(found),
            speculation=speculation_options_of(found),
            cache=cache_options_of(found, environment),
            page=page_options_of(found),
            limits=limits_of(found),
        )
    except ConfigError as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    """The command line, with defaults and help."""
    parser = _Parser(
        prog="ssd-serve",
        description="OpenAI-compatible server that gets faster the more it is used and never changes the output.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ssd-serve {VERSION}")
    add_service_options(parser)
    add_page_options(parser)
    add_model_options(parser)
    add_limit_options(parser)
    add_speculation_options(parser)
    add_cache_options(parser)
    return parser
