"""A parser of command lines that complains in one line and knows the nearest name."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line with what to do."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_whole(self, arguments: Sequence[str]) -> argparse.Namespace:
        """``parse_args``, but an option that is not there is answered with the nearest one that is."""
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"unrecognized argument {name}{nearest(name, self.option_names())}")
        return found

    def option_names(self) -> list[str]:
        """All options, those that help does not show too."""
        return list(self._option_string_actions)

    def action_of(self, name: str) -> argparse.Action | None:
        """What ``--name`` does, or the positional argument of that name; None where there is none."""
        positional = {action.dest: action for action in self._actions if not action.option_strings}
        return positional.get(name) or self._option_string_actions.get(f"--{name}")

    def given(self, arguments: Sequence[str]) -> set[str]:
        """The ``dest`` of everything that a command line says itself. Leaves this parser without defaults."""
        for action in self._actions:
            action.default = argparse.SUPPRESS
        return set(vars(self.parse_whole(arguments)))


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint to put behind "there is no ``name``"; empty where nothing is near."""
    found = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f": did you mean {found[0]}?" if found else ""
