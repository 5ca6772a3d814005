"""Base classes of request bodies, and error messages for invalid ones.

Unknown fields are rejected, and null means absent, as in OpenAI's API.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from server.base.limits import Limits
from ssd.errors import RequestError, quote_value

UNKNOWN_FIELD = "unknown_field"
"""The type of pydantic's error for an unknown field. The error's context has the ``name`` and a suggestion."""


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known field name that is most similar to an unknown name; None if no known name is similar."""
    return next(iter(get_close_matches(name[:64], known, n=1, cutoff=0.75)), None)


class RequestObject(BaseModel):
    """A JSON object in a request. Types are not converted, unknown fields are rejected, and null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, content: Any) -> Any:
        """Raise one error for all unknown fields, because pydantic would create one for each of possibly thousands."""
        if isinstance(content, dict):
            content = {name: value for name, value in content.items() if value is not None}
            known = {field.alias or name for name, field in cls.model_fields.items()}
            name = next((name for name in content if name not in known), None)
            if name is not None:
                raise PydanticCustomError(
                    UNKNOWN_FIELD, "unknown field", {"name": name, "near": suggest_name(name, known)}
                )
        return content


IGNORED: Mapping[str, str] = {
    "metadata": "requests are not stored, so metadata cannot be stored with them",
    "user": "tenants are identified by their API keys",
    "safety_identifier": "tenants are identified by their API keys",
    "service_tier": "the server has only one service tier",
    "verbosity": "only OpenAI's own models support it",
    "prompt_cache_key": "the prefix cache needs no hint",
    "prompt_cache_options": "the prefix cache needs no hint",
    "prompt_cache_retention": "the prefix cache needs no hint",
    "request_id": "the header `x-request-id` sets the request id",
    "session_id": "the server keeps no sessions",
    "spaces_between_special_tokens": "the supported tokenizers insert no spaces there",
}
"""Maps each request field that is ignored to the reason. None of these fields would change the output."""

ELSEWHERE = frozenset(
    """cache_prompt detokenize do_sample enable_thinking grammar kv_transfer_params max_new_tokens mirostat n_predict
    options provider reasoning repeat_last_n repeat_penalty slot_id thinking top_a transforms typical_p usage vllm_xargs
    """.split()
)
"""Names of request fields that only other inference servers have. Such fields are rejected like any unknown field. The
log shows these names, but no other unknown name, which may be private text.
"""

UnsupportedFields = Mapping[str, tuple[tuple[Any, ...], str]]
"""The type of tables of request fields that are rejected because they would change the output.

A table maps a field to the values that are accepted because they have no effect, and to the reason for rejecting
other values.
"""

REFUSED: UnsupportedFields = {
    "suffix": (("",), "the server continues text, it does not fill in the middle"),
    "use_beam_search": ((False,), "drafts are verified against one continuation, not several at a time"),
    "length_penalty": ((1.0, 1), "it ranks the beams of a beam search, which is not supported"),
    "modalities": ((["text"],), "the model reads and writes only text"),
    "audio": ((), "the model reads and writes only text"),
    "web_search_options": ((), "the server does not access the network. Give the model a tool that does"),
    "truncate_prompt_tokens": ((), "a prompt is never shortened. Send a shorter prompt"),
    "chat_template": ((), "a template is a program, so only the operator can set it, by --chat-template"),
    "best_of": ((), "choices are not ranked. Send best_of equal to n, or omit it"),
    **dict.fromkeys(("functions", "function_call"), ((), "OpenAI deprecated it. Send tools and tool_choice")),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        ((), "vLLM deprecated it. Send structured_outputs, or response_format"),
    ),
}
"""The unsupported fields of completions and chat completions. A body class that declares one of these fields supports
this field.
"""


def require_counts(body: dict[str, Any], limits: Limits) -> None:
    """Raise RequestError if a field has too many elements or characters. It is called before the body is validated."""
    _require_choices(body, limits)
    for name, count, most, unit in (
        ("logit_bias", _length, 1024, "entries"),
        ("allowed_token_ids", _length, 1 << 17, "token ids"),
        ("messages", _length, limits.max_messages, "messages"),
        ("input", _length, limits.max_messages, "items"),
        ("bad_words", _length, 1000, "words"),
        ("bad_words", _characters, 1 << 14, "characters"),
        ("stop", _characters, 1 << 12, "characters"),
        ("tools", _length, limits.max_tools, "functions"),
        ("tools", _json_length, 1 << 18, "characters"),
    ):
        if (found := count(body.get(name))) > most:
            raise RequestError(f"{name} has {found} {unit}, but at most {most} are accepted: omit some", param=name)


def _require_choices(body: dict[str, Any], limits: Limits) -> None:
    prompt: Any = body.get("prompt")
    n: Any = body.get("n")
    is_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)  # token ids are one prompt
    prompts = len(prompt) if is_several else 1
    choices = prompts * (n if type(n) is int and n > 0 else 1)
    if choices > limits.max_choices:
        param = "prompt" if prompts > limits.max_choices else "n"
        raise RequestError(
            f"prompt and n request {choices} choices, at most {limits.max_choices} are allowed: send several requests",
            param=param,
        )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _json_length(value: Any) -> int:
    """Return the number of characters of a value as JSON; infinite if it is nested too deeply to be serialized."""
    if value is None:
        return 0
    try:
        return len(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return sys.maxsize


def _characters(value: Any) -> int:
    texts = value if isinstance(value, list) else [value]
    return sum(len(text) for text in texts if isinstance(text, str))


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let a RequestError in this context name fields as the client's API does, not as chat completions do."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, names) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return a copy of an error that names fields as the client's API does, not as chat completions do.

    ``names`` maps field names of chat completions to those of the client's API.
    """
    here, said = error.param or "", str(error)
    if here in names and said.startswith(here):
        said = names[here] + said.removeprefix(here)
    fields = "|".join(name for name in names if "_" in name)  # single words may also be ordinary text
    said = re.sub(rf"\b({fields})\b", lambda found: names[found[0]], said) if fields else said
    return type(error)(said, param=names.get(here, error.param))


_DEFAULT_LIMITS = Limits()


class Body(BaseModel):
    """The base class of request bodies. ``chat_names`` maps chat completion fields to names in this body."""

    # Strict as OpenAI's API: "5" is not a number, and 1 is not a boolean.
    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[Mapping[str, str]] = IGNORED
    refused: ClassVar[UnsupportedFields] = REFUSED
    chat_names: ClassVar[Mapping[str, str]] = {}

    model: str | None = Field(default=None, max_length=1024)

    @classmethod
    def parse(cls, content: Any, limits: Limits = _DEFAULT_LIMITS, *, ignores_unknown: bool = False) -> Self:
        """Validate decoded JSON. Raises RequestError with the first invalid field as ``param``."""
        if not isinstance(content, dict):
            raise RequestError(f"the body must be a JSON object, got {type(content).__name__}")
        fields = cls.supported_fields(content)
        unknown = [name for name in fields if name not in cls.model_fields]
        if unknown and not ignores_unknown:  # first, because an unknown field explains other errors
            raise _unknown_field(unknown[0], suggest_name(unknown[0], cls.model_fields))
        for name in unknown:
            del fields[name]
        require_counts(fields, limits)
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise _request_error(error, fields) from None
        body.require_within(limits)
        return body

    @classmethod
    def supported_fields(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the request's fields without those that are ignored.

        Raises RequestError for unsupported fields that would change the output.
        """
        supported_fields = {}
        for name, value in content.items():
            if value is None or (name in cls.ignored and name not in cls.model_fields):
                continue
            if name in cls.model_fields or name not in cls.refused:
                supported_fields[name] = value
                continue
            values, reason = cls.refused[name]
            if name == "best_of":
                values = (content.get("n") or 1,)
            # Types are compared too, because 0 == False, but ``logprobs: 0`` is a request.
            if not any(type(value) is type(neutral) and value == neutral for neutral in values):
                raise RequestError(f"{name} is not supported: {reason}", param=name)
        return supported_fields

    def disable_caching(self) -> None:
        """Exclude the text of the request and its output from the cache."""

    def require_within(self, limits: Limits) -> None:
        """Raise RequestError if the request exceeds limits that can only be checked after validation."""


T = TypeVar("T")


def validate_field(kind: TypeAdapter[T], value: Any, param: str, where: str | None = None) -> T:
    """Return a value validated by pydantic. Raises RequestError that names the invalid part by its JSON path.

    ``where`` is the JSON path of the value itself (default: ``param``).
    """
    try:
        return kind.validate_python(value, strict=True)
    except ValidationError as error:
        raise _request_error(error, value, where or param, param) from None


def _unknown_field(name: str, near: str | None, param: str | None = None) -> RequestError:
    advice = "remove it, or check its spelling" if near is None else f"did you mean {near}?"
    return RequestError(f"unknown field {quote_value(name)}: {advice}", param=param or name[:128])


def _request_error(error: ValidationError, value: Any, where: str = "", param: str | None = None) -> RequestError:
    """Convert the most informative of pydantic's errors to a RequestError for the client.

    ``value`` is the JSON value at the path ``where``.
    """
    found = [
        (complaint, _place(complaint, value)) for complaint in error.errors(include_url=False, include_input=False)
    ]
    first, place = min(found, key=lambda each: _rank(*each))
    name = _path(where, place)
    if first["type"] == UNKNOWN_FIELD:  # an unknown field explains the other errors
        return _unknown_field(_path(name, [first["ctx"]["name"]]), first["ctx"]["near"], param)
    param = param or (str(place[0]) if place else None)
    if first["type"] == "missing":
        return RequestError(f"the field {quote_value(name)} is required", param=param)
    if first["type"] == "value_error":
        return RequestError(f"{name:.160}: {first['ctx']['error']}", param=param)
    same = [
        _describe_requirement(each) for each, there in found if there == place and _is_kind(each) == _is_kind(first)
    ]
    said, *others = dict.fromkeys(same)
    said = " or ".join([said, *(other.removeprefix("be ") for other in others)])
    return RequestError(f"{name:.160} must {said:.500}", param=param)


def _rank(complaint: ErrorDetails, place: Sequence[str | int]) -> tuple[bool, int, bool, bool]:
    """Return a sort key for pydantic's errors, by which the most informative error comes first.

    If a field may have several types, pydantic reports errors for each type.
    """
    is_of_type = complaint["type"] == "literal_error" and place[-1:] == ["type"]  # explains other errors
    is_said = complaint["type"] in ("value_error", "union_tag_invalid") or is_of_type
    return complaint["type"] != UNKNOWN_FIELD, -len(place), not is_said, _is_kind(complaint)


def _is_kind(complaint: ErrorDetails) -> bool:
    """Return whether pydantic's error only says which type is expected, although several types may be allowed."""
    return complaint["type"] == "literal_error" or complaint["type"].endswith("_type")


_KINDS = {
    "string_type": "be a string",
    "list_type": "be a list",
    "bool_type": "be true or false",
    "int_type": "be an integer",
    "float_type": "be a number",
    "dict_type": "be an object",
    "model_type": "be an object",
    "model_attributes_type": "be an object",
}


def _describe_requirement(complaint: ErrorDetails) -> str:
    """Return the requirement that a value violates, in words without names of Python classes."""
    kind, told = complaint["type"], complaint.get("ctx", {})
    tag = "role" if "role" in told.get("discriminator", "") else "type"
    if kind == "union_tag_invalid":
        return f"have one of the {tag}s {told['expected_tags']}, got {quote_value(told['tag'])}"
    if kind == "union_tag_not_found":
        return f"have a {tag}"
    said = re.sub(r"^\w+ should ", "", complaint["msg"]).replace(" after validation", "")
    return _KINDS.get(kind, said.replace("be False", "be false"))


def _path(where: str, place: Iterable[str | int]) -> str:
    for part in place:
        where += f"[{part}]" if isinstance(part, int) else f".{part:.80}" if where else f"{part:.80}"
    return where


def _place(complaint: ErrorDetails, value: Any) -> list[str | int]:
    """Return the JSON path of pydantic's error in ``value``.

    Pydantic's location also contains names of types, which may be names of fields too. So all subsequences of the
    location are tried until a path exists in ``value`` and fits the error.
    """

    def fits(place: list[str | int], here: Any) -> bool:
        if complaint["type"] == UNKNOWN_FIELD:
            return isinstance(here, Mapping) and complaint["ctx"]["name"] in here
        return complaint["type"] != "missing" or bool(place and place[-1] == complaint["loc"][-1])

    def existing_paths(rest: tuple[str | int, ...], here: Any, place: list[str | int]) -> Iterator[list[str | int]]:
        if not rest:
            if fits(place, here):
                yield place
            return
        part, *others = rest
        is_inside = (isinstance(here, Mapping) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        )
        if is_inside:
            yield from existing_paths(tuple(others), here[part], [*place, part])
        elif complaint["type"] == "missing" and not others and isinstance(here, Mapping):
            yield [*place, part]
        yield from existing_paths(tuple(others), here, place)

    return next(existing_paths(complaint["loc"], value, []), [])
