"""Errors of a chat completion that was asked for by another API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ssd.errors import RequestError


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """A RequestError from inside has the field at fault as it is called there. ``names`` : by the chat completion's."""
    try:
        yield
    except RequestError as error:
        raise _renamed(error, names) from None


def _renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    if error.param is None or error.param not in names:
        return error
    there, said = names[error.param], str(error)
    if said.startswith(error.param):
        said = there + said.removeprefix(error.param)
    return type(error)(said, param=there)
