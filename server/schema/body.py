"""A JSON object sent by a client. Unknown fields are refused; an explicit null means absent, as at OpenAI."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.base.limits import Limits
from server.schema.counts import require_counts
from server.schema.fields import honoured_fields
from server.schema.parts import UNKNOWN_FIELD, meant
from ssd.errors import RequestError, shown

_DEFAULT_LIMITS = Limits()


class Body(BaseModel):
    """A JSON object sent by a client."""

    # Strict: "5" is no number and 1 no boolean, as at OpenAI.
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(default=None, max_length=1024)

    @classmethod
    def parse(cls, content: Any, limits: Limits = _DEFAULT_LIMITS, *, ignores_unknown: bool = False) -> Self:
        """Validate decoded JSON; raises RequestError with the field at fault as ``param``.

        ``ignores_unknown`` : fields of the body that no schema knows are left unread. Those of its parts are refused.
        Takes milliseconds for the largest body within ``limits``, whatever is wrong in it: one mistake is looked for.
        """
        if not isinstance(content, dict):
            raise RequestError(f"the body must be a JSON object, got {type(content).__name__}")
        fields = cls.honoured(content)
        unknown = [name for name in fields if name not in cls.model_fields]
        if unknown and not ignores_unknown:  # before anything else, since it explains other mistakes
            raise _unknown_field(unknown[0], meant(unknown[0], cls.model_fields))
        for name in unknown:
            del fields[name]
        require_counts(fields, limits)
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise _request_error(error) from None
        body.require_within(limits)
        return body

    @classmethod
    def honoured(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The fields the schema must understand; raises RequestError for one that cannot be honoured."""
        return honoured_fields(content, cls.model_fields)

    def keep_out_of_cache(self) -> None:
        """As if it said that nothing may be learned from it; nothing is where there is no output."""

    def require_within(self, limits: Limits) -> None:
        """Raises RequestError for what can be measured only now."""


def _unknown_field(name: str, near: str | None) -> RequestError:
    advice = "remove it, or check its spelling" if near is None else f"did you mean {near}?"
    return RequestError(f"unknown field {shown(name)}: {advice}", param=name[:128])


def _request_error(error: ValidationError) -> RequestError:
    """The first complaint of pydantic, in our words; unknown fields first, since they explain the others."""
    complaints = error.errors(include_url=False, include_input=False)
    unknown = [complaint for complaint in complaints if complaint["type"] == UNKNOWN_FIELD]
    first = (unknown or complaints)[0]
    name = ".".join(str(part) for part in first["loc"])
    # A union's branches are part of pydantic's location; the client knows the field only.
    param = str(first["loc"][0]) if first["loc"] else None
    if unknown:
        return _unknown_field(f"{name}.{first['ctx']['name']}", first["ctx"]["near"])
    if first["type"] == "missing":
        return RequestError(f"the field {name!r} is required", param=param)
    return RequestError(f"{param}: {first['msg']:.500}", param=param)
