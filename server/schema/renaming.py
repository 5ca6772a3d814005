"""Errors of a chat completion that was asked for by another API."""

from __future__ import annotations

from collections.abc import Mapping

from ssd.errors import RequestError


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, with the field at fault as it is called there. ``names`` : by the chat completion's."""
    if error.param is None or error.param not in names:
        return error
    there, said = names[error.param], str(error)
    if said.startswith(error.param):
        said = there + said.removeprefix(error.param)
    return type(error)(said, param=there)
