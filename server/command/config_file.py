"""``--config FILE``: options from a YAML or TOML file, as words of a command line."""

from __future__ import annotations

import argparse
import json
import logging
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server.command.parser import Parser, nearest
from ssd.errors import ConfigError, first_line

log = logging.getLogger(__name__)

CONFIG_OPTION = "--config"
_SECRETS = {"api_key", "redis"}


class Words(NamedTuple):
    """Parts of a command line."""

    positional: list[str]
    options: list[str]


def words_of(path: Path, parser: Parser, given: set[str]) -> Words:
    """The options of a file, as the command line would spell them, without those whose ``dest`` is in ``given``.

    Keys are names of options, with ``-`` or ``_``; MODEL is ``model``. Raises ConfigError, which names the key.
    """
    content = _read(path)
    words = Words([], [])
    for key, value in content.items():
        name = str(key).replace("_", "-")
        action = parser.action_of(name)
        if action is None or f"--{name}" == CONFIG_OPTION:
            names = [option.removeprefix("--") for option in parser.option_names()]
            raise ConfigError(f"{CONFIG_OPTION} {path}: there is no option {str(key)[:80]!r}{nearest(name, names)}")
        if action.dest in given:
            continue
        try:
            spelled = _spell(f"--{name}", action, value)
        except ValueError as error:
            raise ConfigError(f"{CONFIG_OPTION} {path}: {key}: {error}") from error
        (words.options if action.option_strings else words.positional).extend(spelled)
    if _SECRETS & {str(key).replace("-", "_") for key in content} and _others_may_read(path):
        log.warning("%s %s holds a secret and may be read by other users: chmod 600 it", CONFIG_OPTION, path)
    return words


def _read(path: Path) -> Mapping[Any, Any]:
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
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{CONFIG_OPTION} {path} must hold names of options and their values, got {_kind(content)}")
    return content


def _spell(option: str, action: argparse.Action, value: Any) -> list[str]:
    """One option and its value as words; raises ValueError with what is wrong with the value."""
    is_flag = action.nargs == 0
    if is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, got {_kind(value)}")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [option if value else option.replace("--", "--no-", 1)]
        return [option] if value else []
    if isinstance(value, bool) or value is None:
        raise ValueError(f"expected a value, got {_kind(value)}")
    values = [_text(each) for each in value] if isinstance(value, list) else [_text(value)]
    if not action.option_strings:
        return values
    if isinstance(action, argparse._AppendAction):
        return [f"{option}={each}" for each in values]
    if action.nargs == "+":
        # Behind "=" argparse takes one value only; of several, a later word that began with "-" would be an option.
        return [option, *values]
    if isinstance(value, list):
        return [f"{option}={json.dumps(value)}"]
    return [f"{option}={values[0]}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) or value is None else str(value)


def _kind(value: Any) -> str:
    names = {dict: "a table", list: "a list", str: "text", bool: str(value).lower(), type(None): "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _others_may_read(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
