"""Fields that say which functions a model may call, and whether it has to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from server.schema.parts import Part
from ssd.errors import RequestError

ToolMode = Literal["none", "auto", "required"]

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$"
"""What every format can write, and more than OpenAI takes: names from tool servers have dots and slashes."""


class Function(Part):
    """A function as the model is told of it. ``strict`` changes nothing here: forced calls follow their schema."""

    name: str = Field(min_length=1, max_length=128, pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of an object; left out: no limits")
    strict: bool | None = None

    def told(self) -> dict[str, Any]:
        """What a chat template is given, in the order that models are trained on: nothing the client left out."""
        said = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {key: value for key, value in said.items() if value is not None}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """A JSON schema; any object where none was given, or an empty one."""
        return self.parameters or {"type": "object"}


class Tool(Part):
    """A function, the only kind of tool there is."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, content: Any) -> Any:
        kind = content.get("type") if isinstance(content, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f'only tools of type "function" can be called here, got {kind!r:.80}: leave it out')
        return content


class NamedFunction(Part):
    """One of the request's functions."""

    name: str = Field(max_length=128)


class NamedTool(Part):
    """One of the request's tools."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Part):
    """Some of the request's tools, and whether one has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)] = Field(min_length=1)


class AllowedToolChoice(Part):
    """``tool_choice`` for some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What the fields of a request come to.

    ``functions`` : all the model is told of, and may call. ``mode`` : "required" where it has to call one of them.
    ``parallel`` : it may call more than one. ``is_named`` : the only one was chosen by the request.
    ``is_older`` : asked for as ``functions``, and to be answered as ``function_call``.
    """

    functions: tuple[Function, ...]
    mode: ToolMode
    parallel: bool
    is_named: bool = False
    is_older: bool = False

    def told(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [{"type": "function", "function": function.told()} for function in self.functions]


class ToolFields(BaseModel):
    """The tools of a conversation. ``functions`` and ``function_call`` are OpenAI's older names."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = Field(
        default=None, description='"auto" where there are tools; "required" and a named tool are held to by a grammar'
    )
    parallel_tool_calls: bool = Field(default=True, description="false: at most one call in an answer")
    functions: Annotated[list[Function], Field(fail_fast=True)] = Field(default_factory=list)
    function_call: Literal["none", "auto"] | NamedFunction | None = None

    @field_validator("tools", "functions")
    @classmethod
    def _names_differ(cls, given: list[Any]) -> list[Any]:
        names = [(each.function if isinstance(each, Tool) else each).name for each in given]
        if len(set(names)) != len(names):
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            raise ValueError(f"two functions have the name {twice!r}")
        return given

    def tool_use(self) -> ToolUse | None:
        """What is asked for; None without tools. Raises RequestError where the fields contradict each other."""
        if self.tools and (self.functions or self.function_call is not None):
            raise RequestError("tools and functions exclude each other: leave out functions", param="functions")
        if self.functions or self.function_call is not None:
            return self._by_older_names()
        functions = tuple(tool.function for tool in self.tools)
        choice = self.tool_choice
        if not functions:
            if choice not in (None, "none", "auto"):
                raise RequestError("tool_choice needs tools: give the functions it speaks of", param="tool_choice")
            return None
        parallel = self.parallel_tool_calls
        if isinstance(choice, NamedTool):
            chosen = _chosen(functions, [choice.function.name], "tool_choice")
            return ToolUse(functions=chosen, mode="required", parallel=False, is_named=True)
        if isinstance(choice, AllowedToolChoice):
            allowed = choice.allowed_tools
            chosen = _chosen(functions, [tool.function.name for tool in allowed.tools], "tool_choice")
            return ToolUse(functions=chosen, mode=allowed.mode, parallel=parallel)
        return ToolUse(functions=functions, mode=choice or "auto", parallel=parallel)

    def _by_older_names(self) -> ToolUse | None:
        choice, functions = self.function_call, tuple(self.functions)
        if not functions:
            if isinstance(choice, NamedFunction):
                raise RequestError("function_call needs functions: give the one it names", param="function_call")
            return None
        if isinstance(choice, NamedFunction):
            chosen = _chosen(functions, [choice.name], "function_call")
            return ToolUse(functions=chosen, mode="required", parallel=False, is_named=True, is_older=True)
        return ToolUse(functions=functions, mode=choice or "auto", parallel=False, is_older=True)

    def without_tools(self) -> Self:
        """The same conversation where no tool is told of."""
        return self.model_copy(update={"tools": [], "tool_choice": None, "functions": [], "function_call": None})


def _chosen(functions: tuple[Function, ...], names: Sequence[str], param: str) -> tuple[Function, ...]:
    """Those of ``names``, in the order they were given in."""
    wanted = set(names)
    if unknown := wanted - {function.name for function in functions}:
        raise RequestError(f"{param} names {min(unknown)!r:.140}, which is none of the functions given", param=param)
    return tuple(function for function in functions if function.name in wanted)
