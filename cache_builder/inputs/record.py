"""Records as they are read from input files, and the error for inputs that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from cache_builder.inputs.chat_formats import ANSWER_KEYS, CONVERSATIONS, PROMPT_KEYS
from cache_builder.inputs.recorded_responses import STATUSES
from ssd.errors import ConfigError, SSDError

Format: TypeAlias = Literal["auto", "text", "jsonl", "csv", "parquet", "arrow"]
FORMATS: Final = get_args(Format)

Progress: TypeAlias = Callable[[int], None]
"""A callback that receives the number of bytes read from an input since its last call."""

STANDARD_INPUT: Final = "-"

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""The UTF-8 byte order mark, which some programs write at the beginning of a text file."""

LONGEST_RECORD: Final = 1 << 26
"""The maximum size of a record in bytes; a longer record indicates another file format or a decompression bomb."""


class InputError(SSDError):
    """An input cannot be read or understood. The message begins with the file and, if known, the line."""


@dataclass(frozen=True, slots=True)
class InputRecord:
    """A document, JSON object or table row that was read from an input.

    Attributes:
        where: "file" or "file:line", for messages.
        text: The text of the record; empty if ``line`` is given.
        line: The fields of a record that is parsed already, such as a table's row.
    """

    where: str
    text: str
    is_json: bool
    line: Mapping[str, Any] | None = None


def display_name(name: str) -> str:
    return "standard input" if name == STANDARD_INPUT else name


NAMES = ("text", "prompt", "completion", "messages", "token_ids", "prompt_length")
COLUMNS = (
    *NAMES,
    *PROMPT_KEYS,
    *ANSWER_KEYS,
    *STATUSES,
    *(
        "conversations mapping current_node chat_messages observations attributes events resourceSpans "
        "instruction question context history instructions system system_prompt type tools model_parameters "
        "modelParameters optional_params chat_template_kwargs"
    ).split(),
)
"""The names of all fields that some supported record format uses. Other columns of tables are not read."""
_SETS = (
    {"text"},
    {"prompt", "completion"},
    {"messages"},
    {"messages", "completion"},
    {"token_ids"},
    {"token_ids", "prompt_length"},
)
_WHOLE: Final = (*(key for key, _, _ in CONVERSATIONS), "observations", "token_ids")
_MISSING: Final = object()


def get_at_path(line: Any, path: str, missing: Any = None) -> Any:
    """Return a field of a record, or ``missing``. The path ``a.b`` or ``a.0`` selects a nested field."""
    if isinstance(line, Mapping) and path in line:
        return line[path]
    for name in path.split("."):
        if isinstance(line, Mapping) and name in line:
            line = line[name]
        elif isinstance(line, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(line):
            line = line[int(name[:9])]
        else:
            return missing
    return line


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The option ``--field``, which names the fields of records in a format that is not supported.

    Attributes:
        names: Maps names of supported fields, such as "prompt", to the names in the user's records.
        others: Further columns to read from tables.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @classmethod
    def parse(cls, options: Iterable[str]) -> FieldNames:
        """Parse the values of ``--field``: ``OURS=THEIRS``, or ``THEIRS`` for ``text=THEIRS``.

        Raises ConfigError if a value is invalid, or if the fields together are no supported set.
        """
        names: dict[str, str] = {}
        for option in options:
            ours, equals, theirs = option.partition("=")
            if not equals:
                ours, theirs = "text", option
            if ours not in NAMES or not theirs or ours in names:
                raise ConfigError(
                    f"--field {option} is invalid: write OURS=THEIRS, where OURS is one of {', '.join(NAMES)} and "
                    "occurs only once"
                )
            names[ours] = theirs
        if names and names.keys() not in _SETS:
            raise ConfigError(
                '--field: name one of these sets: "text", "prompt" and "completion", "messages" and "completion", '
                '"messages", or "token_ids"'
            )
        return cls(names)

    def rename(self, line: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the record with the fields given by ``--field`` under the names that the builder reads.

        Other fields from which the builder would also read a prompt or an answer are removed. A record that lacks a
        field given by ``--field`` is returned unchanged.
        """
        found = {ours: get_at_path(line, theirs, _MISSING) for ours, theirs in self.names.items()}
        if not found or any(value is _MISSING for value in found.values()):
            return line
        taken = PROMPT_KEYS if "completion" not in found and "messages" in found else (*PROMPT_KEYS, *ANSWER_KEYS)
        return {**{key: value for key, value in line.items() if key not in (*_WHOLE, *taken)}, **found}

    def columns(self) -> frozenset[str]:
        return frozenset(
            (*self.names.values(), *(path.partition(".")[0] for path in self.names.values()), *self.others, *COLUMNS)
        )


DEFAULT_FIELD_NAMES = FieldNames()
