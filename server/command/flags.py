"""Command line options from typed dataclass fields, parsed by cyclopts, with numbers such as 4GiB or 32k."""

from __future__ import annotations

import logging
import re
import stat
import textwrap
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.config import Dict
from cyclopts.exceptions import UnusedCliTokensError

from ssd.errors import ConfigError, first_line
from ssd.numbers import format_number, parse_number

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

log = logging.getLogger(__name__)

CONFIG_OPTION = "--config"


def shown_default(value: object) -> str | None:
    """Return the default value of an option as the help shows it; None if the help shows none."""
    if isinstance(value, bool) or value in ((), "", None):
        return "on" if value is True else None
    if isinstance(value, tuple):
        return ", ".join(value)
    return format_number(value) if isinstance(value, int) else str(value)


DEFAULTS = Parameter(negative="", show_default=shown_default, allow_repeating=True)
"""The cyclopts settings of all options. There are no ``--no-`` forms, and the last value of a repeated option counts.
"""


def group(title: str, *, show: bool = True) -> Parameter:
    """Return the cyclopts settings that show the options of a dataclass under a title in the help."""
    return Parameter(name="*", group=Group.create_ordered(title, show=show))


def check_range(option: str, value: float, least: int, most: int, unit: str = "") -> None:
    if not least <= value <= most:  # also rejects NaN
        raise ConfigError(f"{option} must be within {least}..{most}{unit}, got {value}")


def run_app(app: App, words: Sequence[str]) -> Any:
    """Run a cyclopts app and return its result; None if it printed help. Raises ConfigError for an invalid option."""
    try:
        return app(words, exit_on_error=False, print_error=False)
    except UnusedCliTokensError as error:
        raise ConfigError(
            f"unrecognized argument {' '.join(error.unused_tokens or ())}: remove it, because only one MODEL "
            "can be given"
        ) from error
    except CycloptsError as error:
        raise ConfigError(" ".join(str(error).split()).rstrip(".")) from error


def show_help(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print the help of a group of options, one block per option; used as cyclopts' ``help_formatter``."""
    if not panel.entries:
        return
    lines = [f"{panel.title}:"]
    for entry in panel.entries:
        kind = "{" + ",".join(entry.choices) + "}" if entry.choices else entry.metavar or ""
        default = "" if entry.default is None else f" (default: {entry.default})"
        about = " ".join(f"{getattr(entry.description, 'primary_renderable', '')}{default}".replace("``", "`").split())
        lines.append(f"  {', '.join(entry.display_labels)} {kind}".rstrip())
        lines += textwrap.wrap(about, min(console.width, 100), initial_indent=" " * 6, subsequent_indent=" " * 6)
    console.print("\n".join(lines), "", sep="\n", highlight=False, markup=False, soft_wrap=True)


def read_values(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Add option values from the file of ``--config``, and convert numbers such as 4GiB to digits.

    Used as ``App.config`` of cyclopts.
    """
    filed = next((argument for argument in arguments if CONFIG_OPTION in argument.names), None)
    if filed is not None and filed.tokens:
        path = Path(filed.tokens[-1].value)
        content = {str(key): value for key, value in _content(path).items() if value is not None}
        if arguments[0].tokens:  # MODEL, which the command line gives
            content.pop("model", None)
        names = [name.removeprefix("--") for argument in arguments for name in argument.names]
        for key in content:
            if (spelled_so := key.replace("_", "-")) not in names or spelled_so == "config":
                near = get_close_matches(spelled_so, names, n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{CONFIG_OPTION} {path}: there is no option {key[:80]!r}{hint}")
        Dict(content, source=str(path))(app, commands, arguments)
        _warn_of_readers(path, content)
    for argument in arguments:
        if argument.hint in (int, int | None) and argument.parameter.converter is None:
            for place, token in enumerate(argument.tokens):
                try:
                    argument.tokens[place] = token.evolve(value=str(parse_number(token.value)))
                except ValueError as error:
                    raise ConfigError(f"{argument.name}: {error}") from error


def _warn_of_readers(path: Path, content: dict[str, Any]) -> None:
    secrets = {key.replace("-", "_"): str(value) for key, value in content.items()}
    has_secret = "api_key" in secrets or re.search("@|password=", secrets.get("redis", ""))
    if has_secret and path.stat().st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        log.warning("%s %s contains a secret and may be read by other users: run chmod 600 on it", CONFIG_OPTION, path)


def _content(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
        else:
            import yaml

            content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{CONFIG_OPTION} {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # YAML's errors share no base with TOML's and with those of wrong bytes
        reason = " ".join(str(error).split())[:300] or first_line(error)
        raise ConfigError(f"{CONFIG_OPTION} {path} cannot be read: {reason}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{CONFIG_OPTION} {path} must map option names to values, e.g. `port: 8000`")
    return content or {}
