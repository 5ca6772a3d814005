"""``ssd-cache check``: says what does its work now."""

from __future__ import annotations

import argparse

from ssd.errors import ConfigError


def add(command: argparse.ArgumentParser) -> None:
    """Whatever it was given."""
    command.add_argument("arguments", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> int:
    raise ConfigError("check is part of inspect now: ssd-cache inspect --deep DIR")
