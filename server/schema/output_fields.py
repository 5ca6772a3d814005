"""Fields that say what an output must look like or is expected to: structured output and prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from server.schema.parts import Part
from ssd.config import GrammarKind, StructuredOutput
from ssd.errors import RequestError


class JsonSchemaFormat(Part):
    """OpenAI's name for a schema; what is not the schema is a hint to the model that is not used here."""

    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Part):
    """``response_format``: text, any JSON object, or JSON of a schema, which always holds strictly."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Part):
    """vLLM's ``structured_outputs``: exactly one of these. ``grammar`` is Lark's, ``regex`` is of Rust's dialect."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class TextPart(Part):
    """A piece of text."""

    type: Literal["text"]
    text: str


class Prediction(Part):
    """``prediction``: text that most of the output is expected to equal. It changes how fast the output comes only."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class OutputFields(BaseModel):
    """What completions and chat completions accept of these; ``guided_*`` are older names of vLLM's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=1000, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    prediction: Prediction | None = None

    def structured_output(self) -> StructuredOutput | None:
        """What was asked for under any name; raises RequestError when that is more than one thing, or none."""
        found = [*self._by_response_format(), *self._by_structured_outputs(), *self._by_guided_fields()]
        if len(found) > 1:
            names = " and ".join(output.param for output in found)
            raise RequestError(f"only one structured output is possible, got {names}: keep one", param=found[1].param)
        return found[0] if found else None

    def _by_response_format(self) -> list[StructuredOutput]:
        asked, name = self.response_format, "response_format"
        if asked is None or asked.type == "text":
            return []
        if asked.type == "json_object":
            return [StructuredOutput("json_object", "", name)]
        if asked.json_schema is None:
            raise RequestError('response_format of type "json_schema" needs the field json_schema', param=name)
        return [StructuredOutput("json_schema", json.dumps(asked.json_schema.schema_), name)]

    def _by_structured_outputs(self) -> list[StructuredOutput]:
        asked, name = self.structured_outputs, "structured_outputs"
        if asked is None:
            return []
        found = _given(name, json_=asked.json_, regex=asked.regex, choice=asked.choice, grammar=asked.grammar)
        if asked.json_object:
            found.append(StructuredOutput("json_object", "", name))
        if not found:
            raise RequestError("structured_outputs needs one of json, regex, choice, grammar, json_object", param=name)
        return found

    def _by_guided_fields(self) -> list[StructuredOutput]:
        return [
            *_given("guided_json", json_=self.guided_json),
            *_given("guided_regex", regex=self.guided_regex),
            *_given("guided_choice", choice=self.guided_choice),
            *_given("guided_grammar", grammar=self.guided_grammar),
        ]


_SPELLED: dict[str, tuple[GrammarKind, Callable[[Any], str]]] = {
    "json_": ("json_schema", lambda schema: schema if isinstance(schema, str) else json.dumps(schema)),
    "regex": ("regex", str),
    "choice": ("choice", json.dumps),
    "grammar": ("grammar", str),
}


def _given(param: str, **sources: Any) -> list[StructuredOutput]:
    return [
        StructuredOutput(_SPELLED[name][0], _SPELLED[name][1](source), param)
        for name, source in sources.items()
        if source is not None
    ]
