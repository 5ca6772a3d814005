"""What all parts of a request's body have in common."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN_FIELD = "unknown_field"
"""The kind of complaint about a name that is not known; its context has the ``name``, and what may be meant."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """The name that an unknown one may be a misspelling of; None where none is near. O(names)."""
    return next(iter(get_close_matches(name[:64], known, n=1, cutoff=0.75)), None)


class Part(BaseModel):
    """An object in a request. Strict: "5" is no number and 1 no boolean, as at OpenAI; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, content: Any) -> Any:
        """One complaint, where pydantic writes one for each unknown name: there may be very many."""
        if isinstance(content, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            name = next((name for name in content if name not in known), None)
            if name is not None:
                raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"name": name, "near": meant(name, known)})
        return content
