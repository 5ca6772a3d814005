"""Whether a checkpoint has all the weights that its configuration asks for, in the shapes it asks for."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ssd.errors import ModelError

log = logging.getLogger(__name__)

_NAMED = 3


def require_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError where weights were made up: absent from the checkpoint, or there in another shape.

    ``info`` : the loading info of ``from_pretrained``, in which tied weights are not missing. Weights of the checkpoint
    that the model has no place for are warned of.
    """
    missing, mismatched, unexpected = (
        info.get(f"{kind}_keys") or () for kind in ("missing", "mismatched", "unexpected")
    )
    advice = "the files do not belong together, or some are not there. Download the model again"
    if mismatched:
        key, found, wanted = min(mismatched)
        raise ModelError(
            f"model {name!r}: {len(mismatched)} weights have other shapes than its config.json says, {key} "
            f"{tuple(found)} instead of {tuple(wanted)} among them: {advice}"
        )
    if missing:
        raise ModelError(
            f"model {name!r} lacks {len(missing)} of the weights that its config.json asks for, "
            f"{_some(missing)}: {advice}"
        )
    if unexpected:
        log.warning(
            "model %r has no place for %d weights of its checkpoint, %s: is this its config.json?",
            name, len(unexpected), _some(unexpected),
        )  # fmt: skip


@contextmanager
def no_load_report() -> Iterator[None]:
    """Without transformers' table of what is missing, which `require_complete` says in a line."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys, key=_by_number)
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")


def _by_number(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]
