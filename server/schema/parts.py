"""What all parts of a request's body have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN_FIELD = "unknown_field"
"""The kind of complaint about a name that is not known; its context has the ``name``."""


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
                raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"name": name})
        return content
