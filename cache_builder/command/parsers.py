"""What the parsers of several commands have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ssd.errors import SSDError
from ssd.sharing.connection import URL_VARIABLE

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec

    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object


CACHE_DIRECTORY = "what `ssd-cache build` made, or CACHE_DIR/NAMESPACE of a server"
"""Help for a directory that a command reads."""


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], *, help: str, description: str = ""
) -> argparse.ArgumentParser:
    """A command ``name`` that calls ``run`` with its options; ``help`` : its line in the list of commands."""
    command = commands.add_parser(
        name,
        help=help,
        description=description or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


def add_redis_argument(command: argparse.ArgumentParser) -> None:
    """``--redis URL``, as the servers have it."""
    command.add_argument("--redis", metavar="URL", help=f"the servers' --redis (default: ${URL_VARIABLE})")


def redis_url_of(options: argparse.Namespace) -> str:
    """What ``add_redis_argument`` was given, or the environment; raises SSDError where there is neither."""
    url = options.redis or os.environ.get(URL_VARIABLE)
    if not url:
        raise SSDError(f"no Redis is named: give --redis URL, or set {URL_VARIABLE}")
    return str(url)


def codec_of(options: argparse.Namespace) -> TextCodec | None:
    """The tokenizer that ``--tokenizer`` names, None where it was not given. Raises ModelError."""
    if options.tokenizer is None:
        return None
    from ssd.text.codec import TextCodec

    return TextCodec.load(options.tokenizer)


def add_store_arguments(command: argparse.ArgumentParser) -> None:
    """``--redis URL`` and ``--store URL``, as the servers have ``--redis`` and ``--publish-to``."""
    add_redis_argument(command)
    command.add_argument("--store", metavar="URL", help="the servers' --publish-to, where they have one")


def store_of(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """URLs of Redis and of the store; raises SSDError where there is neither."""
    if options.redis is None and options.store is not None:
        return os.environ.get(URL_VARIABLE) or None, str(options.store)
    return redis_url_of(options), options.store


def fingerprint_for(options: argparse.Namespace) -> str:
    """Of the tokenizer whose namespace is meant: the one there is. Raises SSDError."""
    from ssd.retrieval.names import check_fingerprint
    from ssd.sharing.published.transfer import find_fingerprints

    if options.fingerprint is not None:
        return check_fingerprint(options.fingerprint)
    found = find_fingerprints(*store_of(options), options.namespace)
    if len(found) == 1:
        return found[0]
    if not found:
        raise SSDError(f"there is nothing of namespace {options.namespace}: is it the servers' --namespace?")
    raise SSDError(f"several tokenizers have a namespace {options.namespace}: give --fingerprint, one of {found}")
